"""What a record holds, by section and kind of value, and whether it does.

A record is checked as it is read: one that is damaged is set aside and named, whatever is wrong
with it, and everything that is made of records may rely on what stands here.
"""

from __future__ import annotations

import datetime
import json
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8study.core.errors import UserError
from fp8study.core.recipes import RECIPES

#: The parts of a run's start-up in their order; a record names each with the suffix ``_seconds``.
PARTS = ("launch", "imports", "gpu_wait", "device", "model", "sharding", "rest")

TEXT, NUMBER, COUNT, FLAG = "text", "number", "count", "flag"

#: What a run's warning says of a switch that was not as its configuration has it.
INSTEAD = "the run has {}={}"
_INSTEAD = re.compile(INSTEAD.format(r"(\w+)", r"(\w+)$"))


def as_run(config: Mapping[str, Any], warnings: Iterable[str]) -> dict[str, Any]:
    """Return a record's configuration with what its run had instead, as its `warnings` say."""
    had = (_INSTEAD.search(warning) for warning in warnings)
    return dict(config) | {found[1]: found[2] for found in had if found}


def kinds(*, text: str = "", number: str = "", count: str = "", flag: str = "") -> dict[str, str]:
    """Return name → kind from lists of names."""
    by_kind = {TEXT: text, NUMBER: number, COUNT: count, FLAG: flag}
    return {name: kind for kind, names in by_kind.items() for name in names.split()}


#: Section → the fields that become columns of `fp8study.analysis.runs.frames.runs_frame`.
COLUMNS: dict[str, dict[str, str]] = {
    "config": kinds(
        text="model precision strategy lr_schedule master_dtype optimizer_state optimizer_binding "
        "corpus",
        number="learning_rate max_grad_norm",
        count="num_gpus sequence_length micro_batch_size gradient_accumulation_steps num_steps "
        "num_warmup_steps lr_warmup_steps seed repeat runs_per_gpu validation_sequences",
        flag="compile activation_checkpointing fp8_all_gather",
    ),
    "machine": kinds(
        text="device gpu_name cpu_name driver host_hash",
        number="gpu_memory_gib",
        count="num_gpus_on_machine",
    ),
    "data": kinds(
        text="corpus_sha256",
        number="epochs unigram_loss",
        count="vocab_size num_train_tokens num_tokens_seen",
    ),
    "model": kinds(
        text="parameter_dtype config_sha256",
        number="flops_per_token parameters_outside_optimizer_pct",
        count="num_parameters num_linear num_linear_fp8",
    ),
    "results": kinds(
        count="steps_completed num_timed_steps",
        number="startup_seconds first_step_seconds compile_seconds step_time_ms_median "
        "step_time_ms_p10 step_time_ms_p90 tokens_per_second_per_gpu tflops_per_gpu "
        "bf16_peak_tflops mfu_bf16_peak_pct mixed_peak_tflops mfu_mixed_peak_pct "
        "mfu_achievable_pct memory_peak_gib num_alloc_retries num_device_allocs "
        "energy_joule_per_token warm_up_seconds compile_cache_hits compile_cache_misses "
        "loss_start loss_last20_mean validation_loss",
    ),
    "judgement": kinds(number="margin_pct", flag="speed_only"),
}
METRICS = kinds(count="step", number="loss step_time_ms")
_GRAMS = {"*": [[NUMBER]]}
_BY_PARAMETER = ("error_square", "error_dot_reference")
#: What each section holds where it holds it: a kind, a list of one item's shape, or a mapping of
#: names (``*``: of all names) to shapes. Null is missing, and neither may be where ``!`` follows.
SHAPE: dict[str, Any] = COLUMNS | {
    "config": COLUMNS["config"]
    | kinds(text="tokenizer path compile_mode attention", count="log_every")
    | {"skip": ["text!"], "untrained": ["text!"]},
    "machine": COLUMNS["machine"]
    | kinds(text="network_link boot_hash")
    | {"gpus": [{"index": "count!", "uuid": "text!"}],
       "nodes": [{"host_hash": "text!", "ranks": ["count!"]}]},
    "versions": {"*": TEXT},
    "git": kinds(text="commit", flag="dirty"),
    "data": COLUMNS["data"] | kinds(text="corpus tokenizer tokenizer_sha256"),
    "model": COLUMNS["model"]
    | kinds(text="init_precision init_sha256", count="vocab_size init_step"),
    "results": COLUMNS["results"]
    | {"validation_losses": [{"step": "count!", "loss": NUMBER}],
       "resumed": [{"from_step": "count!", "num_gpus": "count!", "at": TEXT}]},
    "judgement": COLUMNS["judgement"] | kinds(text="expectation question"),
    "audit": {
        **dict.fromkeys(
            ("num_linear", "num_linear_fp8", "num_unexplained", "num_trainable", "num_frozen",
             "num_in_optimizer_twice", "num_outside_optimizer"), "count!",
        ),
        **{name: ["text!"] for name in (
            "unexplained", "outside_optimizer", "frozen", "master_dtypes", "gradient_dtypes",
            "optimizer_state_dtypes", "matmul_dtypes", "stale_casts",
        )},
        "skipped": {"*": "count!"},
        "communication_dtypes": {"*": ["text!"]},
        **kinds(number="stalled_pct fp8_gemm_flops_pct fp8_gemm_flops_pct_expected",
                count="num_stale_casts"),
    },
    "instruments": {
        "startup": {f"{part}_seconds": NUMBER for part in PARTS},
        "warm_up": {"seconds": NUMBER, "step_time_ms": ["number!"]},
        "memory": kinds(
            number="parameters_gib optimizer_gib gradients_gib steady_allocated_gib "
            "steady_reserved_gib num_alloc_retries num_device_allocs"
        ),
        "energy": {"joule_per_token": NUMBER, "throttled_pct": {"*": NUMBER}},
        "loss_scaling": kinds(count="num_skipped", number="scale"),
        "checkpoints": kinds(count="num", number="stopped_seconds written_seconds gib"),
        "ceilings": kinds(number="bf16_tflops run_tflops num_tokens launch_us"),
        "overhead": {"plain_ms": ["number!"], "measured_ms": ["number!"]},
        "step": {
            "gemm": [{"dtypes": "text!", "tflop": "number!", "num": "count!", "time_ms": NUMBER,
                      "kernels": ["text!"]}],
            "communication": [{"collective": "text!", "dtype": "text!", "gib": "number!",
                               "num": "count!", "reach": TEXT}],
            "by_kind_ms": {"*": NUMBER},
            **kinds(number="step_ms exposed_communication_ms idle_ms"),
        },
    },
    "noise": {
        "tokens_per_sample": COUNT,
        "emulated": FLAG,
        "points": [{
            "step": "count!",
            "losses": {"*": [NUMBER]},
            "gradient_grams": _GRAMS,
            "comparisons": [{
                "precision": "text!", "reference": "text!", "error_grams": _GRAMS,
                **{name: [NUMBER] for name in _BY_PARAMETER},
            }],
            "parameters": {
                "names": ["text!"], "is_fp8": ["flag!"],
                "square": {"*": [NUMBER]},
            },
            "products": {"layers": ["text!"], "statistics": ["text!"]},
        }],
    },
    "warnings": ["text!"],
}  # fmt: skip


#: A GPU's tokens of a step are the product of these.
_TOKENS_A_STEP = ("sequence_length", "micro_batch_size", "gradient_accumulation_steps")
#: Without these a completed run can be compared with nothing, and not even be named.
_NEEDED = {"model": "text!", "precision": "text!", "num_gpus": "count!"}


def check_content(record: Mapping[str, Any]) -> None:
    """Refuse fields of a record that no table could be made of.

    Raises:
        UserError: It names the value's place.
        ValueError: A time that is none.
    """
    for name, shape in SHAPE.items():
        if record[name] or name in ("config", "warnings"):
            check_shape(record[name], shape, name)
    for name in ("started_at", "ended_at"):
        moment = datetime.datetime.fromisoformat(record[name])
        if moment.tzinfo is None:
            raise UserError(f"{name}: {record[name]!r} has no time zone")
    for name in ("tokens_per_second_per_gpu", "step_time_ms_median", "memory_peak_gib"):
        value = record["results"].get(name)
        if value is not None and not value > 0:
            raise UserError(f"results.{name}: {value!r} is not above 0")
    _check_pace(record["config"], record["results"])
    check_shape(record["status_detail"], TEXT, "status_detail")
    precision = record["config"].get("precision")
    if precision is not None and precision not in RECIPES:
        raise UserError(f"config.precision: {precision!r} is none of {', '.join(RECIPES)}")
    if record["status"] == "completed":
        check_shape(record["config"], _NEEDED, "config")
        if all(record["results"].get(name) is None for name in COLUMNS["results"]):
            raise UserError("results: none, but the run has completed")
    overhead = record["instruments"].get("overhead") or {}
    if len(overhead.get("plain_ms", ())) != len(overhead.get("measured_ms", ())):
        raise UserError("instruments.overhead: plain_ms and measured_ms differ in length")
    for point in record["noise"].get("points", []):
        _check_lengths(point)


def _check_pace(config: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Refuse a rate that the same steps' median time cannot give.

    A rate is over the mean of the steps' times, and half of them are at least the median: it is at
    most twice the median's. A single stall may make it any amount less.
    """
    rate, step_ms = results.get("tokens_per_second_per_gpu"), results.get("step_time_ms_median")
    sizes = [size for name in _TOKENS_A_STEP if (size := config.get(name)) is not None]
    if rate is None or step_ms is None or len(sizes) < len(_TOKENS_A_STEP):
        return
    by_median = 1000 * math.prod(sizes) / step_ms
    if rate > 2 * by_median:
        raise UserError(
            f"results.tokens_per_second_per_gpu: {rate!r} is more than twice what "
            f"step_time_ms_median: {step_ms!r} gives, {by_median:.1f}"
        )


def _check_lengths(point: Mapping[str, Any]) -> None:
    parameters, products = point["parameters"], point["products"]
    lists = [parameters["is_fp8"], *parameters["square"].values()]
    lists += [c[name] for c in point["comparisons"] for name in _BY_PARAMETER if name in c]
    if any(len(values) != len(parameters["names"]) for values in lists):
        raise UserError("noise.points: not one value for each parameter")
    by_product = [values for each in products["values"].values() for values in each.values()]
    size = len(products["layers"]) * len(products["statistics"])
    if any(not isinstance(v, list) or len(list(_flat(v))) != size for v in by_product):
        raise UserError("noise.points: not one value for each layer and statistic")


def complete_texts(datas: Iterable[dict[str, Any]]) -> None:
    """Give ``data`` of older records the ``unigram_loss`` that another of the same tokens knows."""
    known: dict[tuple[Any, ...], float] = {}
    lacking = []
    for data in datas:
        text = data.get("corpus_sha256"), data.get("tokenizer_sha256")
        if (loss := data.get("unigram_loss")) is not None:
            known[text] = loss
        elif None not in text:
            lacking.append((text, data))
    for text, data in lacking:
        data["unigram_loss"] = known.get(text)


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        yield from _flat(value) if isinstance(value, list) else [value]


def check_shape(value: Any, shape: Any, place: str) -> None:
    """Hold a value against a shape, as `SHAPE` has them.

    Raises:
        UserError: It names the place where they differ.
    """
    if isinstance(shape, str):
        kind, needed = shape.removesuffix("!"), shape.endswith("!")
        if not (_is_kind(value, kind) or (value is None and not needed)):
            raise UserError(f"{place}: {value!r} is no {kind}")
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise UserError(f"{place}: {value!r} is no list")
        for number, item in enumerate(value):
            check_shape(item, shape[0], f"{place}[{number}]")
    elif not isinstance(value, dict):
        raise UserError(f"{place}: {value!r} is no mapping")
    else:
        items = dict.fromkeys(value, shape["*"]) if "*" in shape else shape
        for name, item in items.items():
            if name in value or (isinstance(item, str) and item.endswith("!")):
                check_shape(value.get(name), item, f"{place}.{name}")


def _is_kind(value: Any, kind: str) -> bool:
    if kind in (TEXT, FLAG):
        return isinstance(value, str if kind == TEXT else bool)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and (kind == NUMBER or value == int(value))


def whence(record: Any) -> tuple[tuple[str, ...], ...]:
    """Return by what a copy of a run's record is known, wherever it lies; empty: by nothing.

    The first records do not name their host; they are known by what a clock measured.
    """
    host, clocked = record.machine.get("host_hash"), record.results.get("first_step_seconds") or 0
    found = json.dumps([host, record.machine.get("gpus"), record.results], sort_keys=True)
    return ((record.run_id, record.started_at, found),) if host or clocked % 1 else ()


def check_columns(rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuse metrics that are no numbers where `METRICS` has them.

    Raises:
        UserError: It names the column.
    """
    for name, kind in METRICS.items():
        # Whole columns by their types: 90,000 single values would take seconds.
        allowed = {int, type(None)} if kind == COUNT else {int, float, type(None)}
        if not {type(row.get(name)) for row in rows} <= allowed:
            raise UserError(f"{name}: a value is no {kind}")


def logged_steps(steps: int, every: int, is_over: bool) -> list[int]:
    """Return which of a run's first steps are logged; once it `is_over`, the last one is."""
    logged = [*range(every, steps + 1, every)]
    return [*logged, steps] if is_over and steps % every else logged


def check_whole(record: Any, lines: Sequence[Mapping[str, Any]], run_dir: Path) -> None:
    """Refuse metrics that are not the steps or the losses of their run, as another's would be."""
    steps, every = record.results.get("steps_completed"), record.config.get("log_every") or 1
    if record.status not in ("completed", "diverged") or steps is None:
        return
    logged = logged_steps(steps, every, is_over=record.status == "completed")
    found = [line.get("step") for line in lines]
    if found != logged:
        raise UserError(
            f"{run_dir}/metrics.jsonl: {len({*logged} & {*found})} of {len(logged)} logged steps "
            f"in {len(lines)} lines, not each once and in order; move the run away, and do it again"
        )
    told: Any = record.results.get("loss_last20_mean")
    last: list[Any] = [line.get("loss") for line in lines[-20:]]
    if every != 1 or record.status != "completed" or told is None or None in last:
        return
    if not math.isclose(told, mean := statistics.fmean(last), rel_tol=1e-6):
        raise UserError(
            f"{run_dir}/run.json: loss_last20_mean: {told:.6f} is {mean:.6f} by its metrics, so "
            "one of the files is another run's; move the run away, and do it again"
        )


def as_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the columns of `METRICS`, one value per row."""
    return {name: [row.get(name) for row in rows] for name in METRICS}
