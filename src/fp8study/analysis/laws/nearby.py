"""Other runs near one that is asked for: in FP8, with what would make it fit, or another task."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from fp8study.analysis.laws import memory, speed
from fp8study.analysis.laws.account import MEMORY_PCT
from fp8study.analysis.laws.communication import num_nodes_for
from fp8study.analysis.laws.room import fits, has_room, largest_batch_of, largest_step, with_batch
from fp8study.analysis.laws.shape import ModelShape
from fp8study.analysis.runs.naming import BEFORE
from fp8study.core.config import ResolvedConfig, RunConfig, set_by_hand
from fp8study.core.errors import UserError
from fp8study.core.field_types import shown
from fp8study.core.hardware import GPUS_PER_NODE, GpuPeak
from fp8study.core.path.choices import MOST_GPUS_OF_HEAD, is_sharded
from fp8study.core.recipes import RECIPES

#: A run → what a step of it takes.
Law = Callable[[ResolvedConfig], speed.StepParts]
#: A lead must move by as many points for a change to be worth a line.
_NOTABLE_POINTS = 3.0


def as_fp8(config: RunConfig, precision: str, gathers: bool | None = None) -> ResolvedConfig:
    """Return a run's FP8 partner, with all that follows from another precision decided anew."""
    changes = {"precision": precision, "fp8_all_gather": gathers, "skip": _said_of_skip(config)}
    is_other = precision != config.precision or gathers not in (None, config.fp8_all_gather)
    changes |= dict.fromkeys(_FOLLOWING["precision"] if is_other else ())
    return RunConfig(**{**config.to_dict(), **changes, "gather_cast": None}).resolved()


def has_head_on_fewer(config: ResolvedConfig) -> bool:
    """Whether FP8 has the loss head only on fewer GPUs than these, where it was timed."""
    if config.num_gpus <= MOST_GPUS_OF_HEAD:
        return False
    fewer = changed(config, {"num_gpus": MOST_GPUS_OF_HEAD})
    own, theirs = (as_fp8(way, "fp8_tensorwise").left_out for way in (config, fewer))
    return own != theirs


def tensorwise(config: ResolvedConfig, shape: ModelShape) -> list[ResolvedConfig]:
    """Return FP8 tensorwise in its two ways to gather weights, as far as this run has them."""
    even = all(high % config.num_shards == 0 for _, high in shape.convertible.values())
    # torchao gathers FP8 weights from even shards only.
    ways = [True] * (is_sharded(config) and even) + [False]
    return [as_fp8(config, "fp8_tensorwise", gathers) for gathers in ways]


def ways(config: ResolvedConfig, shape: ModelShape) -> list[ResolvedConfig]:
    """Return BF16, FP8 tensorwise however its weights can be gathered, and each other recipe."""
    others = [
        as_fp8(config, name)
        for name, recipe in RECIPES.items()
        if recipe.fp8_gemms and name != "fp8_tensorwise"
        and not (recipe.needs_fsdp2 and config.strategy != "fsdp2")
    ]  # fmt: skip
    return [config, *tensorwise(config, shape), *others]


#: What saves memory on the same GPUs, in the order of what it costs.
SAVERS: dict[str, Any] = {
    "gradient_reduction": "each_pass", "reshard_after_forward": True,
    "activation_checkpointing": True, "optimizer_state": "fp8", "master_dtype": "bf16",
}  # fmt: skip
#: Of these, what costs next to nothing by the law.
REDUCED = {"gradient_reduction": SAVERS["gradient_reduction"]}
#: These train in other formats: of the first little is known, the other rounds updates away.
_OTHER_FORMATS = ("optimizer_state", "master_dtype")
_SAME_TASK = {name: value for name, value in SAVERS.items() if name not in _OTHER_FORMATS}
#: Fields that are changed, the run then, and a figure of it.
Changed = tuple[dict[str, Any], ResolvedConfig, float]


_AFTER_KERNEL = ("weight_cast", "gradient_dtype", "transposes", "swiglu", "cast_kernels")
#: Switches of what GPUs do to gradients together, and of how a step with them is launched.
_REDUCED = ("gradient_reduction", "gradient_pool")
_EXCHANGE = (*_REDUCED, "collectives", "gradient_copy", "gradient_norm", "step_launch")
#: Switches of the update, which follow from each other.
UPDATE = ("update_kernel", *_AFTER_KERNEL)
#: The tuned path's forms before today's, the latest first: what a run sets to have one.
EARLIER: tuple[dict[str, Any], ...] = (
    {"gradient_norm": "separate"}, {"collectives": "nccl"}, BEFORE,
)  # fmt: skip
#: Switches by which a form of the path is known, today's for small steps among them.
FORM = ("step_launch", *(name for form in EARLIER for name in form))
#: Field → switches that are decided anew where it is changed.
_FOLLOWING = {
    "precision": (*_AFTER_KERNEL, "gradient_copy"),
    "fp8_all_gather": (*_AFTER_KERNEL, "gradient_copy", "gather_cast"),
    "update_kernel": (*_AFTER_KERNEL, *_EXCHANGE),
    "max_grad_norm": (
        "optimizer_step", "clipping", "gradient_pool", "gradient_norm", *_AFTER_KERNEL
    ),
    "master_dtype": (*_EXCHANGE, *UPDATE),
    "optimizer_state": (*_EXCHANGE, *UPDATE, "optimizer_step", "clipping"),
    "activation_checkpointing": (*UPDATE, *_EXCHANGE),
    "step_launch": ("gradient_pool", "gradient_dtype"),
    "gradient_reduction": ("gradient_pool", *_EXCHANGE[2:], *_AFTER_KERNEL),
    "gradient_accumulation_steps": (*_EXCHANGE, *UPDATE),
    "collectives": (*_REDUCED, "gradient_copy", "gradient_norm", "transposes", "cast_kernels"),
    "num_gpus": ("reshard_after_forward", *_EXCHANGE, *UPDATE),
}  # fmt: skip


def _said_of_skip(config: RunConfig) -> tuple[str, ...] | None:
    """Return what a run leaves out of FP8 by hand; None: what its path does, which follows."""
    said: tuple[str, ...] | None = set_by_hand(vars(config), "skip")
    return said


def changed(
    config: ResolvedConfig, changes: Mapping[str, Any], gpus_per_node: int = GPUS_PER_NODE
) -> ResolvedConfig:
    """Return the run after these changes, with what follows from them decided anew."""
    fields = dataclasses.asdict(config)
    for name in changes:
        fields |= dict.fromkeys(_FOLLOWING.get(name, ()))
    if "num_gpus" in changes:
        fields["num_nodes"] = num_nodes_for(changes["num_gpus"], gpus_per_node)
        fields["strategy"] = "fsdp2"
    return RunConfig(**fields | {"skip": _said_of_skip(config)} | dict(changes)).resolved()


def as_run_on(config: ResolvedConfig, gpu: GpuPeak | None) -> ResolvedConfig:
    """Return what a run is taken to be on a GPU: NCCL's, where no NVLink joins GPUs of its box."""
    copies = gpu and not gpu.has_nvlink and config.collectives == "copy_engines"
    return changed(config, {"collectives": "nccl"}) if copies else config


def as_reduced(config: ResolvedConfig, changes: dict[str, Any]) -> dict[str, Any]:
    """Add to changes how gradients are reduced, where that would be decided anew by them."""
    reduced = REDUCED if config.gradient_reduction in REDUCED.values() else {}
    return of_use(reduced | changes, config)


def _cure(
    config: ResolvedConfig, shape: ModelShape, changes: dict[str, Any],
    gpus_per_node: int = GPUS_PER_NODE,
) -> Changed:  # fmt: skip
    """Return the run after these changes, and its GiB."""
    changes = changes if "num_gpus" in changes else as_reduced(config, changes)
    tried = changed(config, changes, gpus_per_node)
    return changes, tried, memory.predicted_memory(tried, shape).held


def _savings(
    config: ResolvedConfig, shape: ModelShape, capacity: float, among: dict[str, Any]
) -> list[Changed]:
    """Return the smallest combinations of some `SAVERS` that make a run fit."""
    names = [name for name, value in among.items() if getattr(config, name) != value
             and (config.strategy == "fsdp2" or "reshard" not in name)]  # fmt: skip
    for number in range(1, len(names) + 1):
        tries = (
            _cure(config, shape, of_use({name: among[name] for name in chosen}, config))
            for chosen in itertools.combinations(names, number)
        )
        if found := [cure for cure in tries if has_room(cure[2], capacity)]:
            return found
    return []


def of_use(changes: Mapping[str, Any], config: ResolvedConfig) -> dict[str, Any]:
    """Leave out how gradients are reduced, with one pass or GPU, or where BF16 would add up."""
    passes, num_gpus, dtype = (
        changes.get(name, getattr(config, name))
        for name in ("gradient_accumulation_steps", "num_gpus", "master_dtype")
    )
    adds_up = passes > 1 and num_gpus > 1 and dtype == "fp32"
    return {n: value for n, value in changes.items() if adds_up or n != "gradient_reduction"}


def savers(config: ResolvedConfig, shape: ModelShape, capacity: float) -> dict[str, Any]:
    """Return the fewest changes that make a run fit its GPUs and keep its task; empty: none do."""
    found = _savings(config, shape, capacity, _SAME_TASK)
    return found[0][0] if found else {}


def cures(
    config: ResolvedConfig, shape: ModelShape, capacity: float, keeps_step: bool = False,
    gpus_per_node: int = GPUS_PER_NODE,
) -> list[Changed]:  # fmt: skip
    """Return what would make a run fit, with what it would need, GiB.

    The largest smaller batch that does, what saves memory, optimizer states in FP8, more GPUs, BF16
    master weights, which round updates away, or all that. `keeps_step`: a step keeps its sequences.
    """

    def kept(changes: dict[str, Any]) -> dict[str, Any]:
        """Add to changes the passes by which a step is as large; empty: none do."""
        if not keeps_step or not changes:
            return changes
        part = {n: changes.get(n, getattr(config, n)) for n in ("num_gpus", "micro_batch_size")}
        sequences = config.tokens_per_step // config.sequence_length
        passes, rest = divmod(sequences, math.prod(part.values()))
        return {} if rest else changes | {"gradient_accumulation_steps": passes}

    more = [{"num_gpus": 2**n} for n in range(1, 11) if 2**n > config.num_gpus]
    more = [changes for each in more if (changes := kept(each))]
    most = (config.micro_batch_size - 1) * config.sequence_length
    each = changed(config, of_use(REDUCED, config))
    batch = max(largest_batch_of([way], shape, capacity, most) for way in (config, each))
    smaller = filter(None, (kept(with_batch(config, n)) for n in range(batch, 0, -1)))
    one = (of_use(own | n, changed(config, n)) for n in smaller for own in ({}, REDUCED))
    before = [BEFORE] if config.weight_cast == "each_update" else []

    def first(tries: Iterable[dict[str, Any]]) -> list[Changed]:
        found = (_cure(config, shape, changes, gpus_per_node) for changes in tries)
        return list(itertools.islice((c for c in found if has_room(c[2], capacity)), 1))

    plain = first(own | n for n in more for own in ({}, {"reshard_after_forward": True}))
    free = _savings(config, shape, capacity, REDUCED)
    saving = [c for c in _savings(config, shape, capacity, _SAME_TASK) if c not in free]
    formats = [c for c in _savings(config, shape, capacity, SAVERS) if c not in [*free, *saving]]
    more_for_all = [] if savers(config, shape, capacity) else more
    saved = first(of_use(_SAME_TASK | changes, config) for changes in more_for_all)
    both = sorted([*plain, *saved], key=lambda cure: cure[1].num_gpus)  # plain before saved
    others = both if both[:1] == saved else plain
    rounding = [cure for cure in formats if "master_dtype" in cure[0]]
    saving += [cure for cure in formats if cure not in rounding]
    found = [*first(before), *free, *first(one), *saving, *others, *rounding]
    every = {name: value for name, value in SAVERS.items() if name != "optimizer_state"}
    return found or first(of_use(every | changes, config) for changes in more)


def written(
    fields: Mapping[str, Any], words: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """Write fields as name=value, or in the `words` for one, in which {} is its value."""
    return [words.get(name, f"{name}={{}}").format(shown(value)) for name, value in fields.items()]


def fits_before_alone(fp8: ResolvedConfig, shape: ModelShape, capacity: float) -> bool:
    """Return whether an FP8 run fits with the update `BEFORE` alone, which keeps no FP8 weights."""
    return not fits(fp8, shape, capacity) and fits(changed(fp8, BEFORE), shape, capacity)


def larger_alone(
    config: ResolvedConfig, shape: ModelShape, law: Law, capacity: float, most_tokens: int
) -> Changed | None:
    """Return FP8 tensorwise as BF16 has no room to be, where it is notably faster so.

    At the largest batch up to `most_tokens` a pass, or without recomputation; with how much faster
    it is than the BF16 run as it is asked about, %. None where BF16 has room for as much, or may
    have it, as the law of memory can be off by `MEMORY_PCT`, or little is gained.
    """
    surely = capacity * (1 + MEMORY_PCT / 100)

    def rate(way: ResolvedConfig) -> float:
        return way.tokens_per_step / law(way).total

    ways, now, batch = tensorwise(config, shape), rate(config), config.micro_batch_size
    tries: list[tuple[ResolvedConfig, dict[str, Any], int, int]] = []
    # What a larger batch gives, or less recomputed, is FP8's alone where BF16 has no room for it.
    if largest_step(config, shape, capacity, most_tokens) <= batch:
        least = max(batch, largest_step(config, shape, surely, most_tokens)) + 1
        tries += [(way, {}, least, most_tokens) for way in ways]
    plain = changed(config, kept := {"activation_checkpointing": False})
    fits_plain = fits(dataclasses.replace(plain, micro_batch_size=1), shape, surely)
    if config.activation_checkpointing and not fits_plain:
        most = batch * config.sequence_length
        tries += [(way, kept, 1, most) for way in tensorwise(plain, shape)]
    tries += [
        (changed(way, BEFORE), given | BEFORE, least, most)
        for way, given, least, most in tries if way.weight_cast == "each_update"
    ]  # fmt: skip
    found = []
    for way, given, least, most in tries:
        largest = largest_step(way, shape, capacity, most)
        if largest >= least:
            resized = with_batch(way, largest)
            other = changed(way, as_reduced(way, resized))
            told = {field: n for field, n in resized.items() if n != getattr(config, field)}
            found.append((told | given, other, 100 * (rate(other) / now - 1)))
    best = max(found, key=lambda each: each[2], default=None)
    notable = 100 * (max(map(rate, ways)) / now - 1) + _NOTABLE_POINTS
    return best if best and best[2] >= notable else None


def fastest(bf16: ResolvedConfig, shape: ModelShape, law: Law) -> ResolvedConfig:
    """Return FP8 tensorwise, with weights gathered in the faster way."""
    return min(tensorwise(bf16, shape), key=lambda fp8: law(fp8).total)


def lead_by_law(bf16: ResolvedConfig, shape: ModelShape, law: Law) -> float:
    """Return the lead of the `fastest`, %."""
    return speed.lead_pct(law(bf16).total, law(fastest(bf16, shape, law)).total)


def _keeping_tokens(config: ResolvedConfig, name: str, factor: float) -> dict[str, int]:
    """Return what keeps a step's tokens at another batch or length; empty: nothing does.

    At another length another batch; at another batch, or where none is whole, other passes.
    """
    others = [n for n in ("micro_batch_size", "gradient_accumulation_steps") if n != name]
    if name == "micro_batch_size" and config.gradient_accumulation_steps == 1:
        return {}  # what another batch gives is asked
    kept = {n: getattr(config, n) / factor for n in others}
    return next(({n: round(v)} for n, v in kept.items() if v >= 1 and v % 1 == 0), {})


def changes(
    config: ResolvedConfig, shape: ModelShape, law: Law, capacity: float,
    decided: Callable[[ResolvedConfig], ResolvedConfig], others: Mapping[float, Law],
) -> list[Changed]:  # fmt: skip
    """Return changes of the task that move FP8's lead notably, with its lead then, %.

    A step keeps its tokens where it can, and always if it has several passes.

    `decided`: decides anew what the path makes of such a run; `others`: Gb/s of other networks →
    the law with them.
    """
    here = lead_by_law(config, shape, law)
    found: list[Changed] = [
        ({"network": f"{rate:g}"}, config, there) for rate, other in others.items()
        if abs((there := lead_by_law(config, shape, other)) - here) >= _NOTABLE_POINTS
    ]  # fmt: skip
    for name, factor in (("micro_batch_size", 4), ("micro_batch_size", 0.25),
                         ("sequence_length", 4), ("sequence_length", 0.25)):  # fmt: skip
        value = round(getattr(config, name) * factor)
        if value < 1 or (name == "sequence_length" and value < 512):
            continue
        kept = _keeping_tokens(config, name, factor)
        if not kept and config.gradient_accumulation_steps > 1:
            continue
        other = {name: value} | kept
        try:
            way = (
                changed(config, as_reduced(config, other))
                if "gradient_accumulation_steps" in other
                else dataclasses.replace(config, **other)
            )
            way = decided(way)
        except UserError:  # beyond the field's range
            continue
        there = lead_by_law(way, shape, law)
        if (fits(way, shape, capacity) or factor < 1) and abs(there - here) >= _NOTABLE_POINTS:
            found.append((other, way, there))
    return found
