"""How the report writes a number, a range, a text of a record, and what is not there yet."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterable

import pandas as pd

from fp8study.analysis.runs.naming import PRECISION_LABELS
from fp8study.core.hardware import GPU_PEAKS, find_peak
from fp8study.core.words import count as count
from fp8study.core.words import number as number
from fp8study.core.words import rate as plain_rate

#: Says something of a table.
Say = Callable[[pd.DataFrame], str]


def escape(text: object) -> str:
    """Make a text from a record safe inside Markdown."""
    return " ".join(re.sub(r"([\\`*_\[\]<>$|])", r"\\\1", str(text)).split())


def how_to_get(study: str = "") -> str:
    """Say which command makes the records of a study, or of the one that fits the machine."""
    named = f" STUDY={study}" if study else ""
    return f"run `make reproduce{named}` on NVIDIA GPUs"


def missing(what: str, study: str) -> str:
    """Say that the records of a study are not there yet, in place of a sentence about them."""
    return f"**{what}: no records yet:** {how_to_get(study)}."


def no_gpu_records(study: str = "") -> str:
    """Say that there is nothing from a GPU, as plain text for tables and figures."""
    return f"No GPU records here yet: {how_to_get(study).replace('`', '')}."


def recipe(precision: object) -> str:
    """Write a precision, or FP32, as the report calls it."""
    return PRECISION_LABELS.get(str(precision), str(precision).upper())


def span(values: Iterable[float], spec: str, unit: str = "") -> str:
    """Write the smallest and the largest value, or the one that they are written as."""
    known = pd.Series(values, dtype=float)
    low, high = (number(float(end), spec) for end in (known.min(), known.max()))
    return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"


def interval(low: float, high: float, spec: str) -> str:
    """Write an interval, or nothing where there is none."""
    return "" if pd.isna(low) else f"{number(low, spec)} to {number(high, spec)}"


def rate(value: float) -> str:
    """Write a learning rate that no line of a page breaks."""
    return plain_rate(value).replace("-", "\u2011")


def in_words(text: str) -> str:
    """Write out what a setting abbreviates: ``BF16 masters`` are master weights."""
    return re.sub(r"\bmasters\b", "master weights", text)


#: The label of a committed machine: a GPU's name, and how many of them.
_LABEL = re.compile(r"(.+)x(\d+)")
_GPU_NAMES = {peak.name_part.lower().replace(" ", "-"): peak.name_part for peak in GPU_PEAKS}


def machine_name(machine: object) -> str:
    """Name a machine for its reader: by its GPUs, as ``4 × H200``, or as the reader's own.

    Committed machines are labelled by their GPUs, as ``h200x4`` (CONTRIBUTING.md): a label stays
    where a folder is meant. Any other label stays as it is.
    """
    if machine == "local":
        return "your machine"
    found = _LABEL.fullmatch(str(machine))
    gpu = _GPU_NAMES.get(found[1]) if found else None
    return f"{int(found[2])} × {gpu}" if found and gpu else str(machine)


def check_names(runs: pd.DataFrame) -> None:
    """Warn of each folder that is named by GPUs other than those of its records.

    Runs on one GPU of a larger machine may lie with those of a machine of one.
    """
    gpu = runs[(runs["device"] == "cuda") & (runs["machine"] != "local")]
    for machine, own in gpu.groupby("machine"):
        kinds = {getattr(find_peak(name), "name_part", str(name)) for name in own["gpu_name"]}
        used, most = own["num_gpus"].max(), own[["num_gpus", "num_gpus_on_machine"]].max().max()
        said, numbers = machine_name(machine), [most, 1] if used == 1 else [most]
        seen = [f"{number} × {' and '.join(sorted(kinds))}" for number in numbers]
        if said not in (machine, *seen):
            warnings.warn(
                f"results/reference/{machine}: its name says {said}, its records are of {seen[0]}; "
                "rename the folder",
                stacklevel=2,
            )


def place(row: pd.Series) -> str:
    """Name the study and the machine of a row."""
    return f"{escape(row['study'])} on {escape(machine_name(row['machine']))}"


def own_first(table: pd.DataFrame) -> pd.DataFrame:
    """Put the rows of the reader's own machine before those of the others, most rows first."""
    names = table["machine"].astype(str).reset_index(drop=True)
    rank = pd.DataFrame({"own": names == "local", "name": names})
    rank["rows"] = rank.groupby("name")["own"].transform("size")
    order = rank.sort_values(["own", "rows", "name"], ascending=[False, False, True], kind="stable")
    return table.iloc[order.index]


def by_machine(table: pd.DataFrame, with_gpus: bool = False) -> list[tuple[str, pd.DataFrame]]:
    """Return `named_machines`, the names safe inside Markdown."""
    return [(escape(name), rows) for name, rows in named_machines(table, with_gpus)]


def named_machines(table: pd.DataFrame, with_gpus: bool = False) -> list[tuple[str, pd.DataFrame]]:
    """Split a table by machine, the reader's own first: what two machines did is never pooled.

    Returns:
        The machine, `with_gpus` or if it is the reader's with its GPUs' full names, and its rows.
    """
    parts = []
    for machine in own_first(table)["machine"].unique():
        rows = table[table["machine"] == machine]
        is_asked = "gpu_name" in rows and (with_gpus or machine == "local")
        gpus = ", ".join(rows["gpu_name"].dropna().unique()) if is_asked else ""
        parts.append((machine_name(machine) + f" ({gpus})" * bool(gpus), rows))
    return parts


def per_machine(table: pd.DataFrame, say: Say, between: str = "\n\n") -> str:
    """Say a sentence of each machine's rows alone, and of which machine where there are several."""
    said = [(machine, say(rows)) for machine, rows in by_machine(table)]
    told = [(machine, _capital(text)) for machine, text in said if text]
    named = [f"**{at_start(m)}.** {text}" if len(said) > 1 else text for m, text in told]
    return between.join(named)


def _capital(text: str) -> str:
    """Begin a sentence with a capital, but leave the name of a model as it is."""
    first = text.split(maxsplit=1)[0]
    return text if re.search(r"[0-9]", first) else f"{text[0].upper()}{text[1:]}"


def at_start(machine: str) -> str:
    """Write the name of a machine, from `by_machine`, where a sentence begins."""
    return machine.replace("your", "Your", 1) if machine.startswith("your ") else machine


def each_machine(between: str = " ", empty: str = "") -> Callable[[Say], Say]:
    """Make a function of a table say each machine's rows alone, and of an empty table `empty`."""

    def decorate(say: Say) -> Say:
        @functools.wraps(say)
        def said(table: pd.DataFrame) -> str:
            if table.empty:
                return empty
            return per_machine(table, say, between) if "machine" in table else say(table)

        return said

    return decorate
