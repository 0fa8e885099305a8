"""What the tests of claims look at: the report's tables, of one class of machines.

Each table is computed when a test first asks for it, from the frames that the report has already.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol

import pandas as pd

from fp8study.analysis import instruments
from fp8study.analysis.floors import pooled_fp8, pooled_table
from fp8study.analysis.losses import comparisons, effective_batch_table, says_nothing
from fp8study.analysis.runs.frames import PLACE, place_of, run_path
from fp8study.analysis.runs.naming import COLD_CACHE
from fp8study.analysis.runs.pairing import goes_on, sessions_of
from fp8study.analysis.speed import MEMORY_FULL
from fp8study.core.presets import PRESETS
from fp8study.core.records import RESULTS, StoredRun

RATE = "tokens_per_second_per_gpu"
#: What the runs of an arm have in common and a table of arms does not say.
_OF_AN_ARM = [
    "sequence_length", "micro_batch_size", "gradient_accumulation_steps", "compile", "master_dtype",
    "learning_rate", "num_parameters", "num_steps",
]  # fmt: skip
#: How an arm's setting writes a field.
_IN_SETTING = {
    "sequence_length": r"\d+ tokens",
    "micro_batch_size": r"batch \d+",
    "compile": f"compiled(, {COLD_CACHE})?|eager",
}


class Frames(Protocol):
    """The frames that a report is made of."""

    @property
    def runs(self) -> pd.DataFrame: ...
    @property
    def metrics(self) -> pd.DataFrame: ...
    @property
    def throughput(self) -> pd.DataFrame: ...
    @property
    def loss_gaps(self) -> pd.DataFrame: ...
    @property
    def instruments(self) -> pd.DataFrame: ...
    @property
    def stored(self) -> Sequence[StoredRun]: ...


class Tables:
    """The tables of the machines with some labels; those of arms hold healthy runs on GPUs."""

    def __init__(self, frames: Frames, machines: Collection[str]) -> None:
        self._frames, self._machines = frames, machines
        self.stored = [run for run in frames.stored if run.machine_label in machines]

    def _ours(self, frame: pd.DataFrame) -> pd.DataFrame:
        return frame[frame["machine"].isin(list(self._machines))]

    @cached_property
    def runs(self) -> pd.DataFrame:
        return self._ours(self._frames.runs)

    @cached_property
    def metrics(self) -> pd.DataFrame:
        return self._ours(self._frames.metrics)

    @cached_property
    def instruments(self) -> pd.DataFrame:
        return self._ours(self._frames.instruments)

    @cached_property
    def arms(self) -> pd.DataFrame:
        """Rows of `throughput_table` whose timings count, with the configuration of the arm."""
        rates = self._ours(self._frames.throughput)
        rates = rates[~rates["note"].str.contains(MEMORY_FULL)]
        return self._of_gpus(rates[rates["tokens_per_second_per_gpu"].notna()])

    @cached_property
    def cells(self) -> pd.DataFrame:
        """The FP8 arms among them that have a BF16 partner and a lead over it."""
        return self.arms[self.arms["speedup_pct"].notna()]

    @cached_property
    def gaps(self) -> pd.DataFrame:
        """The `comparisons` of `loss_gap_table`, with the configuration of the arm.

        Without runs from trained weights: the documents start from random ones.
        """
        gaps = self._of_gpus(comparisons(self._ours(self._frames.loss_gaps)))
        return gaps[~goes_on(gaps)]

    @cached_property
    def silent_gaps(self) -> pd.DataFrame:
        """As `gaps`, of the arms left out there: BF16 itself learnt next to nothing."""
        gaps = self._ours(self._frames.loss_gaps)
        return self._of_gpus(gaps[says_nothing(gaps)])

    @cached_property
    def stale_gaps(self) -> pd.DataFrame:
        """As `gaps`, of the arms that leave weights out of the optimizer."""
        return self._of_gpus(self._ours(self._frames.loss_gaps), stale=True)

    @cached_property
    def memory(self) -> pd.DataFrame:
        """FP8 arms beside their BF16 partners: peaks, first steps and weights, GiB and % of BF16.

        Of `throughput_table` the change of the peak, and of `memory_split_table` the rest.
        """
        rates = self._ours(self._frames.throughput)
        paired = self._of_gpus(rates[rates["memory_change_pct"].notna()])
        split = instruments.memory_split_table(self.instruments)
        sizes = ["parameters_gib", "first_step_allocated_gib", "working_gib"]
        own = split.set_index("arm_key")[[*sizes, "partner_key"]]
        paired = paired.join(own, on="arm_key")
        return instruments.beside_bf16(paired, split, sizes)

    @cached_property
    def effective_batches(self) -> pd.DataFrame:
        return self._of_gpus(comparisons(effective_batch_table(self.runs)))

    @cached_property
    def pooled_gaps(self) -> pd.DataFrame:
        """FP8's rows of `pooled_table`: gaps on text kept out, several machines together."""
        return pooled_fp8(pooled_table(self.stored, self.runs))

    def in_one_session(self, pairs: pd.DataFrame) -> pd.DataFrame:
        """Keep the `steps` whose two arms both ran in a session: hosts differ, and days of one."""
        of = dict(zip(self.runs["run_ids"], sessions_of(self.runs), strict=True))
        both = zip(pairs["run_ids"], pairs["run_ids_before"], strict=True)
        shared = [not {*map(of.get, a.split())}.isdisjoint(map(of.get, b.split())) for a, b in both]
        return pairs[pd.Series(shared, index=pairs.index, dtype=bool)]

    @cached_property
    def communication(self) -> pd.DataFrame:
        on_gpus = self.instruments[self.instruments["device"] == "cuda"]
        return instruments.communication_table(on_gpus)

    @cached_property
    def kernels(self) -> pd.DataFrame:
        return instruments.kernels_table(self.instruments)

    @cached_property
    def break_even(self) -> pd.DataFrame:
        table = instruments.break_even_table(self.instruments)
        return table.join(self._configurations[["num_parameters"]], on="arm_key")

    def of_records(
        self, read: Callable[[StoredRun], dict[str, Any] | None], *columns: str
    ) -> pd.DataFrame:
        """Make one row of each record of which `read` says something: its place and `columns`."""
        each = ((run, read(run)) for run in self.stored)
        rows = [
            place_of(run) | {"run_ids": run_path(run)} | found
            for run, found in each
            if found is not None
        ]
        return pd.DataFrame(rows, columns=[*PLACE, "run_ids", *columns])

    @cached_property
    def _configurations(self) -> pd.DataFrame:
        results = self.runs[self.runs["status"].isin(RESULTS)]
        return results.drop_duplicates("arm_key").set_index("arm_key")[_OF_AN_ARM]

    def _of_gpus(self, table: pd.DataFrame, stale: bool = False) -> pd.DataFrame:
        chosen = table[(table["device"] == "cuda") & (table["stale"].astype(bool) == stale)]
        width = chosen["model"].map(lambda name: PRESETS.get(name, {}).get("hidden_size"))
        return chosen.assign(hidden_size=width).join(self._configurations, on="arm_key")


def along(arms: pd.DataFrame, *fields: str) -> Iterator[pd.DataFrame]:
    """Yield the arms that differ in these fields alone, two or more, ordered by the first.

    ``model`` stands for everything that a model brings with it, and is ordered by its size.
    """
    same = ["machine", "study", "model", "num_gpus", "precision", "arm"]
    gone = {*fields, *(["arm"] if "precision" in fields else [])}
    written = "|".join(_IN_SETTING[name] for name in fields if name in _IN_SETTING)
    setting = arms["setting"].map(lambda text: re.sub(written, "", text) if written else text)
    first = "num_parameters" if fields[0] == "model" else fields[0]
    keys = [name for name in same if name not in gone]
    for _, group in arms.groupby([*keys, setting.rename("_setting")], sort=False):
        if group[first].nunique() > 1:
            yield group.sort_values(first, kind="stable")


def steps(groups: Iterable[pd.DataFrame], *values: str) -> pd.DataFrame:
    """Set each arm of a group beside the one before it, whose `values` end in ``_before``."""
    columns = [*values, "run_ids"]
    found = [group.join(group[columns].shift().add_suffix("_before")).iloc[1:] for group in groups]
    both = [name for value in columns for name in (value, f"{value}_before")]
    known = dict.fromkeys([*both, "precision", "num_gpus"])
    return pd.concat(found) if found else pd.DataFrame(columns=[*known])
