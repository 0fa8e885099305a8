"""Claims about what the software does: what it refuses, converts, launches and reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from fp8study.analysis.claims.finding import Claim, Figure, Finding, Verdict, judges
from fp8study.analysis.claims.rules import behind, by_parts, count, judged_by_rows
from fp8study.analysis.claims.tables import Tables
from fp8study.core.audit_rules import problems, without_hidden_products
from fp8study.core.config import make_config
from fp8study.core.errors import UserError
from fp8study.core.records import RunRecord, StoredRun


def is_refused(values: Mapping[str, Any]) -> bool:
    """Return whether the package refuses a configuration."""
    try:
        make_config(values)
    except UserError:
        return True
    return False


def _fp8_runs(tables: Tables, keep: Callable[[RunRecord], Any]) -> pd.DataFrame:
    """Return the FP8 runs whose record `keep` accepts.

    ``sound``: completed, and the audit found no problem; ``fp8_pct``: the share of the GEMMs'
    FLOPs that a profile saw in FP8.
    """

    def read(run: StoredRun) -> dict[str, Any] | None:
        record = run.record
        if record.config.get("precision") in (None, "bf16") or not keep(record):
            return None
        audit = without_hidden_products(record.audit, record.config)
        done = audit.get("fp8_gemm_flops_pct")
        sound = record.status == "completed" and not problems(audit)
        return {"sound": sound, "fp8_pct": math.nan if done is None else done}

    return tables.of_records(read, "sound", "fp8_pct")


def _by_runs(runs: pd.DataFrame, holds: pd.Series, words: str, what: str, missing: str) -> Finding:
    holds = holds.astype(bool)
    return judged_by_rows(runs, 100.0 * holds, holds, words, what, missing, spec=".0f")


@judges("A25")
def efficient_loading(tables: Tables, claim: Claim) -> Finding:
    field = claim.published["field"]
    runs = _fp8_runs(tables, lambda record: record.config.get(field))
    refused = is_refused({"precision": "fp8_tensorwise", field: True})
    missing = f"no run tried it; the configuration {'refuses' if refused else 'takes'} it"
    return _by_runs(runs, runs["sound"] == False, "{} FP8 runs with it failed", "failed", missing)  # noqa: E712


@judges("A28")
def under_ddp(tables: Tables, claim: Claim) -> Finding:
    runs = _fp8_runs(tables, lambda record: (
        record.config.get("strategy") == "ddp" and (record.config.get("num_gpus") or 0) > 1
    ))  # fmt: skip
    words = "{} FP8 runs under DDP completed with a sound audit"
    return _by_runs(runs, runs["sound"], words, "sound", "no FP8 run under DDP on several devices")


@judges("C04")
def silent_bf16(tables: Tables, claim: Claim) -> Finding:
    wrong = claim.published["wrong"]
    taken = [values for values in wrong if not is_refused(values)]
    runs = _fp8_runs(tables, lambda record: record.status == "completed")
    runs = runs[runs["fp8_pct"].notna()]
    idle = runs["fp8_pct"] == 0
    why = (
        f"{len(wrong) - len(taken)} of {len(wrong)} wrong settings are refused in one line, and "
        f"{(~idle).sum()} of {count(len(runs), 'profiled FP8 run')} did GEMMs in FP8"
    )
    figure = Figure("wrong settings that are taken", len(taken), spec=".0f")
    return Finding(by_parts(taken, idle.any()), why, figure, behind(runs))


@judges("C05")
def kernel_names(tables: Tables, claim: Claim) -> Finding:
    def read(run: StoredRun) -> dict[str, Any] | None:
        gemms = run.record.instruments.get("step", {}).get("gemm") or []
        names = [n for g in gemms if "float8" in g["dtypes"] for n in g.get("kernels") or []]
        return {"name": names} if names else None

    kernels = tables.of_records(read, "name").explode("name", ignore_index=True)
    names, wanted = kernels["name"].astype(str), claim.published["name"]
    called = names.str.contains(wanted)
    common = names.str.split("_").str[:2].str.join("_").mode()
    words = (
        f"{{}} names of FP8 GEMM kernels contain {wanted}; most begin with {', '.join(common[:1])}."
        " Records name kernels, not the operators that launch them"
    )
    return _by_runs(kernels, called, words, "so named", "no profile names FP8 kernels")


@judges("C06")
def tensor_parallel(tables: Tables, claim: Claim) -> Finding:
    setting = claim.published["setting"]
    if not is_refused({"precision": "fp8_tensorwise"} | setting):
        return Finding(Verdict.CONTRADICTED, "the configuration takes it")
    if not is_refused({**setting, "precision": "bf16"}):
        return Finding(Verdict.REPRODUCED, "the configuration refuses it, and takes it in BF16")
    why = (
        "the configuration refuses it, and in BF16 too: this trainer has no tensor parallelism, so "
        "the reason is untested"
    )
    return Finding(Verdict.PARTLY, why)


@judges("C07")
def experts_stay_out(tables: Tables, claim: Claim) -> Finding:
    """Tell a mixture by its router or experts, which a sound audit has among the layers skipped."""

    def is_mixture(record: RunRecord) -> bool:
        skipped = " ".join(record.audit.get("skipped", {}))
        return "mixture" in skipped or "moe" in str(record.config.get("model")).lower()

    def splits(run: StoredRun) -> dict[str, Any]:
        audit = run.record.audit
        skipped = " ".join(audit.get("skipped", {}))
        return {"splits": "mixture" in skipped and audit.get("num_linear_fp8", 0) > 0}

    runs = _fp8_runs(tables, is_mixture).merge(tables.of_records(splits, "splits"))
    holds = runs["sound"].astype(bool) & runs["splits"].astype(bool)
    words = "router and experts stay out, and other layers are converted, in {} FP8 runs"
    return _by_runs(runs, holds, words, "with that split", "no mixture of experts was run in FP8")
