"""The communication part of the speed law: bytes over links, and what hides behind computing.

FSDP2 gathers a layer's weights before each pass through it and scatters its reduced gradients
after, of a step's last backward pass or of each; under hybrid sharding replicas on other nodes then
add theirs; DDP adds whole gradients. NCCL does each in rings through all GPUs of the group. A ring
is as fast as its slowest link, and begins anew with each call: one hop after another, which counts
where there are many GPUs.

Within a node the link's rate is read from records, and hops are part of what was fitted. Between
nodes nothing was measured: `Network` is assumed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fp8study.analysis.laws.shape import ModelShape
from fp8study.core.config import ResolvedConfig
from fp8study.core.errors import UserError
from fp8study.core.hardware import GPUS_PER_NODE, GpuPeak

#: GPUs that a node may have; powers of two, which more GPUs by twos fill.
_OF_A_NODE = (1, 2, 4, 8, 16)
#: Gb/s of a GPU from other nodes, as networks have them.
_GBIT_PER_S = (1, 1600)
#: GB/s that are used of each Gb/s of a network: four fifths, of eight bits to a byte.
_USED = 0.1


@dataclass(frozen=True)
class Network:
    """What joins GPUs of several nodes: assumed, where nobody says.

    Hops are what NCCL itself takes them to be, in rings of its protocol Simple (``hwLat`` in
    https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc).
    """

    gb_per_s: float = 40.0
    """For each GPU: 400 Gb/s, so much used as `_USED` says."""
    hop_us: float = 14.0
    """From one node to the next."""
    inner_hop_us: float = 3.4
    """From one GPU of a node to the next, where the ring has several nodes."""
    gpus_per_node: int = GPUS_PER_NODE
    """Of a run on several nodes, and of one that would need more GPUs."""
    nvlink_gpus: int = 0
    """As `GpuPeak.nvlink_gpus`."""
    is_assumed: bool = True
    """Nobody said its rate."""
    link_gb_per_s: float | None = None
    """Of the links in a box, if somebody said that; None: as the law of speed has it."""

    @property
    def gbit_per_s(self) -> float:
        """Its rate for each GPU, Gb/s."""
        return self.gb_per_s / _USED

    def at(self, gbit_per_s: float) -> Network:
        """Return it at another rate for each GPU, Gb/s."""
        return replace(self, gb_per_s=_USED * gbit_per_s, is_assumed=False)

    def of(self, gpu: GpuPeak, gpus_per_node: int | None = None) -> Network:
        """Return it between nodes of so many of these GPUs; None: as they are sold.

        Raises:
            UserError: No node has so many.
        """
        if gpus_per_node not in (None, *_OF_A_NODE):
            raise UserError(
                f"--gpus-per-node: {gpus_per_node} is none of {', '.join(map(str, _OF_A_NODE))}; "
                "give one of them"
            )
        number = gpus_per_node or gpu.gpus_per_node
        return replace(self, gpus_per_node=number, nvlink_gpus=gpu.nvlink_gpus)

    def num_parts(self, config: ResolvedConfig) -> int:
        """Return in how many groups that NVLink or one node joins a run's GPUs are."""
        return math.ceil(config.num_gpus / self._joined(config))

    def rate_of_ring(self, config: ResolvedConfig) -> float:
        """Return what a ring through all nodes brings each GPU, GB/s: each link brings a part."""
        return self._joined(config) * self.gb_per_s

    def _joined(self, config: ResolvedConfig) -> int:
        return max(config.gpus_per_node, self.nvlink_gpus)


NETWORK = Network()
#: Of PCIe's rate, what NCCL brings a GPU through the host's memory: 24.25 of 64 GB/s between two
#: H200 (study ``without-nvlink``), to whose records a test holds it.
THROUGH_HOST = 24.25 / 64


def network_at(gbit_per_s: float | None) -> Network:
    """Return what joins nodes at a rate that a user gives; None: as `NETWORK`.

    Raises:
        UserError: No network has that rate.
    """
    least, most = _GBIT_PER_S
    if gbit_per_s is not None and not least <= gbit_per_s <= most:  # nor what is no number
        raise UserError(
            f"--network: {gbit_per_s:g} is outside {least} to {most}; give the Gb/s that each GPU "
            f"has from other nodes, as {NETWORK.gbit_per_s:g}"
        )
    return NETWORK.at(gbit_per_s) if gbit_per_s else NETWORK


@dataclass(frozen=True)
class Traffic:
    """What a GPU receives in one forward and backward pass, bytes."""

    forward: float
    """Over its shards' group: weights."""
    backward: float
    """The same: weights again, and gradients."""
    replicas: float
    """Gradients from other nodes' replicas, under hybrid sharding."""
    between: float
    """Of all this, what its own link to the network brings."""

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.replicas


def num_nodes_for(num_gpus: int, gpus_per_node: int = GPUS_PER_NODE) -> int:
    """Return over how many nodes of at most so many GPUs they are spread evenly.

    Raises:
        UserError: They would leave a node half empty.
    """
    if num_gpus <= gpus_per_node:
        return 1
    if num_gpus % gpus_per_node:
        whole = num_gpus - num_gpus % gpus_per_node
        raise UserError(
            f"--num-gpus: {num_gpus} does not fill nodes of {gpus_per_node}; "
            f"try {whole} or {whole + gpus_per_node}, or another --gpus-per-node"
        )
    return num_gpus // gpus_per_node


def gathers_again(config: ResolvedConfig) -> float:
    """Return the share of decoder layers that FSDP2 gathers twice a step, 0 to 1."""
    return {True: 1.0, "half": 0.5, False: 0.0}[config.reshard_after_forward or False]


def passes(config: ResolvedConfig) -> list[tuple[bool, int]]:
    """Return how many of a step's passes reduce gradients, and how many do not."""
    number = config.gradient_accumulation_steps
    reducing = number if config.gradient_reduction == "each_pass" else 1
    return [(True, reducing), (False, number - reducing)]


def received(config: ResolvedConfig, shape: ModelShape) -> tuple[float, float]:
    """Return what a GPU receives in a step, and what the network brings of it, bytes."""
    each = [(number, traffic(config, shape, reduces)) for reduces, number in passes(config)]
    return sum(n * moved.total for n, moved in each), sum(n * moved.between for n, moved in each)


def traffic(config: ResolvedConfig, shape: ModelShape, reduces: bool = True) -> Traffic:
    """Return what a GPU receives in a pass: whole tensors, less its own share.

    `reduces`: whether gradients are reduced after it.
    """
    away, of_nodes = 1 - 1 / config.num_shards, 1 - 1 / config.num_nodes
    if config.strategy != "fsdp2":  # an all-reduce moves FP32 gradients twice
        reduced = (1 - 1 / config.num_gpus) * 8 * shape.num_parameters * reduces
        return Traffic(0.0, reduced, 0.0, _entering(config, reduced))
    saved = shape.convertible_parameters if config.fp8_all_gather else 0
    layers = shape.num_layers * (2 * shape.layer_parameters - saved)
    root = 2 * shape.root_parameters
    forward = away * (layers + root)
    wide = (2 if config.collectives == "copy_engines" else 4) * reduces  # a gradient, bytes
    backward = away * (gathers_again(config) * layers + root + wide * shape.num_parameters)
    if config.sharding == "full":
        return Traffic(forward, backward, 0.0, _entering(config, forward + backward))
    replicas = of_nodes * 8 * shape.num_parameters / config.num_shards * reduces
    return Traffic(forward, backward, replicas, replicas)


def _entering(config: ResolvedConfig, moved: float) -> float:
    """Of what each GPU of a node receives in rings through all nodes, each link brings a part."""
    return moved / config.gpus_per_node if config.num_nodes > 1 else 0.0


def communication_ms(
    config: ResolvedConfig, shape: ModelShape, link_gb_per_s: float, network: Network = NETWORK,
    reduces: bool = True,
) -> tuple[float, float]:  # fmt: skip
    """Return how long a forward and a backward pass communicate, if nothing waits for the other."""
    moved, calls = traffic(config, shape, reduces), shape.num_layers + 1
    spanned = 1 if config.sharding == "hybrid" else network.num_parts(config)
    ring = config.num_gpus if config.strategy == "ddp" else config.num_shards
    rate, start_ms = link_gb_per_s, 0.0
    if spanned > 1:
        ring_rate = network.rate_of_ring(config)
        rate = min(rate, ring_rate) if config.gpus_per_node > 1 else ring_rate
        start_ms = _start_ms(ring, spanned, network)
    gathered = calls if config.strategy == "fsdp2" else 0
    # Gradients: scattered in one round of the ring, or added up in two.
    later = calls * gathers_again(config) + calls * reduces if gathered else 2 * calls * reduces
    forward = moved.forward / rate * 1e-6 + gathered * start_ms
    backward = moved.backward / rate * 1e-6 + later * start_ms
    among = moved.replicas / network.gb_per_s * 1e-6
    among += 2 * calls * _start_ms(config.num_nodes, config.num_nodes, network) * (among > 0)
    return forward, max(backward, among)  # on links of their own


def _start_ms(ring: int, nodes: int, network: Network) -> float:
    return 1e-3 * ((ring - nodes) * network.inner_hop_us + (nodes - 1) * network.hop_us)


def exposed_ms(
    config: ResolvedConfig,
    shape: ModelShape,
    busy_ms: float,
    link_gb_per_s: float,
    network: Network = NETWORK,
) -> float:
    """Return how long a GPU that is busy for so long in a pass waits in a step, ms.

    A third of what it does is the forward pass; a quarter, where layers are recomputed.
    """
    forward = 1 / 4 if config.activation_checkpointing else 1 / 3
    shares = (forward * busy_ms, (1 - forward) * busy_ms)
    return sum(
        number * max(0.0, time - share)
        for reduces, number in passes(config)
        for time, share in zip(
            communication_ms(config, shape, link_gb_per_s, network, reduces), shares, strict=True
        )
    )
