"""What records say of FP8's loss, nearest to a model that is asked about."""

from __future__ import annotations

import math
from types import MappingProxyType

import numpy as np
import pandas as pd

from fp8study.analysis.advice.figures import Row
from fp8study.analysis.decision import CONCLUSIVE
from fp8study.analysis.floors import RANDOM, pooled_fp8, scatter_table
from fp8study.analysis.laws.frozen import Runs
from fp8study.analysis.laws.shape import ModelShape, shape_of
from fp8study.analysis.losses import comparisons, loss_gap_table
from fp8study.analysis.runs.frames import PLACE
from fp8study.analysis.runs.naming import FAST_ACCUMULATION, FROM_WEIGHTS, num_kernels
from fp8study.analysis.runs.pairing import healthy, shorten_arms
from fp8study.analysis.stats import interval_text
from fp8study.core.config import ResolvedConfig
from fp8study.core.presets import PRESETS
from fp8study.core.records import MIN_PAIRS_FOR_INTERVAL
from fp8study.core.words import amount, count, number, rate

#: What the tokens of a step are counted by.
_OF_A_STEP = ("num_gpus", "micro_batch_size", "gradient_accumulation_steps", "sequence_length")


def reference_gaps(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the loss gaps of the records that come with the package, of unseen text first.

    `runs` is `runs_frame` of any records; ``loss`` says which: ``validation`` or ``training``.
    """
    runs = shorten_arms(runs[runs["machine"] != "local"])
    return pd.concat(
        [
            loss_gap_table(runs, "validation_loss").assign(loss="validation"),
            loss_gap_table(runs).assign(loss="training"),
        ]
    )


def scatter_near(runs: pd.DataFrame, shape: ModelShape, learning_rate: float) -> pd.DataFrame:
    """Return the rows of `scatter_table` at the rate nearest to one, from random weights.

    Of the model, if pairs of it were run at a rate that is at most twice or half of that, else of
    the model nearest in size of which such were; unless it took the model more at a lower rate.
    """
    no_curves = pd.DataFrame(columns=[*PLACE, "loss"])  # which tell of rises alone
    table = scatter_table(no_curves, runs)
    table = table[table["starts_from"] == RANDOM]
    table = table.assign(away=np.log2(table["learning_rate"] / learning_rate).abs())
    own = table[table["model"] == shape.name]
    below = own[own["learning_rate"] < learning_rate]
    if len(own) and own["away"].min() <= 1:
        near = own
    else:
        near = table[table["away"] <= max(1, table["away"].min())]
        sizes = {name: shape_of(name).num_parameters for name in {*near["model"]} & {*PRESETS}}
        far = np.log2(near["model"].map(sizes).astype(float) / shape.num_parameters).abs()
        near = near[far == far.min()] if sizes else near
        if below["num_to_decide"].max() > near["num_to_decide"].max():
            near = below
    return near[near["away"] == near["away"].min()]


def pooled_losses(pooled: pd.DataFrame) -> pd.DataFrame:
    """Write the FP8 rows of `fp8study.analysis.floors.pooled_table` as those of `reference_gaps`.

    Those with an interval.
    """
    pooled = pooled_fp8(pooled)
    pooled = pooled[pooled["low_90"].notna()]
    pooled = pooled.rename(columns={"low_90": "gap_pct_low_90", "high_90": "gap_pct_high_90"})
    return pooled.assign(
        loss="validation", stale=False, swept=False, learnt_pct=float("nan"), arm=pooled["what"],
        machine=pooled["machines"].str.replace(", ", "+"),
    )  # fmt: skip


def nearest_losses(
    table: pd.DataFrame,
    runs: Runs,
    shape: ModelShape,
    precision: str,
    num_gpus: int,
    judged: Row = MappingProxyType({}),
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what is known of FP8's loss, and what that leaves open.

    First what the verdict rests on, the loss that was `judged` in this very setting, in the path's
    latest form; then of the nearest model, on the nearest number of GPUs with three pairs; then of
    its most pairs and, where it is the model asked about, at the other learning rates of that
    study; then of the most pairs of all, then of the longest training: of each the loss on text
    kept out, where that was scored. Last, of the nearest model that goes on from trained weights.
    """
    table = _of_recipe(table, runs, shape, precision)
    if table.empty:
        return (), (f"anything: no run of {precision} was compared with BF16",)
    trained, table = _by_start(table)
    if table.empty:
        return (), (f"anything: no run of {precision} from random weights was compared with BF16",)
    sizes = {name: shape_of(name).num_parameters for name in table["model"].unique()}
    near, longest = (
        table[table[of] == end].head(1)
        for of, end in (("away", table["away"].min()), ("tokens", table["tokens"].max()))
    )
    nearest = table[table["away"] == table["away"].min()]
    order = pd.DataFrame({
        "few": nearest["num_pairs"] < MIN_PAIRS_FOR_INTERVAL,
        "factor": np.log2(nearest["num_gpus"] / num_gpus).abs(),
        "fewer": -nearest["num_gpus"],
    }).reset_index(drop=True)  # fmt: skip
    here = nearest.iloc[order.sort_values([*order], kind="stable").index[:1]]
    own = nearest.head(0)
    if judged.get("loss_is_same"):
        where = [judged["loss_machine"], judged["loss_study"]]
        own = nearest[(nearest[["machine", "study"]] == where).all(axis=1)]
        own = own[own["arm"].map(num_kernels).eq(own["arm"].map(num_kernels).max())].head(1)
    same = table[(table["away"] == 0) & (table["study"] == near["study"].iloc[0])]
    rows = pd.concat(
        [own, here, near, same, table.head(1), longest, table.drop_duplicates("study")]
    )
    rows = rows.drop_duplicates(["model", "rate", "num_gpus"]).head(4)
    evidence = [_told(row) for _, row in rows.iterrows()]
    going_on = _nearest_on(trained, num_gpus)
    evidence += [f"{FROM_WEIGHTS}: {_told(row)}" for _, row in going_on.iterrows()]
    uncovered = [*_longer(table, nearest, runs), *_of_model(shape, nearest, sizes)]
    return tuple(evidence), tuple(uncovered)


def from_weights(
    table: pd.DataFrame, runs: Runs, shape: ModelShape, precision: str, num_gpus: int
) -> str:
    """Say in one line how the nearest model ended that went on from trained weights, if any did."""
    table = _of_recipe(table, runs, shape, precision)
    near = _nearest_on(_by_start(table)[0], num_gpus) if len(table) else table
    return "".join(
        f"{FROM_WEIGHTS} at {row['rate']} the loss of {row['model']} is {row['verdict']}: "
        f"{number(row['gap_pct'], '+.2f')} % ({_ends(row)}; {row['machine']}/{row['study']})"
        for _, row in near.iterrows()
    )


def _of_recipe(table: pd.DataFrame, runs: Runs, shape: ModelShape, precision: str) -> pd.DataFrame:
    """Return the comparisons of a recipe with how far ``away`` each model is, in weights.

    And with the learning ``rate`` and the most ``tokens`` of their runs; the most pairs first, then
    the loss on unseen text, then the nearest model.
    """
    if table.empty:
        return table
    table = comparisons(table)
    table = healthy(table[table["precision"] == precision])
    table = table[table["model"].isin(PRESETS) & table["gap_pct"].notna()]
    table = table.astype({"num_gpus": int})  # of tables of which some are empty
    # Not arms that put other layers into FP8 than runs do by default, or add up so.
    table = table[~_says(table).str.contains(f"skips|{FAST_ACCUMULATION}")]
    away = {
        name: abs(shape_of(name).num_parameters - shape.num_parameters)
        for name in table["model"].unique()
    }
    seen = {name: record.data.get("num_tokens_seen") or 0 for name, record in runs}
    rates = {
        name: rate(value)
        for name, record in runs
        if (value := record.config.get("learning_rate")) is not None
    }
    return table.assign(
        away=table["model"].map(away),
        rate=[
            " and ".join(sorted({rates[name] for name in ids.split() if name in rates}))
            for ids in table["run_ids"]
        ],
        tokens=[max(seen.get(name, 0) for name in ids.split()) for ids in table["run_ids"]],
    ).sort_values(["num_pairs", "loss", "away"], ascending=[False, False, True], kind="stable")


def _by_start(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the rows of training that goes on from trained weights, and those from random ones."""
    is_trained = _says(table).str.contains(FROM_WEIGHTS)
    return table[is_trained], table[~is_trained]


def _nearest_on(table: pd.DataFrame, num_gpus: int) -> pd.DataFrame:
    """Return the row of the nearest model on the nearest number of GPUs, of the most pairs."""
    off = np.log2(table["num_gpus"] / num_gpus).abs()
    return table.assign(off=off).sort_values(["away", "off"], kind="stable").head(1)


def _longer(table: pd.DataFrame, nearest: pd.DataFrame, runs: Runs) -> list[str]:
    """Say of how long training and of how large steps no loss is settled of the nearest model.

    Nor of any, where that is more; all from random weights.
    """
    said, name = [], nearest["model"].iloc[0]
    settled = table["verdict"].isin(CONCLUSIVE) & table["num_pairs"].ge(MIN_PAIRS_FOR_INTERVAL)
    by_run = {
        run: math.prod(int(record.config.get(field) or 1) for field in _OF_A_STEP)
        for run, record in runs
    }
    sizes = [max(by_run.get(run, 0) for run in ids.split()) for ids in table["run_ids"]]
    table = table.assign(step=sizes)[settled]
    own = table[table["model"] == name]
    for what, column in (("training on", "tokens"), ("steps of", "step")):
        most, of_any = own[column].max(), table[column].max()
        if most > 0:  # of a model of which something is settled
            rest = f" (any model: {amount(of_any)})" * bool(of_any > most)
            said.append(
                f"{what} more than {amount(most)} tokens with {name} from random weights{rest}"
            )
    return said


def _says(table: pd.DataFrame) -> pd.Series:
    """Return what each row says of its arm, which of a pooled row is all."""
    return table["arm"] + " " + table["setting"].fillna("")


def _ends(row: pd.Series) -> str:
    """Write the 90 % interval, by which losses are judged."""
    low, high = row["gap_pct_low_90"], row["gap_pct_high_90"]
    if pd.isna(low):
        return f"{count(row['num_pairs'], 'pair')}: no interval"
    return f"90 %: {interval_text(low, high)}"


def _told(row: pd.Series) -> str:
    return (
        f"{row['model']} on {count(row['num_gpus'], 'GPU')}, {row['tokens'] / 1e6:,.3g} million "
        f"tokens, {row['epochs']:.1f} epochs, learning rate {row['rate']}, "
        f"{row['loss']} loss: {number(row['gap_pct'], '+.2f')} % ({_ends(row)}), "
        f"{row['verdict']}; {row['machine']}/{row['study']}"
    )


def formats_uncovered(config: ResolvedConfig, judged: Row) -> list[str]:
    """Say which formats of weights and states the evidence leaves open, unless it was judged so."""
    if judged.get("loss_is_same"):
        return []
    found = ["master weights in BF16"] * (config.master_dtype == "bf16")
    narrow = config.optimizer_state != "fp32"
    return found + [f"optimizer states in {config.optimizer_state.upper()}"] * narrow


def _of_model(shape: ModelShape, nearest: pd.DataFrame, sizes: dict[str, int]) -> list[str]:
    """Say up to what the loss of the `nearest` model is known, and what that leaves of another."""
    name = nearest["model"].iloc[0]
    settled = nearest.loc[nearest["verdict"].isin(CONCLUSIVE), "rate"]
    rates = pd.to_numeric(settled, errors="coerce").dropna()
    rest = pd.to_numeric(nearest["rate"], errors="coerce").loc[lambda each: each > rates.max()]
    tried = f" ({' and '.join(map(rate, sorted({*rest})))}: undecided)" if len(rest) else ""
    found = []
    if len(rates):
        above = f"learning rates above {rate(rates.max())}{tried}"
        found.append(f"{name} from random weights at {above}")
    if shape.name not in sizes:
        found.append(f"{shape.name} itself; the nearest is {name}")
    least, most = min(sizes.values()), max(sizes.values())
    if shape.num_parameters < least:
        found.append(f"models of fewer than {least / 1e9:.1f} billion weights")
    elif shape.num_parameters > most:
        found.append(f"models of more than {most / 1e9:.1f} billion weights")
    return found
