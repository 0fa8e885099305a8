"""torchtitan 0.2.2 as a trainer to be timed beside ours.

It is started as its own launcher starts it, on random tokens: no activation checkpointing, compiled
blocks and loss, FP32 weights and BF16 compute, through FSDP2 on several GPUs and through autocast
on one. FP8 is its tensorwise converter with the output layer left in BF16, and with the FP8
all-gather and precomputed scales where weights are sharded. It clips the gradients' norm at 1 in
every step; no flag of it turns that off. It logs no allocated memory.
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

from peer_runs import COLOUR, SCRIPTS, Cell, PeerTrainer, Repeat, RepeatFailed

from fp8study.core.errors import UserError

VERSION = "0.2.2"
NUM_DOCUMENTS = 256
_STEP = re.compile(
    r"^(?:\[rank0\]:)?\[titan\].* step: +(?P<step>\d+) +loss: +(?P<loss>\S+) +grad_norm: +\S+"
    r" +memory: +(?P<memory>[\d.]+)GiB\([\d.]+%\) +tps: (?P<rate>[\d,]+)"
    r" +tflops: [\d.,]+ +mfu: (?P<mfu>[\d.]+)%\s*$",
    re.MULTILINE,
)
#: All that its launcher imports, and its flags parsed, for which tyro imports more.
_START = (
    "import torchtitan.train; from torchtitan.config import ConfigManager; "
    "ConfigManager().parse_args([])"
)
_PARAMETERS = re.compile(r"size: ([\d,]+) total parameters")
_SWAPPED = re.compile(r"Swapped to Float8Linear layers with enable_fsdp_float8_all_gather=(\w+)")


class Shape(NamedTuple):
    flavour: str
    vocab_size: int
    module: str = ""


#: Our models that torchtitan can build.
SHAPES = {
    "llama-3.1-8b": Shape("8B", 128256),
    "llama-3.2-1b-untied": Shape("1B", 128256, "peer_flavours"),
}


def write_data(folder: Path, vocab_size: int, sequence_length: int) -> None:
    """Write a tokenizer of one word per token, and documents of as many random words as fit once.

    Uniform over the whole vocabulary: the embedding is read as widely as by a real tokenizer.
    """
    draw = random.Random(0)
    for name in ("tokenizer", "corpus"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    words = {str(token): token for token in range(vocab_size)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "0"},
    }
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with (folder / "corpus" / "data.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(NUM_DOCUMENTS):
            text = " ".join(str(draw.randrange(vocab_size)) for _ in range(sequence_length + 1))
            file.write(json.dumps({"text": text}) + "\n")


def command_of(data: Path, cell: Cell, precision: str, dump: Path, seed: int) -> list[str]:
    """Return the command line of one repeat; every flag is a field of torchtitan's JobConfig."""
    shape = SHAPES[cell.model]
    flags: dict[str, object] = {
        "job.dump_folder": dump,
        "model.name": "llama3",
        "model.flavor": shape.flavour,
        "model.hf_assets_path": data / "tokenizer",
        "training.dataset": "c4_test",  # a local folder with a text column; the path is ours
        "training.dataset_path": data / "corpus",
        "training.local_batch_size": cell.micro_batch_size,
        "training.seq_len": cell.sequence_length,
        "training.steps": cell.num_steps,
        "training.dataloader.num_workers": 1,  # no step tokenises, as none of ours does
        "training.dataloader.prefetch_factor": 8,
        "training.dtype": "float32",
        "training.mixed_precision_param": "bfloat16",
        "training.mixed_precision_reduce": "float32",
        "parallelism.data_parallel_shard_degree": cell.num_gpus,
        "activation_checkpoint.mode": "none",
        "compile.components": "model,loss",
        "optimizer.name": "AdamW",
        "optimizer.implementation": "fused",
        "optimizer.lr": 3e-4,
        "lr_scheduler.warmup_steps": 2,
        "metrics.log_freq": cell.log_every,
        "comm.init_timeout_seconds": 600,  # holds for the first step too, which compiles
        "debug.seed": seed,
    }
    switches = [
        "compile.enable", "metrics.disable_color_printing", "training.dataloader.pin_memory",
        "training.dataloader.persistent_workers",
    ]  # fmt: skip
    if shape.module:
        flags["experimental.custom_import"] = shape.module
    if precision == "fp8_tensorwise":
        flags["model.converters"] = "quantize.linear.float8"
        flags["quantize.linear.float8.filter_fqns"] = "output"
        if cell.num_gpus > 1:
            switches += [
                "quantize.linear.float8.enable_fsdp_float8_all_gather",
                "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
            ]
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={cell.num_gpus}", "--role=rank", "--tee=3", "-m", "torchtitan.train",
        *(f"--{name}={value}" for name, value in flags.items()),
        *(f"--{name}" for name in switches),
    ]  # fmt: skip


def read(text: str, cell: Cell, precision: str) -> Repeat:
    """Read the rates of the timed windows; a window reaches from one logged step to the next.

    Raises:
        RepeatFailed: The linear layers were not converted as asked, the log does not reach the last
            step, or its loss is no number.
    """
    found = _SWAPPED.findall(text)
    wanted = {str(cell.num_gpus > 1)} if precision == "fp8_tensorwise" else set()
    if set(found) != wanted:
        raise RepeatFailed("failed", f"{precision}: FP8 all-gather was {found or 'not mentioned'}")
    text, before = COLOUR.sub("", text), 0
    windows, shares, memory = [], [], []
    for line in _STEP.finditer(text):
        step = int(line["step"])
        if line["loss"] in ("nan", "inf", "-inf"):
            raise RepeatFailed("diverged", f"the loss is {line['loss']} at step {step}")
        memory.append(float(line["memory"]))
        if before >= cell.num_warmup_steps:
            windows.append(float(line["rate"].replace(",", "")))
            shares.append(float(line["mfu"]))
        before = step
    if before != cell.num_steps or not windows:
        raise RepeatFailed("failed", f"the log ends at step {before} of {cell.num_steps}")
    parameters = _PARAMETERS.search(text)
    count = int(parameters[1].replace(",", "")) if parameters else None
    return Repeat(windows, statistics.median(shares), max(memory), count)


def _commit_of(checkout: Path) -> str | None:
    # Only of a clone: git would answer with the commit of a repository that the folder lies in.
    if (checkout / ".git").exists():
        command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    note = checkout / "COMMIT"  # of a copy
    return note.read_text(encoding="utf-8").strip() if note.is_file() else None


def _python_path(checkout: Path) -> dict[str, str]:
    paths = [str(checkout.resolve()), str(SCRIPTS), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def check_checkout(checkout: Path) -> None:
    """Refuse a folder that is not the torchtitan whose flags and log are known, or cannot start.

    Raises:
        UserError: It is not, or does not: a package of its own is missing.
    """
    note = checkout / "assets" / "version.txt"
    if not (checkout / "torchtitan" / "train.py").is_file() or not note.is_file():
        raise UserError(f"checkout: '{checkout}' is no checkout of torchtitan; clone v{VERSION}")
    version = note.read_text(encoding="utf-8").strip()
    if version != VERSION:
        raise UserError(f"checkout: '{checkout}' is torchtitan {version}; check out v{VERSION}")
    started = subprocess.run(
        [sys.executable, "-c", _START], env=os.environ | _python_path(checkout),
        capture_output=True, text=True,
    )  # fmt: skip
    if started.returncode:
        reason = (started.stderr.strip() or "no output").splitlines()[-1]
        raise UserError(
            f"checkout: '{checkout}' does not start ({reason}); install tyro and torchdata with"
            " the packages they need"
        )


def torchtitan(checkout: Path, cell: Cell, output: Path) -> PeerTrainer:
    """Return torchtitan from a checkout, and write the data that it trains on under `output`.

    Raises:
        UserError: It cannot build the model, or `output` cannot be written.
    """
    if cell.model not in SHAPES:
        raise UserError(
            f"model: '{cell.model}' is none of torchtitan's here; choose one of {', '.join(SHAPES)}"
        )
    vocab_size = SHAPES[cell.model].vocab_size
    data = output / f"data-{vocab_size}-{cell.sequence_length}"
    try:
        write_data(data, vocab_size, cell.sequence_length)
    except OSError as error:
        raise UserError(
            f"results: '{output}' cannot be written ({error.strerror}); make it writable"
        ) from error
    environment = {
        **_python_path(checkout),
        # As torchtitan's own run_train.sh sets it.
        "PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(data / "cache"),
    }
    commit = _commit_of(checkout)
    return PeerTrainer("torchtitan", VERSION, commit, partial(command_of, data), read, environment)
