"""The rows of docs/results.md's table of single switches, from the records."""

import re

import pandas as pd

from fp8study.analysis.speed import switch_table
from tests.project.quotes import per_cent, runs_of

#: Model, GPUs and batch of each column.
PLACES = (("llama-3.1-8b", 1, 1), ("llama-3.1-8b", 2, 2), ("llama-3.2-1b-untied", 1, 8))
_ONE_PASS = r"(weights cast each update, )?one pass AdamW(, gradients in the compute dtype)?"
_LAYOUTS = r"separate transposes, FP8 cast to both layouts(, gradients copied by reduce stream)?"
#: Each row's first cell, its studies, and how a study's setting writes the switch.
SWITCHES = {
    "`update_kernel=one_pass`, `weight_cast=each_update`, `gradient_dtype=compute`":
        ("h200x1/tuned-form h200x2/fsdp-form", _ONE_PASS),
    "SwiGLU by kernels that write FP8": ("h200x2/swiglu-form", "SwiGLU by kernels"),
    "collectives by copy engines": ("h200x2/copy-form", "collectives by copy engines"),
    "the gradient norm by kernels":
        ("h200x2/one-gpu-form h200x2/norm-form", "gradients' norm (by kernel|as summed)"),
    "`cast_kernels=both_layouts`, `transposes=separate`, on two `gradient_copy=reduce_stream`":
        ("h200x4/both-layouts", _LAYOUTS),
    "by hand: `attention=flash4`": ("h200x4/attention-form", "flash4 attention"),
    "by hand: `fast_accumulation=all`": ("h200x4/accumulation-form", "fast accumulation"),
    "taken out: gradients all to all in BF16": ("h200x2/comm-form", "gradients by all to all"),
    "taken out: 8 SMs left to NCCL": ("h200x2/comm-form", "8 NCCL CTAs, 8 SMs spared"),
    "taken out: NCCL in 8 blocks of threads": ("h200x2/copy-form", "8 NCCL CTAs"),
    "taken out: each FP8 matrix written once": ("h200x2/compiler-form", "FP8 written once"),
    "taken out: kernels launched by the compiler":
        ("h200x4/kernel-form", "own kernels launched by compiler"),
}  # fmt: skip


def switch_rows() -> list[str]:
    machines = sorted(
        {place.split("/")[0] for said, _ in SWITCHES.values() for place in said.split()}
    )
    gains = pd.concat(map(switch_table, map(runs_of, machines)))
    batch = gains["setting_plain"].str.extract(r"batch (\d+)", expand=False).astype(float)
    gains = gains.assign(batch=batch, place=gains["machine"] + "/" + gains["study"])
    return [
        " | ".join([f"| {name}", *(_cell(gains, name, place, *how) for place in PLACES)]) + " |"
        for name, how in SWITCHES.items()
    ]


def _cell(
    gains: pd.DataFrame, name: str, place: tuple[str, int, int], studies: str, words: str
) -> str:
    """What FP8 gains there and, in brackets, BF16; of several forms the one with most switches."""
    there = (gains[["model", "num_gpus", "batch"]] == list(place)).all(axis=1)
    there &= gains["place"].isin(studies.split())
    rows = gains[there & gains["setting"].map(lambda said: bool(re.fullmatch(words, said)))]
    if not name.startswith("taken out"):
        assert (rows["num_blocks"] >= 2).all(), name
    rows = rows.sort_values("setting", key=lambda column: column.str.len())
    gained = rows.groupby("precision")["gain_pct"].last().map(per_cent)
    bf16 = f" ({gained['bf16'].removesuffix(' %')})" if "bf16" in gained else ""
    return gained["fp8_tensorwise"].removesuffix(" %") + bf16 if len(gained) else "–"
