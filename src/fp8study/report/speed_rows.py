"""The rows of the tables and figures of speed: decisions, leads, steps, others' figures."""

from __future__ import annotations

import math
import re

import pandas as pd

from fp8study.analysis.decision import LOWER
from fp8study.analysis.leads import USUAL_LENGTH
from fp8study.analysis.runs.naming import (
    COPY_ENGINES,
    EARLIER_FORM,
    GRAPH,
    IN_ONE_PASS,
    NORMS,
    SHARED_POOL,
)
from fp8study.analysis.runs.pairing import healthy
from fp8study.analysis.small_steps import form_of, todays_form
from fp8study.core.path.switches import RETIRED
from fp8study.report.words import count, interval, machine_name, number, own_first, rate, recipe


def decisions(table: pd.DataFrame) -> pd.DataFrame:
    """Add to the table of decisions what it says in words: interval, loss, form.

    An interval has a † where it is of one pair, a ‡ where it says nothing of other sessions.
    """
    kinds = zip(table["num_pairs"], table["ci_of_days"], strict=True)
    ends = _intervals(table, "ci_low_pct", "ci_high_pct")
    marks = ["†" if pairs == 1 else "‡" * (not of_days) for pairs, of_days in kinds]
    return table.assign(
        ci=[text and text + mark for text, mark in zip(ends, marks, strict=True)],
        action=table["action"].str.replace(r"(?<![,:]) ", "\u00a0", regex=True),
        loss=[_loss(row) for _, row in table.iterrows()],
        form=[_form(row) for _, row in table.iterrows()],
    )


def by_path(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Split settings into those for the first table, and those of the plain path alone.

    The plain path comes first where nothing else was timed.
    """
    is_plain = table["path"] == "plain"
    first = ~is_plain | bool(is_plain.all())
    return table[first], table[~first]


def _intervals(table: pd.DataFrame, *names: str) -> list[str]:
    ends = table[[*names]].to_numpy()
    return [interval(low, high, "+.1f").replace(" ", "\u00a0") for low, high in ends]


def _loss(row: pd.Series) -> str:
    """Write the verdict of the nearest judged study in words, or nothing."""
    if pd.isna(row["loss_verdict"]):
        return ""
    said = str(row["loss_verdict"])
    if said == "different":
        said = "worse" if row["loss_gap_pct"] > 0 else LOWER
    gap = "" if pd.isna(row["loss_gap_pct"]) else f" {number(row['loss_gap_pct'], '+.2f')} %"
    facts = ["same setting"] if row["loss_is_same"] else []
    is_before = IN_ONE_PASS in row["setting"] and not row["loss_in_one_pass"]
    facts += ["before one pass"] if facts and is_before else []
    facts += [machine_name(row["loss_machine"])] if row["loss_machine"] != row["machine"] else []
    facts += [f"{row['loss_epochs']:.1f} passes"] if row["loss_epochs"] >= 2 else []
    facts += [f"at {rate(row['loss_rate'])}"] if pd.notna(row["loss_rate"]) else []
    if pd.notna(row["loss_rate_above"]):
        is_open = row["loss_verdict_above"] == "undecided"
        facts += [f"{'open' if is_open else 'worse'} at {rate(row['loss_rate_above'])}"]
    return _lines(f"{said}{gap}", f"({row['loss_study']})", *_listed(facts))


def _form(row: pd.Series) -> str:
    """Write how a row was timed, where it is not as the caption says."""
    form = form_of(row["setting"])
    passes = int(row["gradient_accumulation_steps"])
    parts = ["earlier path"] * is_of_before(row) + [f"{passes} passes a step"] * (passes > 1)
    parts += ["one pass"] * form.one_pass + ["copy engines"] * form.copy_engines
    parts += ["norm kernel"] * form.norm + ["one graph"] * form.graph
    parts += ["shared pool"] * form.shared
    parts += [] if row["path"] == "tuned" else ["plain"]
    parts += ["clipped"] * bool(pd.notna(row["max_grad_norm"]))
    parts += ["FSDP2"] * (int(row["num_gpus"]) == 1 and row["setting"].startswith("FSDP2"))
    kind = str(row["arm"]).removeprefix("FP8 ").removeprefix("tensorwise, ")
    parts += [] if kind == "tensorwise" else kind.split(", ")
    parts += [other_length(row)]
    parts += ["BF16 master weights"] if row["master_dtype"] == "bf16" else []
    return _lines(*_listed([*filter(None, parts)])) or "–"


def _listed(parts: list[str]) -> list[str]:
    return [*(f"{part}," for part in parts[:-1]), *parts[-1:]]


def _lines(*parts: str) -> str:
    """Join parts so that a line breaks between them only, as long words allow."""
    return " ".join(part.replace(" ", "\u00a0").replace("-", "\u2011") for part in parts if part)


def gains(table: pd.DataFrame) -> pd.DataFrame:
    """Return what single switches of today give, where more than one block timed them."""
    parts = table["setting"] + table["setting_plain"]
    known = table["gain_pct"].notna() & (table["num_blocks"] > 1)
    found = table[known & ~parts.str.contains(EARLIER_FORM)]
    return own_first(
        found.assign(
            ci=_intervals(found, "gain_low_95", "gain_high_95"),
            recipe=found["precision"].map(recipe),
            gpus=[count(int(number), "GPU") for number in found["num_gpus"]],
            setting=found["setting"].map(_as_it_is),
        ).sort_values(["machine", "model", "num_gpus", "setting_plain"], kind="stable")
    )


def other_length(row: pd.Series) -> str:
    """Write a row's tokens a sequence, where they are not as usual."""
    length = int(row["sequence_length"])
    return f"{length:,} tokens" * (length != USUAL_LENGTH)


def _as_it_is(switches: str) -> str:
    """Say of switches that were taken out that they were."""
    gone = [re.escape(each.words).replace(r"\{\}", ".+") for each in RETIRED.values()]
    return ", ".join(
        f"{words} (taken out)" if any(re.fullmatch(one, words) for one in gone) else words
        for words in switches.split(", ")
    )


def side_by_side(table: pd.DataFrame) -> pd.DataFrame:
    """Put the decisions of one's own machine beside those of each other one."""
    keys = ["model", "num_gpus", "micro_batch_size", "gradient_accumulation_steps"]
    own, others = (table[(table["machine"] == "local") == mine] for mine in (True, False))
    both = own.merge(others, on=keys, suffixes=("", "_other"))
    same = ["sequence_length", "path", "master_dtype", "arm"]
    alike = [all(row[name] == row[f"{name}_other"] for name in same) for _, row in both.iterrows()]
    return both.assign(
        machine_other=both["machine_other"].map(machine_name),
        gpus=own["gpu_name"].iloc[0] if len(own) else None,
        differs=["" if equal else "in length, path or recipe" for equal in alike],
    )


def setting_name(row: pd.Series) -> str:
    """Name a setting of a model in a few words: GPUs, batch, and a path that is not today's."""
    gpus, path = count(int(row["num_gpus"]), "GPU"), ", earlier" * is_of_before(row)
    path = ", plain" if row["path"] == "plain" else path
    batch = batch_words(row["micro_batch_size"], int(row["gradient_accumulation_steps"]))
    return f"{gpus}, {batch}{path}"


def batch_words(batch: object, passes: int) -> str:
    """Name a batch, with the passes of a step where these are several."""
    return f"batch {batch}" + f" in {passes} passes" * (passes > 1)


def profiled(kernels: pd.DataFrame, decided: pd.DataFrame) -> pd.DataFrame:
    """Return the profiled steps of both precisions in the settings that are decided on.

    With a ``name`` for each row, and the step time of BF16 there as ``bf16_step_ms``.
    """
    keys = ["machine", "model", "num_gpus", "setting"]
    parts = []
    for _, row in decided.iterrows():
        here = healthy(kernels[(kernels[keys] == row[keys]).all(axis=1)])
        pair = [here[here["arm"] == arm].tail(1) for arm in ("BF16", row["arm"])]
        if all(len(part) for part in pair):
            name = f"{setting_name(row)}:"
            base = float(pair[0]["step_time_ms_median"].iloc[0])
            parts += [part.assign(name=f"{name} {arm}", bf16_step_ms=base)
                      for part, arm in zip(pair, ("BF16", "FP8"), strict=True)]  # fmt: skip
            parts[-1]["name"] = "FP8"
    return pd.concat(parts, ignore_index=True) if parts else kernels[:0].assign(name="")


def clipping(peers: pd.DataFrame) -> pd.DataFrame:
    """Return the timed arms that clip gradients on both sides, named by their precision alone."""
    found = peers[peers["max_grad_norm"].notna() & peers["ratio"].notna()]
    return found.assign(arm=found["arm"].str.replace(", clipped.*", "", regex=True))


def switches(setting: str) -> list[str]:
    """Return what a setting says of switches that its path does not set by itself."""
    own = setting.partition(", tuned, ")[2].split(", ") if ", tuned, " in setting else []
    usual = (IN_ONE_PASS, COPY_ENGINES, GRAPH, SHARED_POOL, *NORMS)
    return [switch for switch in own if switch not in usual]


def is_of_before(row: pd.Series) -> bool:
    """Return whether a row's path updates in one pass today, and did not in its runs."""
    return todays_form(row).one_pass and not form_of(row["setting"]).one_pass


def others(peers: pd.DataFrame, published: pd.DataFrame) -> pd.DataFrame:
    """List FP8 leads of ours beside a trainer's that did the same, and those of publications."""
    rows = []
    fp8 = peers[peers["peer_lead_pct"].notna() & peers["max_grad_norm"].notna()]
    for _, row in fp8.iterrows():
        where = f"{row['model']}, {count(int(row['num_gpus']), 'GPU')}, "
        where += f"{int(row['tokens_per_gpu']):,} tokens"
        switched = ", switches set" * bool(switches(row["setting"]))
        for kind, side, who in (("ours", "", "ours"), ("beside ours", "peer_", row["peer"])):
            ends = {end: row[f"{side}lead_{end}_pct"] for end in ("low", "high")}
            named = f"{where}{switched}: {who}" if kind == "ours" else who
            rows.append({"name": named, "kind": kind,
                         "precision": row["precision"], "lead_pct": row[f"{side}lead_pct"],
                         "low_pct": ends["low"], "high_pct": ends["high"]})  # fmt: skip
    for _, row in published.iterrows():
        for precision in ("fp8_tensorwise", "fp8_rowwise"):
            if pd.notna(row[f"{precision}_pct"]):
                kind = f", {precision.removeprefix('fp8_')}" * (precision != "fp8_tensorwise")
                rows.append({"name": f"{row['short']}, {row['gpus']}{kind}", "kind": "published",
                             "precision": precision, "lead_pct": row[f"{precision}_pct"],
                             "low_pct": math.nan, "high_pct": math.nan})  # fmt: skip
    return pd.DataFrame(rows)


def restated(documents: pd.DataFrame) -> pd.DataFrame:
    """Restate the documents' figures with one count of FLOPs and the dense peak.

    Adds ``mfu_stated_pct``, ``tflops``, ``mfu_pct`` and FP8's ``lead_pct`` to the columns of
    ``report/documents.csv``.
    """
    tflops = documents["tflops_stated"] * documents["gflop"] / documents["gflop_stated"]
    keys = [documents["document"], documents["setting"]]
    is_bf16 = documents["precision"] == "BF16"
    base = tflops.where(is_bf16).groupby(keys).transform("first")
    return documents.assign(
        lead_pct=(100 * (tflops / base - 1)).where(~is_bf16),
        mfu_stated_pct=100 * documents["tflops_stated"] / documents["peak_stated"],
        tflops=tflops,
        mfu_pct=100 * tflops / documents["peak_bf16"],
    )
