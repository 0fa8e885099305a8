"""What one step takes in: the batch that fits, its passes, and what makes room for a larger one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fp8study.analysis.advice.asked import MOST_TOKENS
from fp8study.analysis.laws.communication import Network
from fp8study.analysis.laws.here import law_of
from fp8study.analysis.laws.nearby import REDUCED, as_fp8, fastest, of_use, savers
from fp8study.analysis.laws.room import ROOMIER, largest_batch_of
from fp8study.analysis.laws.shape import ModelShape
from fp8study.core.config import RunConfig, make_config
from fp8study.core.errors import UserError
from fp8study.core.hardware import GpuPeak
from fp8study.core.presets import check_model

#: How much faster FP8 must be for layers that are gathered twice, or computed again, unasked; and
#: how much of its fastest rate BF16 must keep then.
_NOTABLY, _ALIKE = 1.1, 0.98
#: Tokens of the largest steps that are known of (Llama 3, arXiv:2407.21783, section 3.4).
_LARGEST_STEP = 16 * 2**20

#: Fields of a run.
Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Steps:
    """Sizes the steps of a model on one kind of GPU."""

    shape: ModelShape
    peak: GpuPeak
    capacity: float
    """GiB of each GPU."""
    network: Network
    micro_batch_size: int | None
    """Sequences a GPU and pass, as asked for; None: the largest that fits."""
    global_batch_size: int | None
    """Sequences a step on all GPUs, as asked for; None: those of one pass."""

    def sized(self, values: Fields, others: Fields) -> dict[str, Any]:
        """Return a run's fields with its batch and passes, and with what makes room for them.

        `others`: those of its fields that were asked for by name; they stay.

        Raises:
            UserError: A field cannot be that, or the sequences of a step do not come out even.
        """
        base = run = dict(values)
        if self.global_batch_size is not None:
            run = base | self._parted(base)
        config = make_config(run, "advise")
        check_model(config)
        as_fp8(config, "fp8_tensorwise").resolved(on_gpu=True)  # refuses what FP8's GEMMs cannot
        if self.micro_batch_size is not None:
            return run
        if self.global_batch_size is None:
            if not self._batch(run):  # what saves memory first
                run = {**run, **savers(config.resolved(), self.shape, self.capacity), **others}
            base = run = run | {"micro_batch_size": max(1, self._batch(run))}
        return self._faster(run, [{**base, **roomier, **others} for roomier in ROOMIER[1:]])

    def _faster(self, values: dict[str, Any], roomier: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a run with a larger batch, and what makes room for it, where that is much faster.

        In FP8, at a batch at which BF16 is about as fast as it can be: where links are slow,
        computing layers again may cost less than a small batch does.
        """
        law = law_of(self.shape, self.peak, None, self.network)

        def rates(fields: Fields) -> tuple[float, float]:
            bf16 = make_config(fields, "advise").resolved()
            ways = bf16, fastest(bf16, self.shape, law)
            bf16_rate, fp8_rate = (way.tokens_per_step / law(way).total for way in ways)
            return bf16_rate, fp8_rate

        plain = rates(values)
        tries = [(values, *plain)]
        for fields in roomier:
            with suppress(UserError):  # refused on so many GPUs
                way = fields | self._in_its_batch(fields)
                if self._batch(way) >= way["micro_batch_size"]:
                    tries.append((way, *rates(way)))
        least = _ALIKE * max(bf16 for _, bf16, _ in tries)
        best, _, fp8 = max((t for t in tries if t[1] >= least), key=lambda t: t[2])
        return best if fp8 >= _NOTABLY * plain[1] else values

    def _in_its_batch(self, fields: Fields) -> dict[str, Any]:
        """Return the largest batch of a run, or the parts of its step."""
        if self.global_batch_size is not None:
            return self._parted(fields)
        most = _LARGEST_STEP // (fields["num_gpus"] * fields["sequence_length"])
        return {"micro_batch_size": min(self._batch(fields), max(1, most))}

    def _batch(self, fields: Fields) -> int:
        """Return the largest batch at which BF16 and FP8 fit, up to `MOST_TOKENS`; 0: none does."""
        config = make_config(fields, "advise")
        return self._largest(config, as_fp8(config, "fp8_tensorwise"))

    def _largest(self, *ways: RunConfig) -> int:
        return largest_batch_of(ways, self.shape, self.capacity, MOST_TOKENS)

    def _parted(self, values: Fields) -> dict[str, Any]:
        """Part a step among GPUs and passes: in the largest batch that fits, if one does.

        With gradients that each pass reduces, where they leave room for a larger one, or for the
        one asked for, if for FP8 alone; with what else saves memory, if none is asked for or does
        without.

        Raises:
            UserError: They do not come out even, or the number of passes is asked for, too.
        """
        if "gradient_accumulation_steps" in values:
            raise UserError(
                "--global-batch-size: gradient_accumulation_steps follows from it; leave one out"
            )
        sequences, asked = self.global_batch_size or 0, self.micro_batch_size
        least = values["num_gpus"] * (asked or 1)
        a_gpu, rest = divmod(sequences, least)
        if rest or sequences < 1:
            near = max(1, round(sequences / least)) * least
            raise UserError(
                f"--global-batch-size: {sequences} does not fill passes of {least} sequences on "
                f"{values['num_gpus']} GPUs; try {near}"
            )
        a_gpu *= asked or 1
        batches = [asked] if asked else [n for n in range(a_gpu, 0, -1) if a_gpu % n == 0]
        parts = [
            {"micro_batch_size": n, "gradient_accumulation_steps": a_gpu // n} for n in batches
        ]

        def config(part: Fields) -> RunConfig:
            several = part["gradient_accumulation_steps"] > 1  # else it is refused
            said = {n: v for n, v in values.items() if several or n != "gradient_reduction"}
            return make_config({**said, **part}, "advise")

        def reduced(part: dict[str, int]) -> dict[str, Any]:
            said = {n: v for n, v in REDUCED.items() if n not in values}
            return part | of_use(said, config(part).resolved())

        def with_savers(part: dict[str, int]) -> dict[str, Any]:
            return part | savers(config(part).resolved(), self.shape, self.capacity)

        def fit(part: dict[str, Any], in_fp8: bool) -> bool:
            ways = [config(part), as_fp8(config(part), "fp8_tensorwise")][in_fp8:]
            return self._largest(*ways) >= part["micro_batch_size"]

        plain = [way for part in parts for way in (part, reduced(part))]
        fitting = (way for way in plain if fit(way, in_fp8=False))
        if asked:
            others = (way for way in plain if fit(way, in_fp8=True))
        else:
            others = (way for way in map(with_savers, parts) if fit(way, in_fp8=False))
        return next(itertools.chain(fitting, others), parts[-1])
