"""Claims about what the software does: what it refuses, converts, launches and reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from fp8study.analysis.claims.finding import Claim, Figure, Finding, Verdict, judges
from fp8study.analysis.claims.rules import by_parts, by_rows, out_of
from fp8study.analysis.claims.tables import Tables
from fp8study.core.audit_rules import problems, without_hidden_products
from fp8study.core.config import make_config
from fp8study.core.errors import UserError
from fp8study.core.recipes import SIXTEEN_BIT
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
    FLOPs that a profile saw in FP8; ``splits``: a mixture's layers are skipped, others converted.
    """

    def read(run: StoredRun) -> dict[str, Any] | None:
        record = run.record
        if record.config.get("precision") in (None, *SIXTEEN_BIT) or not keep(record):
            return None
        audit = without_hidden_products(record.audit, record.config)
        done, skipped = audit.get("fp8_gemm_flops_pct"), " ".join(audit.get("skipped", {}))
        return {
            "sound": record.status == "completed" and not problems(audit),
            "fp8_pct": math.nan if done is None else done,
            "splits": "mixture" in skipped and audit.get("num_linear_fp8", 0) > 0,
        }

    return tables.of_records(read, "sound", "fp8_pct", "splits")


def _by_runs(claim: Claim, runs: pd.DataFrame, holds: pd.Series, **words: object) -> Finding:
    holds = holds.astype(bool)
    return by_rows(claim, runs, 100.0 * holds, holds, **words)


@judges("A25")
def efficient_loading(tables: Tables, claim: Claim) -> Finding:
    field = claim.published["field"]
    runs = _fp8_runs(tables, lambda record: record.config.get(field))
    failed = ~runs["sound"].astype(bool)
    gathers = _fp8_runs(tables, lambda r: r.config.get(field) and r.config.get("fp8_all_gather"))
    in_fp8 = runs["run_ids"].isin(gathers["run_ids"])
    said = {name: out_of(failed[of]) for name, of in (("in_fp8", in_fp8), ("plain", ~in_fp8))}
    return _by_runs(claim, runs, failed, **said)


@judges("A28")
def under_ddp(tables: Tables, claim: Claim) -> Finding:
    runs = _fp8_runs(tables, lambda record: (
        record.config.get("strategy") == "ddp" and (record.config.get("num_gpus") or 0) > 1
    ))  # fmt: skip
    return _by_runs(claim, runs, runs["sound"])


@judges("C04")
def silent_bf16(tables: Tables, claim: Claim) -> Finding:
    refused = pd.Series([is_refused(values) for values in claim.published["wrong"]])
    runs = _fp8_runs(tables, lambda record: record.status == "completed").dropna(subset="fp8_pct")
    busy = runs["fp8_pct"] > 0
    verdict = by_parts(not refused.all(), not busy.all())
    return claim.found(verdict, Figure(int((~refused).sum())), runs, refused=out_of(refused),
                       busy=out_of(busy))  # fmt: skip


@judges("C05")
def kernel_names(tables: Tables, claim: Claim) -> Finding:
    def read(run: StoredRun) -> dict[str, Any] | None:
        gemms = run.record.instruments.get("step", {}).get("gemm") or []
        names = [n for g in gemms if "float8" in g["dtypes"] for n in g.get("kernels") or []]
        return {"name": names} if names else None

    kernels = tables.of_records(read, "name").explode("name", ignore_index=True)
    names = kernels["name"].astype(str)
    common = ", ".join(names.str.split("_").str[:2].str.join("_").mode()[:1])
    return _by_runs(claim, kernels, names.str.contains(claim.published["name"]), common=common)


@judges("C06")
def tensor_parallel(tables: Tables, claim: Claim) -> Finding:
    setting = claim.published["setting"]
    fp8 = is_refused({"precision": "fp8_tensorwise"} | setting)
    bf16 = is_refused({**setting, "precision": "bf16"})
    verdict = by_parts(fp8, not bf16) if fp8 else Verdict.CONTRADICTED
    said = {True: "yes", False: "no"}
    return claim.found(verdict, None, fp8=said[fp8], bf16=said[bf16])


@judges("C07")
def experts_stay_out(tables: Tables, claim: Claim) -> Finding:
    """Tell a mixture by its router or experts, which a sound audit has among the layers skipped."""

    def is_mixture(record: RunRecord) -> bool:
        skipped = " ".join(record.audit.get("skipped", {}))
        return "mixture" in skipped or "moe" in str(record.config.get("model")).lower()

    runs = _fp8_runs(tables, is_mixture)
    return _by_runs(claim, runs, runs["sound"].astype(bool) & runs["splits"].astype(bool))
