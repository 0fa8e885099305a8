"""What records say of a question: the report's own rows of speed, and the nearest losses."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from fp8study.analysis.advice.figures import Quantity, Row, lead_of
from fp8study.analysis.advice.loss_evidence import pooled_losses, reference_gaps
from fp8study.analysis.decision import (
    CHECK,
    FP8,
    LOSS_COLUMNS,
    MORE,
    WORSE,
    advise,
    decision_table,
    forms_behind,
    judged_losses,
    loss_of,
    nearest_loss,
)
from fp8study.analysis.floors import pooled_table
from fp8study.analysis.laws.account import label_of
from fp8study.analysis.laws.frozen import Runs
from fp8study.analysis.laws.layer import has_fp8_head
from fp8study.analysis.laws.nearby import EARLIER, as_fp8, changed, written
from fp8study.analysis.leads import leads_table, with_own_heads
from fp8study.analysis.losses import loss_gap_table
from fp8study.analysis.runs.frames import runs_frame
from fp8study.analysis.runs.naming import (
    BF16_GATHERED,
    GRAPH,
    KERNELS,
    SHARED_POOL,
    fp8_part,
    num_kernels,
    setting_label,
)
from fp8study.analysis.small_steps import decided_anew
from fp8study.core.config import ResolvedConfig
from fp8study.core.hardware import find_peak
from fp8study.core.recipes import RECIPES
from fp8study.core.records import StoredRun

#: In what a setting that was timed may differ from one that is asked about, as fields of a run.
_APART = ("num_gpus", "micro_batch_size", "sequence_length", "gradient_accumulation_steps",
          "strategy", "master_dtype", "optimizer_state", "max_grad_norm")  # fmt: skip
#: The norm that gradients are usually clipped at.
CLIPPED = 1.0
#: What an FP8 is called that was timed before it had one of `KERNELS`: before its SwiGLU had them,
#: before they wrote both layouts, and before its loss head was FP8.
EARLIER_KERNELS = COMPILED_SWIGLU, ONE_LAYOUT, BF16_HEAD = (
    "compiled SwiGLU", "one layout", "BF16 loss head"
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """What to do by FP8's lead: the report's decision, or its rule applied to a prediction."""

    action: str
    """One of `fp8study.analysis.decision.TO_TRAIN_IN`."""
    label: str
    """The FP8 that it is about."""
    lead_pct: Quantity
    """Without ends where there is no interval."""
    machine: str = ""
    """Whose records; empty for a prediction."""
    num_unsteady: int = 0
    """Of its runs, those whose step time had not settled."""
    num_gpus: int = 1
    """That its runs took of that machine."""
    num_pairs: int = 0
    """Of runs, that the lead rests on."""
    setting: str = ""
    """As the report calls it."""
    loss: Row = field(default_factory=dict)
    """The nearest loss that was judged, as `decision.LOSS_COLUMNS`; empty where none was."""
    num_void: int = 0
    """Runs of its setting that do not count, as the allocator may have made their timing."""

    @property
    def is_as_today(self) -> bool:
        """Whether it was measured, with all of the kernels that the path has today."""
        return bool(self.num_pairs) and not self.label.endswith(EARLIER_KERNELS)


@dataclass(frozen=True)
class Decided:
    """What the report decides for one setting on one machine, and what it rests on."""

    machine: str
    decision: dict[str, Any]
    """The row of `decision_table`; ``ids`` and ``ids_bf16`` are its runs by precision."""
    leads: list[dict[str, Any]]
    """Every arm that was timed there: rows of `leads_table`, the largest lead first, likewise."""
    num_unsteady: int
    """Of the runs that were decided on, those whose step time had not settled."""
    num_void: int
    """And those whose timing is void."""


class Decisions:
    """The report's decisions for any setting that was timed, so that advice says the same."""

    def __init__(self, runs: Runs) -> None:
        stored = [StoredRun(record, Path(name), name.partition("/")[0]) for name, record in runs]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the report tells them
            self.runs = runs_frame(stored)
        self.leads = with_own_heads(leads_table(self.runs))
        pooled = pooled_losses(pooled_table(stored, self.runs))
        self.gaps = pd.concat([reference_gaps(self.runs), pooled])
        self.losses = judged_losses(loss_gap_table(self.runs), self.runs)
        self.in_bf16 = {*self.runs.loc[self.runs["precision"] == "bf16", "run_ids"]}

    def of(self, bf16: ResolvedConfig, gpu_name: str) -> Sequence[Decided]:
        """Return what was decided for a BF16 run's setting, by machine.

        The reader's own machine first, then what decides, then the one where most ways to compute
        were timed, then the one with the most pairs. Where nobody clipped at that norm, what was
        timed at `CLIPPED`, as no norm changes a step's time. For a graph with a `SHARED_POOL` that
        nobody timed, what was for one without: half a point apart (docs/log.md, 89).
        """
        here, asked = self._of_model(bf16, gpu_name), bf16.to_dict()
        clips = {"max_grad_norm": CLIPPED} if bf16.max_grad_norm else {}
        settings = [setting_label(values) for values in (asked, asked | clips)]
        settings += [setting.replace(f", {SHARED_POOL}", "") for setting in settings]
        found = (here & self.leads["setting"].eq(setting) for setting in settings)
        return self._decide(next((rows for rows in found if rows.any()), here & False))

    def _of_model(self, bf16: ResolvedConfig, gpu_name: str) -> pd.Series:
        key = {"gpu_name": gpu_name, "model": bf16.model, "num_gpus": bf16.num_gpus}
        return (self.leads[list(key)] == list(key.values())).all(axis=1)

    def verdict_of(
        self, bf16: ResolvedConfig, found: Decided, learning_rate: float | None
    ) -> Verdict:
        """Return the report's decision, or what it is at a learning rate that is asked about."""
        row = loss = found.decision
        action, lead = row["action"], lead_of(row)
        assert lead is not None
        if learning_rate is not None and action in (FP8, CHECK, WORSE):
            loss = nearest_loss(row, self.losses, learning_rate)
            action = advise(row["ci_low_pct"], row["ci_high_pct"], loss_of(loss, learning_rate))
        if action == FP8 and bf16.max_grad_norm not in (None, row["max_grad_norm"]):
            action = CHECK  # its loss was judged at another norm
        return Verdict(
            action, way_of(bf16, row)[1], lead, found.machine, found.num_unsteady,
            bf16.num_gpus, row["num_pairs"], row["setting"], _of_loss(loss),
        )  # fmt: skip

    def loss(
        self, fp8: ResolvedConfig, gpu_name: str, learning_rate: float | None
    ) -> dict[str, Any]:
        """Return the judged loss that is nearest to an FP8 run, as `decision.nearest_loss`."""
        row = fp8.to_dict() | {
            "gpu_name": gpu_name, "machine": "", "fp8_part": fp8_part(fp8.to_dict()),
            "setting": setting_label(fp8.to_dict()),
        }  # fmt: skip
        return nearest_loss(row, self.losses, learning_rate)

    def nearest(
        self, bf16: ResolvedConfig, gpu_name: str, as_asked: bool
    ) -> list[tuple[str, Quantity]]:
        """Return in what FP8's lead was timed next to a BF16 run, and that lead.

        As the path was before; with gradients clipped, or not, as it has it; at the batches below
        and above; each in the latest form that was timed, unless it is to be `as_asked`. Where none
        was timed so, in the setting least apart. Then at its own batch with its kernels launched
        singly, where its step is one graph, and on the plain path.
        """

        def timed(changes: dict[str, Any]) -> list[tuple[str, Quantity]]:
            way = changed(bf16, changes)
            if not as_asked:
                way = decided_anew(way, find_peak(gpu_name))
                form = self._measured_as(way, gpu_name)
                way, changes = changed(way, form), changes | form
            found = self.of(way, gpu_name) if changes else ()
            if not found or (lead := lead_of(first := found[0].decision)) is None:
                return []
            if BF16_GATHERED in first["arm"]:
                changes = changes | {"fp8_all_gather": False}
            last = way_of(way, first)[1].rpartition(", ")[2]
            said = [" ".join(written(changes)), *[last] * (last in EARLIER_KERNELS)]
            said += _recipe(first)
            return [(", ".join(said), lead)]

        here = self._of_model(bf16, gpu_name)
        own, sizes = bf16.micro_batch_size, self.leads.loc[here, "micro_batch_size"].astype(int)
        below, above = (
            [each for batch in sorted({*some}) for each in timed({"micro_batch_size": batch})]
            for some in (sizes[sizes < own], sizes[sizes > own])
        )
        clipped = timed({"max_grad_norm": None if bf16.max_grad_norm else CLIPPED})
        for name in ("micro_batch_size", "sequence_length"):
            here &= self.leads[name] == getattr(bf16, name)
        on, singly = self.leads["path"], ~self.leads["setting"].str.contains(GRAPH)
        ways = {
            "step_launch=by_kernel": on.eq("tuned") & singly & (bf16.step_launch == "as_graph"),
            "path=plain master_dtype={master_dtype}": on.eq("plain"),
        }
        there = [
            (", ".join([way.format(**row), *_recipe(row)]), lead)
            for way, chosen in ways.items() for found in self._decide(here & chosen)[:1]
            if (lead := lead_of(row := found.decision)) is not None
        ]  # fmt: skip
        found = [*timed({}), *clipped, *below[-1:], *above[:1]]
        return [*(found or self._least_apart(bf16, gpu_name)), *there]

    def _least_apart(self, bf16: ResolvedConfig, gpu_name: str) -> list[tuple[str, Quantity]]:
        """Return in what the lead of a model's nearest setting on the tuned path is apart."""
        of_it = self.leads["gpu_name"].eq(gpu_name) & self.leads["model"].eq(bf16.model)
        states = self.runs.set_index("run_ids")["optimizer_state"].fillna("fp32")
        asked, found = bf16.to_dict(), []
        for each in self._decide(of_it & self.leads["path"].eq("tuned")):
            row, lead = each.decision, lead_of(each.decision)
            strategy = row["setting"].partition(", ")[0].lower().replace("not sharded", "none")
            row = row | {"strategy": strategy, "optimizer_state": states[row["ids"][0]]}
            usual = {"strategy": "none" if row["num_gpus"] == 1 else "fsdp2"}  # goes without saying
            known = asked | usual if row["num_gpus"] != asked["num_gpus"] else asked
            changes = {
                name: None if pd.isna(row[name]) else row[name] for name in _APART
                if row[name] != known[name] and not (pd.isna(row[name]) and known[name] is None)
            }  # fmt: skip
            factors = [abs(math.log2(changes[n] / asked[n])) for n in _APART[:4] if n in changes]
            if lead is not None and changes:
                early = forms_behind(pd.Series(row))
                gathers = {"fp8_all_gather": False} if BF16_GATHERED in row["arm"] else {}
                said = [" ".join(written(changes | gathers))]
                said += ["another form of the path"] * (early > 0)
                said += _recipe(row)
                found.append((len(changes), sum(factors), early, ", ".join(said), lead))
        return [(said, lead) for *_, said, lead in sorted(found, key=lambda each: each[:3])[:1]]

    def _measured_as(self, bf16: ResolvedConfig, gpu_name: str) -> dict[str, Any]:
        """Return by what a BF16 run is one that was measured, with FP8 runs in its place.

        Where no lead of today's path has an interval, that may be the path in one of its `EARLIER`
        forms: the latest that has one, or else the earliest that was timed. Steps that are one
        graph are no slow host's: of them none by kernel tells.
        """
        forms = [({}, bf16), *((form, changed(bf16, form)) for form in EARLIER)]
        found = [
            (form, there) for form, way in forms
            if way.step_launch == bf16.step_launch and (there := self.of(way, gpu_name))
        ]  # fmt: skip
        known = (
            form for form, there in found
            if any(not math.isnan(each.decision["ci_low_pct"]) for each in there)
        )  # fmt: skip
        return next(known, found[-1][0] if found else {})

    def _decide(self, chosen: pd.Series) -> Sequence[Decided]:
        """Return what is decided by some of the leads, in the order of `of`."""
        rows = self.leads[chosen].sort_values("lead_pct", ascending=False, kind="stable")
        table = decision_table(rows, self.losses)
        return sorted((self._decided(row, rows) for row in table.to_dict("records")), key=_rank)

    def _decided(self, row: dict[Any, Any], rows: pd.DataFrame) -> Decided:
        arms = rows[rows["machine"] == row["machine"]].to_dict("records")
        runs = self.runs[self.runs["run_ids"].isin(row["run_ids"].split())]
        decision, *leads = (self._with_ids(each) for each in (row, *arms))
        counts = (int(runs[name].sum()) for name in ("unsteady", "timing_void"))
        return Decided(row["machine"], decision, leads, *counts)

    def _with_ids(self, row: dict[Any, Any]) -> dict[str, Any]:
        ids = row["run_ids"].split()
        bf16 = [name for name in ids if name in self.in_bf16]
        return row | {"ids": [name for name in ids if name not in bf16], "ids_bf16": bf16}


def _recipe(row: Row) -> list[str]:
    return [RECIPES[row["precision"]].label] * (row["precision"] != "fp8_tensorwise")


def _rank(found: Decided) -> tuple[bool, bool, int, int, int]:
    row, far = found.decision, found.machine != "local"
    forms = -num_kernels(row["arm"])
    return far, row["action"] == MORE, forms, -len(found.leads), -row["num_pairs"]


def way_of(bf16: ResolvedConfig, row: Row) -> tuple[ResolvedConfig, str]:
    """Return the FP8 run that a row of leads is of, and its label."""
    precision, gathers = row["precision"], row["fp8_all_gather"]
    is_spread = RECIPES[precision].gathers_in_fp8 and bf16.num_gpus > 1
    way = as_fp8(bf16, precision, bool(gathers) if is_spread and not pd.isna(gathers) else None)
    said = row["arm"].removeprefix(RECIPES[precision].label).split(", ")[1:]
    parts = [part for part in said if "all-gather" not in part and part not in KERNELS]
    has = way.swiglu == "kernels", way.cast_kernels == "both_layouts", has_fp8_head(way)
    lacking = zip(EARLIER_KERNELS, KERNELS, has, strict=True)
    parts += [then for then, now, asked in lacking if asked and now not in said][:1]
    return way, ", ".join([label_of(way), *parts])


def predicted_verdict(
    label: str, lead: Quantity | None, loss: Row, learning_rate: float | None
) -> Verdict:
    """Apply the report's rule to what the law says, within its errors if they are known."""
    assert lead is not None
    if lead.low is None or lead.high is None:
        return Verdict(MORE, label, lead)
    action = advise(lead.low, lead.high, loss_of(loss, learning_rate))
    return Verdict(action, label, lead, loss=_of_loss(loss))


def _of_loss(row: Row) -> Row:
    """Return what a row says of its loss, with None for what is missing, as JSON has it."""
    if pd.isna(row.get("loss_verdict")):
        return {}
    found = pd.Series(row, dtype=object).to_dict()  # without NumPy's numbers
    return {name: None if pd.isna(found[name]) else found[name] for name in LOSS_COLUMNS}
