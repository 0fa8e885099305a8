"""Claims about what the software does: what it refuses, converts, launches and reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from fp8study.analysis.claims.finding import Claim, Figure, Finding, Verdict, judges, undecided
from fp8study.analysis.claims.rules import behind, by_parts, by_share, count, of_cells
from fp8study.analysis.claims.tables import Tables
from fp8study.core import config
from fp8study.core.audit_rules import problems, without_hidden_products
from fp8study.core.errors import UserError
from fp8study.core.records import RunRecord, StoredRun


def refusal(values: Mapping[str, Any]) -> str:
    """Return with which words the package refuses a configuration; empty where it takes it."""
    try:
        config.make_config(values)
    except UserError as error:
        return str(error)
    return ""


def _fp8_runs(tables: Tables, keep: Callable[[RunRecord], Any]) -> pd.DataFrame:
    """Return the FP8 runs whose record `keep` accepts, with their status and their problems."""

    def read(run: StoredRun) -> dict[str, Any] | None:
        record = run.record
        if record.config.get("precision") in (None, "bf16") or not keep(record):
            return None
        audit = without_hidden_products(record.audit, record.config)
        done = audit.get("fp8_gemm_flops_pct")
        return {
            "status": record.status,
            "problems": problems(audit),
            "fp8_pct": math.nan if done is None else done,
        }

    return tables.of_records(read, "status", "problems", "fp8_pct")


def _works(tables: Tables, runs: pd.DataFrame, what: str) -> Finding:
    """Judge by the share of runs that completed with a sound audit."""
    sound = (runs["status"] == "completed") & ~runs["problems"].map(bool)
    why = f"{sound.sum()} of {count(len(runs), 'FP8 run')} {what} completed with a sound audit"
    figure = Figure("runs that worked", 100 * float(sound.mean()), "%")
    return of_cells(sound, why, figure, behind(runs))


@judges("A25")
def efficient_loading(tables: Tables, claim: Claim) -> Finding:
    runs = _fp8_runs(tables, lambda record: record.config.get(claim.published["field"]))
    if runs.empty:
        said = refusal({"precision": "fp8_tensorwise", claim.published["field"]: True})
        does = "refuses it before torchao is asked" if said else "would take it"
        return undecided(f"no run tried it; the configuration {does}")
    failed = runs["status"] != "completed"
    why = f"{failed.sum()} of {count(len(runs), 'FP8 run')} with it failed"
    figure = Figure("runs that failed", 100 * float(failed.mean()), "%")
    return of_cells(failed, why, figure, behind(runs))


@judges("A28")
def under_ddp(tables: Tables, claim: Claim) -> Finding:
    runs = _fp8_runs(tables, lambda record: record.config.get("strategy") == "ddp"
                     and (record.config.get("num_gpus") or 0) > 1)  # fmt: skip
    if runs.empty:
        return undecided("no FP8 run under DDP on several devices")
    return _works(tables, runs, "under DDP")


@judges("C04")
def silent_bf16(tables: Tables, claim: Claim) -> Finding:
    taken = [values for values in claim.published["wrong"] if not refusal(values)]
    runs = _fp8_runs(tables, lambda record: record.status == "completed")
    runs = runs[runs["fp8_pct"].notna()]
    idle = runs["fp8_pct"] == 0
    wrong = claim.published["wrong"]
    why = (
        f"of {len(wrong)} wrong settings {len(wrong) - len(taken)} are refused in one line; of "
        f"{count(len(runs), 'completed FP8 run')} whose profile shows its GEMMs {idle.sum()} did "
        "none of them in FP8"
    )
    verdict = by_parts(taken, idle.any())
    figure = Figure("wrong settings that are taken", len(taken), spec=".0f")
    return Finding(verdict, why, figure, behind(runs))


@judges("C05")
def kernel_names(tables: Tables, claim: Claim) -> Finding:
    def read(run: StoredRun) -> dict[str, Any] | None:
        gemms = run.record.instruments.get("step", {}).get("gemm") or []
        names = [n for g in gemms if "float8" in g["dtypes"] for n in g.get("kernels") or []]
        return {"names": names} if names else None

    runs = tables.of_records(read, "names")
    if runs.empty:
        return undecided("no profile names the kernels of FP8 GEMMs")
    names = runs["names"].explode()
    called = names.str.contains(claim.published["name"])
    most = names.str.split("_").str[:2].str.join("_").mode().iloc[0]
    why = (
        f"{called.sum()} of {len(names)} names of FP8 GEMM kernels in "
        f"{count(len(runs), 'profile')} contain {claim.published['name']}; most begin with {most}. "
        "Records name kernels, not the operators that launch them"
    )
    figure = Figure("kernels of that name", 100 * float(called.mean()), "%")
    return of_cells(called, why, figure, behind(runs))


@judges("C06")
def tensor_parallel(tables: Tables, claim: Claim) -> Finding:
    setting = claim.published["setting"]
    said = refusal({"precision": "fp8_tensorwise"} | setting)
    also = refusal({**setting, "precision": "bf16"})
    if not said:
        why = "the configuration takes FP8 with tensor parallelism"
        return Finding(Verdict.CONTRADICTED, why)
    why = "the configuration refuses it in one line" + (
        ", and in BF16 too: without tensor parallelism here, its reason is untested" if also else ""
    )
    return Finding(Verdict.PARTLY if also else Verdict.REPRODUCED, why)


@judges("C07")
def experts_stay_out(tables: Tables, claim: Claim) -> Finding:
    def read(run: StoredRun) -> dict[str, Any] | None:
        audit, names = run.record.audit, " ".join(run.record.audit.get("skipped", {}))
        if run.record.config.get("precision") in (None, "bf16") or "mixture" not in names:
            return None
        return {"sound": audit.get("num_linear_fp8", 0) > 0 and not problems(audit)}

    runs = tables.of_records(read, "sound")
    mixtures = _fp8_runs(tables, lambda r: "moe" in str(r.config.get("model")).lower()
                         or "mixtral" in str(r.config.get("model")).lower())  # fmt: skip
    if runs.empty and mixtures.empty:
        return undecided("no mixture of experts was run")
    sound = int(runs["sound"].sum()) if len(runs) else 0
    total = len({*behind(runs), *behind(mixtures)})
    why = (
        f"in {sound} of {count(total, 'FP8 run')} of a mixture the router or the experts stay out "
        "while other layers are converted"
    )
    figure = Figure("runs with that split", 100 * sound / total, "%")
    return Finding(by_share(sound / total), why, figure, behind(runs, mixtures))
