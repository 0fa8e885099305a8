r"""Measure the training speed of torchtitan 0.2.2 on this machine, for comparison with ours.

    python scripts/peer_torchtitan.py --checkout torchtitan --output peer --gpus 4 --batch 2 \
        --precision bf16 fp8_tensorwise

torchtitan is started as its own launcher starts it, once per repeat, on random tokens: no
activation checkpointing, compiled blocks and loss, FP32 weights and BF16 compute, through FSDP2 on
several GPUs and through autocast on one. FP8 is its tensorwise converter with the output layer left
in BF16, and with the FP8 all-gather and precomputed scales where weights are sharded. What follows
``--`` is passed on to it (with ``--label``, which keeps such a configuration apart). It clips the
gradients' norm at 1 in every step; no flag of it turns that off. Each repeat waits in line for its
GPUs as our own runs do.

Every configuration gets a folder under ``--output`` with the logs and one ``peer.json``. It has the
fields of `fp8study.analysis.peers.PeerRecord`; of these and of its further ones:

``status``: ``interrupted`` while repeats are still to come; ``status_detail`` says why.
``windows_tokens_per_second``: what the peer reports each ``log_every`` of its ``num_steps`` steps,
without the windows that overlap the first ``num_warmup_steps``. Older records have their median,
not the rate over all of them, in ``tokens_per_second_per_gpu``.
``mfu_pct``: one number a repeat, the windows' median, as the peer counts FLOPs and peak;
``num_parameters`` is its count, too.
``memory_peak_gib``: of rank 0, warm-up included; the peer logs no allocated memory.
``commit``: the peer's, from git or from a file ``COMMIT`` in the checkout.

The exit status is 1 if a configuration did not complete; the others are measured all the same.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from peer_log import (
    PeerTrainer,
    Repeat,
    RepeatFailed,
    check_precision,
    read_log,
    why_failed,
)

from fp8study.core.records import write_json
from fp8study.run.children import end
from fp8study.run.gpu_lease import lease
from fp8study.run.machine import machine_facts, this_machine, versions

VERSION = "0.2.2"
SCRIPTS = Path(__file__).resolve().parent
PACKAGES = ("torchdata", "tyro")
NUM_DOCUMENTS = 256


class Shape(NamedTuple):
    name: str
    flavour: str
    vocab_size: int
    module: str = ""


SHAPES = {
    "8b": Shape("llama-3.1-8b", "8B", 128256),
    "1b": Shape("llama-3.2-1b-untied", "1B", 128256, "peer_flavours"),
    "debug": Shape("torchtitan-debug", "debugmodel", 2048),
}
#: Of each repeat, in a record.
MEASURED = ("tokens_per_second_per_gpu", "windows_tokens_per_second", "mfu_pct", "memory_peak_gib")
#: Blocks on other GPUs add to the same record.
_writing = threading.Lock()
#: What every configuration of one session shares: the options, and what `main` adds to them.
Plan = argparse.Namespace


def fail(message: str) -> NoReturn:
    sys.exit(f"peer_torchtitan: {message}")


def utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


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


def data_folder(plan: Plan) -> Path:
    return plan.output / f"data-{plan.shape.vocab_size}-{plan.sequence_length}"


def command_of(plan: Plan, precision: str, batch: int, dump: Path, seed: int) -> list[str]:
    """Return the command line of one repeat; every flag is a field of torchtitan's JobConfig."""
    data = data_folder(plan)
    flags: dict[str, object] = {
        "job.dump_folder": dump,
        "model.name": "llama3",
        "model.flavor": plan.shape.flavour,
        "model.hf_assets_path": data / "tokenizer",
        "training.dataset": "c4_test",  # a local folder with a text column; the path is ours
        "training.dataset_path": data / "corpus",
        "training.local_batch_size": batch,
        "training.seq_len": plan.sequence_length,
        "training.steps": plan.steps,
        "training.dataloader.num_workers": 1,  # no step tokenises, as none of ours does
        "training.dataloader.prefetch_factor": 8,
        "training.dtype": "float32",
        "training.mixed_precision_param": "bfloat16",
        "training.mixed_precision_reduce": "float32",
        "parallelism.data_parallel_shard_degree": plan.gpus,
        "activation_checkpoint.mode": "none",
        "compile.components": "model,loss",
        "optimizer.name": "AdamW",
        "optimizer.implementation": "fused",
        "optimizer.lr": 3e-4,
        "lr_scheduler.warmup_steps": 2,
        "metrics.log_freq": plan.log_every,
        "comm.init_timeout_seconds": 600,  # holds for the first step too, which compiles
        "debug.seed": seed,
    }
    switches = [
        "compile.enable", "metrics.disable_color_printing", "training.dataloader.pin_memory",
        "training.dataloader.persistent_workers",
    ]  # fmt: skip
    if plan.shape.module:
        flags["experimental.custom_import"] = plan.shape.module
    if precision == "fp8_tensorwise":
        flags["model.converters"] = "quantize.linear.float8"
        flags["quantize.linear.float8.filter_fqns"] = "output"
        if plan.gpus > 1:
            switches += [
                "quantize.linear.float8.enable_fsdp_float8_all_gather",
                "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
            ]
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={plan.gpus}", "--role=rank", "--tee=3", "-m", "torchtitan.train",
        *(f"--{name}={value}" for name, value in flags.items()),
        *(f"--{name}" for name in switches),
        *plan.extra,
    ]  # fmt: skip


def environment_of(plan: Plan) -> dict[str, str]:
    paths = [str(plan.checkout), str(SCRIPTS), os.environ.get("PYTHONPATH", "")]
    return {
        # As torchtitan's own run_train.sh sets it.
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(data_folder(plan) / "cache"),
    }


def run_repeat(plan: Plan, command: list[str], log: Path, precision: str) -> Repeat:
    """Run torchtitan once, its output in `log`; raise `RepeatFailed` if it gives no number."""
    environment = environment_of(plan)
    with log.open("wb") as output, ExitStack() as held:
        if len(plan.gpu_indices) >= plan.gpus:  # else `main` has said so, and torchtitan will fail
            taken = held.enter_context(lease(plan.gpus, plan.gpu_indices)).indices
            environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, taken))
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            env=environment, cwd=log.parent, start_new_session=True,
        )  # fmt: skip
        try:
            code = child.wait(plan.timeout)
        except subprocess.TimeoutExpired:
            raise RepeatFailed("failed", f"no end within {plan.timeout} s") from None
        finally:  # torchrun's workers must not keep the GPUs
            end(child)
    text = log.read_text(encoding="utf-8", errors="replace")
    if code:
        raise why_failed(text, code)
    return plan.trainer.read(text, plan, precision)


def read(text: str, plan: Plan, precision: str) -> Repeat:
    check_precision(text, precision, plan.gpus)
    return read_log(text, plan.steps, plan.warmup_steps)


def measure(plan: Plan, record: dict[str, Any], repeat: int) -> None:
    """Add one repeat to a configuration's record, and write it to its folder."""
    folder = plan.output / record["configuration"]
    log = folder / f"repeat-{repeat}.log"
    precision, batch = record["precision"], record["micro_batch_size"]
    command = plan.trainer.command_of(plan, precision, batch, folder / "dump", repeat)
    # Records are published: they say what was called, not where this machine keeps it.
    told = shlex.join(["python", *command[1:]]).replace(str(plan.output), "OUTPUT")
    record["command"] = told.replace(str(SCRIPTS), "scripts")
    record["log_files"].append(log.name)
    try:
        result = run_repeat(plan, command, log, precision)
    except RepeatFailed as failure:
        record |= {"status": failure.status, "status_detail": f"repeat {repeat}: {failure}"}
        shown = f"{failure.status}: {failure}"
    else:
        rate = statistics.harmonic_mean(result.windows)  # they are of equally many tokens
        values = (rate, result.windows, result.mfu_pct, result.memory_peak_gib, repeat)
        with _writing:
            for name, value in zip((*MEASURED, "blocks"), values, strict=True):
                if name in record:
                    record[name].append(value)
            record["num_parameters"] = result.num_parameters
            if len(record["windows_tokens_per_second"]) == plan.repeats:
                record |= {"status": "completed", "status_detail": None}
        shown = f"{rate:,.0f} tokens/s/GPU, {result.memory_peak_gib:.1f} GiB reserved"
    with _writing:
        record["ended_at"] = utc_now()
        write_json(folder / "peer.json", record)
    print(f"{record['configuration']} repeat {repeat}: {shown}", flush=True)


def commit_of(checkout: Path) -> str | None:
    # Only of a clone: git would answer with the commit of a repository that the folder lies in.
    if (checkout / ".git").exists():
        command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    note = checkout / "COMMIT"
    return note.read_text(encoding="utf-8").strip() if note.is_file() else None


def check_checkout(checkout: Path) -> None:
    note = checkout / "assets" / "version.txt"
    if not (checkout / "torchtitan" / "train.py").is_file() or not note.is_file():
        fail(f"--checkout {checkout}: is no checkout of torchtitan")
    version = note.read_text(encoding="utf-8").strip()
    if version != VERSION:
        fail(f"--checkout {checkout}: is torchtitan {version}; check out v{VERSION}")


def positive(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def parse(words: list[str]) -> Plan:
    parser = argparse.ArgumentParser(description="Measure torchtitan's training speed here.")
    parser.error = fail  # type: ignore[method-assign]
    add = parser.add_argument
    add("--checkout", type=Path, required=True, help=f"torchtitan v{VERSION}")
    add("--output", type=Path, required=True)
    add("--gpus", type=positive, default=1)
    add("--batch", type=positive, nargs="+", default=[1], help="sequences a GPU")
    add("--precision", nargs="+", choices=["bf16", "fp8_tensorwise"], default=["bf16"])
    add("--model", choices=sorted(SHAPES), default="8b")
    add("--sequence-length", type=positive, default=4096)
    add("--steps", type=positive, default=40)
    add("--warmup-steps", type=positive, default=10)
    add("--log-every", type=positive, default=5)
    add("--repeats", type=positive, default=3)
    add("--timeout", type=positive, default=600, help="seconds for one repeat")
    add("--label", default="", help="added to the name of each configuration")
    add("extra", nargs="*", help="after --: more flags for torchtitan")
    arguments = parser.parse_args(words)
    if arguments.warmup_steps % arguments.log_every or arguments.steps % arguments.log_every:
        fail("--steps and --warmup-steps must be multiples of --log-every")
    if arguments.steps <= arguments.warmup_steps:
        fail(f"--steps {arguments.steps}: must be above --warmup-steps {arguments.warmup_steps}")
    if arguments.extra and not arguments.label:
        fail("--label: name the configuration that the flags after -- make")
    if not re.fullmatch(r"[\w.-]*", arguments.label):
        fail(f"--label {arguments.label!r}: letters, digits, '.', '_' and '-' only")
    return arguments


def new_records(plan: Plan) -> list[dict[str, Any]]:
    """Return a record of each configuration that is not completed yet, with no repeat in it."""
    installed = {found.name: found.version for found in metadata.distributions()}
    peers = {name: installed.get(name) for name in PACKAGES}
    shared = {
        "name": plan.trainer.name, "version": plan.trainer.version,
        "commit": plan.trainer.commit,
        "model": plan.shape.name, "sequence_length": plan.sequence_length, "num_gpus": plan.gpus,
        "num_warmup_steps": plan.warmup_steps, "num_steps": plan.steps,
        "log_every": plan.log_every, "machine": machine_facts(plan.machine),
        "versions": versions() | peers, "started_at": utc_now(), "num_parameters": None,
        "status": "interrupted", "status_detail": "repeats were still to come",
    }  # fmt: skip
    records = []
    for batch, precision in itertools.product(plan.batch, plan.precision):
        words = [plan.shape.name, precision, f"{plan.gpus}gpu", f"b{batch}", plan.label]
        configuration = "-".join(filter(None, words))
        folder, before = plan.output / configuration, None
        with suppress(OSError, ValueError, LookupError, TypeError):
            before = json.loads((folder / "peer.json").read_text(encoding="utf-8"))["status"]
        if before == "completed":
            print(f"{configuration}: completed before", flush=True)
            continue
        folder.mkdir(parents=True, exist_ok=True)
        own = {"configuration": configuration, "micro_batch_size": batch, "precision": precision}
        records.append(own | shared | {name: [] for name in (*MEASURED, "log_files")})
    return records


def prepare(words: list[str]) -> Plan:
    """Read the options and write the data that the repeats train on."""
    plan = parse(words)
    check_checkout(plan.checkout)
    plan.machine, plan.shape = this_machine(), SHAPES[plan.model]
    plan.gpu_indices = [gpu.index for gpu in plan.machine.gpus]
    plan.checkout, plan.output = plan.checkout.resolve(), plan.output.resolve()
    try:
        write_data(data_folder(plan), plan.shape.vocab_size, plan.sequence_length)
    except OSError as error:
        fail(f"--output {plan.output}: cannot be written: {error.strerror}")
    if len(plan.gpu_indices) < plan.gpus:
        print(f"peer_torchtitan: {len(plan.gpu_indices)} GPUs here, not {plan.gpus}", flush=True)
    commit = commit_of(plan.checkout)
    plan.trainer = PeerTrainer("torchtitan", VERSION, commit, command_of, read)
    return plan


def main() -> None:
    plan = prepare(sys.argv[1:])
    records = new_records(plan)
    # Repeat by repeat, so that a drift of the machine meets every configuration alike.
    for repeat in range(1, plan.repeats + 1):
        for record in records:
            if record["status"] == "interrupted":
                measure(plan, record, repeat)
    sys.exit(any(record["status"] != "completed" for record in records))


if __name__ == "__main__":
    main()
