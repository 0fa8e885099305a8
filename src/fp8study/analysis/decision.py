"""What to train in, setting by setting: the lead in speed, and what is known of the loss.

The rule is `advise`; everything else here finds what it asks for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from fp8study.analysis.leads import LEAD_COLUMNS, USUAL_LENGTH, to_decide
from fp8study.analysis.losses import comparisons, with_pairs
from fp8study.analysis.runs.naming import (
    FROM_WEIGHTS,
    IN_ONE_PASS,
    num_kernels,
    with_fp8_head,
)
from fp8study.analysis.runs.pairing import DIVERGED, FAILURE_STUDIES, goes_on, healthy
from fp8study.analysis.small_steps import form_of, is_by_kernel_no_more, todays_form

#: A lead that is surely above this pays for the work of checking the loss; in %.
WORTH_PCT = 3.0
FP8, CHECK, BF16, MORE = "FP8", "FP8, check its loss first", "BF16", "measure more"
WORSE, LITTLE = "BF16: worse loss in FP8", f"BF16: no gain above {WORTH_PCT:g} %"
TRY = "BF16, or try BF16 all-gather"
#: What `fp8study advise` says of a run that no GPU it asks about has room for.
NO_ROOM = "does not fit"
#: Every action, and what somebody may do who follows it.
TO_TRAIN_IN = {FP8: "fp8", CHECK: "fp8", MORE: "", LITTLE: "bf16", BF16: "bf16", TRY: "bf16",
               WORSE: "bf16"}  # fmt: skip
#: Verdicts on a loss that settle whether FP8's is BF16's.
CONCLUSIVE = ["equivalent", "different"]
#: What `loss_of` says where they are different and FP8's is below BF16's.
LOWER = "lower"

#: What tells the setting of a loss from that of a speed. Another machine with that GPU computes
#: the same losses.
_FIELDS = ["num_gpus", "micro_batch_size", "gradient_accumulation_steps", "sequence_length",
           "master_dtype", "path", "gpu_name", "max_grad_norm", "fp8_part"]  # fmt: skip
LOSS_COLUMNS = ["loss_verdict", "loss_gap_pct", "loss_epochs", "loss_rate", "loss_rate_above",
                "loss_verdict_above", "loss_study_above", "loss_machine_above", "loss_study",
                "loss_machine", "loss_is_same", "loss_in_one_pass", "loss_counts", "loss_steps",
                "loss_tokens"]  # fmt: skip
DECISION_COLUMNS = [*LEAD_COLUMNS, *LOSS_COLUMNS, "action"]


def advise(low_pct: float, high_pct: float, loss: str | None, gathers_fp8: bool = False) -> str:
    """Return what to do, one of `TO_TRAIN_IN`.

    Args:
        low_pct: The lower end of the 95 % interval of FP8's lead, %; NaN where there is none.
        high_pct: The upper end.
        loss: What `loss_of` says of FP8's loss in this very setting; None where that is open.
        gathers_fp8: Whether weights were gathered in FP8, and gathering them in BF16 is untried.
    """
    if math.isnan(low_pct):
        return MORE
    if high_pct < 0:
        return TRY if gathers_fp8 else BF16
    if high_pct <= WORTH_PCT:
        return LITTLE
    if low_pct <= WORTH_PCT:
        return MORE
    return {None: CHECK, "equivalent": FP8, LOWER: FP8}.get(loss, WORSE)


def decision_table(leads: pd.DataFrame, judged: pd.DataFrame) -> pd.DataFrame:
    """Choose one setting for each machine, model, number of GPUs, batch and passes, and judge it.

    The tuned path where it was timed, else the plain one; a lead with an interval, then today's
    form of the path and its kernels; then FP32 master weights, the length nearest to 4,096 tokens,
    no clipping, and the most pairs. Of its recipes the one with the largest lead, each with today's
    kernels if it was timed with them.

    Args:
        leads: From `fp8study.analysis.leads.leads_table`.
        judged: From `judged_losses`, of the same runs.

    Returns:
        The columns of `DECISION_COLUMNS`, models with the largest leads first; those of
        `LOSS_COLUMNS` are of the judged arm of the model and recipe whose setting differs in the
        fewest fields, the layers and steps that are in FP8 included. ``loss_rate`` is its learning
        rate. In its very setting at a higher one, ``loss_rate_above``, the verdict was
        ``loss_verdict_above`` and not equivalent: the lowest at which FP8 was worse, which leaves
        the loss to be checked, or else the lowest that is undecided.
    """
    leads = to_decide(leads)
    if leads.empty:
        return pd.DataFrame(columns=DECISION_COLUMNS)
    length = (leads["sequence_length"].astype(float) / USUAL_LENGTH).map(math.log2).abs()
    # An arm of which no interval is known takes no place of one that has one.
    kernels = leads["arm"].map(num_kernels).where(leads["ci_low_pct"].notna(), 0)
    order = leads.assign(
        _timed=leads["lead_pct"].isna(), _path=leads["path"] != "tuned",
        _open=leads["ci_low_pct"].isna(),
        _behind=leads.apply(forms_behind, axis=1), _kernels=-kernels,
        _masters=leads["master_dtype"] != "fp32", _length=length,
        _clips=leads["setting"].str.contains("clipped"), _pairs=-leads["num_pairs"],
    )  # fmt: skip
    by = ["_timed", "_path", "_open", "_behind", "_kernels", "_masters", "_length", "_clips",
          "_pairs"]  # fmt: skip
    place = ["machine", "model", "num_gpus", "micro_batch_size", "gradient_accumulation_steps"]
    best = order.sort_values(by, kind="stable").groupby(place, sort=False).first()
    chosen = leads.assign(_kernels=kernels).merge(
        best.reset_index()[[*place, "setting"]], on=[*place, "setting"]
    )
    recipe = [*place, "precision", "fp8_all_gather", "fp8_part"]
    most = chosen.groupby(recipe, dropna=False)["_kernels"].transform("max")
    chosen = chosen[chosen["_kernels"] == most]
    # What surely leads comes before what may lead by more: two pairs of two hosts say little.
    ranked = chosen.assign(_leads=chosen["ci_low_pct"] > WORTH_PCT)
    ranked = ranked.sort_values(["_leads", "lead_pct"], ascending=False, kind="stable")
    rows = []
    for _, group in ranked.groupby(place):
        row = group.iloc[0].to_dict()
        loss = nearest_loss(row, judged)
        alike = group.loc[group["precision"] == row["precision"], "fp8_all_gather"]
        gathers = bool(alike.fillna(False).all() and row["num_gpus"] > 1)
        action = advise(row["ci_low_pct"], row["ci_high_pct"], loss_of(loss), gathers)
        rows.append(row | loss | {"action": action})
    table = pd.DataFrame(rows).reindex(columns=DECISION_COLUMNS)
    top = table.groupby(["machine", "model"])["lead_pct"].transform("max")
    by = ["machine", "_top", *place[1:]]
    return table.assign(_top=-top).sort_values(by, kind="stable").drop(columns="_top")


def opened(table: pd.DataFrame) -> pd.DataFrame:
    """Open what was decided against FP8 by kernel, of steps that are one graph on today's path.

    The host's launches decided that. `table`: from `decision_table`.
    """
    slower = (BF16, TRY, LITTLE)
    actions = [
        MORE if row["action"] in slower and is_by_kernel_no_more(row) else row["action"]
        for _, row in table.iterrows()
    ]
    return table.assign(action=pd.Series(actions, index=table.index, dtype=object))


def forms_behind(row: pd.Series) -> int:
    """Return in how much a row's form of the tuned path is not what that has today.

    Steps on several GPUs that are one graph today had the earliest form before, and none between.
    """
    own, today = form_of(row["setting"]), todays_form(row)
    if today.graph and not own.graph and row["num_gpus"] > 1:
        return 2 + sum(own)
    return sum(one != other for one, other in zip(own, today, strict=True))


def loss_of(loss: Mapping[Any, Any], learning_rate: float | None = None) -> str | None:
    """Return the verdict of a `nearest_loss` if it settles the loss of the very setting.

    At the learning rate of the loss, if nothing is known to be worse above it; or at one that is
    asked about: what is no worse is so at lower rates, too, and what is, at higher ones. `LOWER`
    where the losses are different because FP8's is below BF16's.
    """
    verdict = loss.get("loss_verdict")
    if not (loss.get("loss_is_same") and loss["loss_counts"]) or verdict == "undecided":
        return None
    if verdict == "different" and loss["loss_gap_pct"] < 0:
        verdict = LOWER
    if learning_rate is None:
        holds = loss["loss_verdict_above"] != "different"
    else:
        rate, is_no_worse = loss["loss_rate"], verdict in ("equivalent", LOWER)
        holds = learning_rate <= rate if is_no_worse else learning_rate >= rate
    return str(verdict) if holds else None


def judged_losses(gaps: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the arms on GPUs whose loss got a verdict, with what their settings are."""
    found = with_pairs(comparisons(gaps))
    found = healthy(found[found["device"] == "cuda"])
    of_runs = (*_FIELDS, "learning_rate", "steps_completed", "num_tokens_seen")
    other = [name for name in of_runs if name not in found]
    facts = runs.drop_duplicates("arm_key").set_index("arm_key")[other]
    return found.join(facts, on="arm_key")


def nearest_loss(
    row: Mapping[Any, Any], judged: pd.DataFrame, learning_rate: float | None = None
) -> dict[str, Any]:
    """Find the loss of a model and recipe whose setting is nearest to that of a row.

    Args:
        row: Has the fields that tell settings apart, ``model``, ``precision``, ``machine`` and
            ``setting``.
        judged: From `judged_losses`.
        learning_rate: Of settings as near, the lowest at this rate or above comes first; None:
            the highest at which FP8 ends no worse than BF16.

    Returns:
        The values of `LOSS_COLUMNS`; nothing where no loss of the model and recipe was judged.
    """
    found = judged[(judged["model"] == row["model"]) & (judged["precision"] == row["precision"])]
    # Whether a trained model can go on in FP8 is another question.
    found = found[goes_on(found) == (FROM_WEIGHTS in row["setting"])]
    if found.empty:
        return {}
    apart = (~_alike(found, row)).sum(axis=1)
    counts = ~found["study"].str.startswith(FAILURE_STUDIES)
    own, decided = found["machine"] == row["machine"], found["verdict"] != "undecided"
    in_one_pass = found["setting"].str.contains(IN_ONE_PASS)
    is_lost, rates = found["verdict"] == DIVERGED, found["learning_rate"]
    is_worse = is_lost | (found["verdict"] == "different") & (found["gap_pct"] > 0)
    # Of those as near, a usual learning rate comes before a low one, then one as high as is asked
    # about, or asked about none the highest with a loss as BF16's: more seeds at one rate say
    # nothing of another. Of one rate comes a divergence, then what the machine's own runs decide,
    # then the most pairs: of many studies some decide by chance. Of as many, a later study may have
    # been made to decide what an earlier one left open, and then comes what was updated as the
    # row's runs were.
    order = pd.DataFrame({
        "apart": apart, "other_layers": found["fp8_part"] != row["fp8_part"],
        "low_rate": ~counts, "below": rates < (learning_rate or 0.0),
    })  # fmt: skip
    alike_at = [*(order[name] for name in order), rates]
    holds = (decided & ~is_worse).groupby(alike_at).transform("any")
    order = order.assign(**{
        "away": (rates - learning_rate).abs() if learning_rate else 0.0,
        "low": -rates.where(holds, 0.0), "sound": ~is_lost,
        "not_own": ~(own & decided), "few": -found["num_pairs"], "open": ~decided,
        "other_form": in_one_pass != (IN_ONE_PASS in row["setting"]), "elsewhere": ~own,
    })  # fmt: skip
    near = found.loc[order.sort_values([*order], kind="stable").index[0]]
    rate = near["learning_rate"]
    alike = _alike(found, near.to_dict())
    if near["path"] == "tuned":  # what is open with fewer layers in FP8 is open with more
        alike["fp8_part"] |= found["fp8_part"].map(with_fp8_head).eq(near["fp8_part"])
    same = alike.all(axis=1)
    there = counts & same & (found["learning_rate"] > rate)
    # "different" and "diverged" come before "undecided".
    above = found[there & (is_worse | ~decided)].sort_values(["verdict", "learning_rate"]).head(1)
    return {
        "loss_verdict": near["verdict"], "loss_gap_pct": near["gap_pct"],
        "loss_epochs": near["epochs"], "loss_study": near["study"],
        "loss_rate": rate, "loss_rate_above": next(iter(above["learning_rate"]), math.nan),
        **{f"loss_{name}_above": next(iter(above[name]), None)
           for name in ("verdict", "study", "machine")},
        "loss_machine": near["machine"], "loss_is_same": bool(apart[near.name] == 0),
        "loss_in_one_pass": bool(in_one_pass[near.name]),
        "loss_counts": bool(counts[near.name]),
        "loss_steps": near["steps_completed"], "loss_tokens": near["num_tokens_seen"],
    }  # fmt: skip


def _alike(found: pd.DataFrame, row: Mapping[Any, Any]) -> pd.DataFrame:
    """Return in which fields judged losses are of the setting of a row: one column each.

    On the tuned path, which has the loss head in FP8 today, such a loss is also one without's.
    """
    alike = pd.DataFrame({
        name: found[name].eq(row[name]) | (found[name].isna() & pd.isna(row[name]))
        for name in _FIELDS
    })  # fmt: skip
    if row["path"] == "tuned":
        alike["fp8_part"] |= found["fp8_part"].eq(with_fp8_head(row["fp8_part"]))
    own, theirs = (
        settings.str.extract(r"(\w+) optimizer states", expand=False).fillna("FP32")
        for settings in (pd.Series([row["setting"]]), found["setting"])
    )
    return alike.assign(optimizer_state=theirs.eq(own[0]))
