"""The communication part of the speed law: bytes over links, and what hides behind computing.

FSDP2 gathers a layer's weights before each pass through it and scatters its reduced gradients
after; under hybrid sharding replicas on other nodes then add theirs; DDP adds whole gradients.
NCCL does each in rings through all GPUs of the group. A ring is as fast as its slowest link, and
begins anew with each call: one hop after another, which counts where there are many GPUs.

Within a node the link's rate is read from records, and hops are part of what was fitted. Between
nodes nothing was measured: `Network` is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8study.analysis.laws.shape import ModelShape
from fp8study.core.config import ResolvedConfig
from fp8study.core.errors import UserError

#: GPUs that NVLink joins, as in an HGX or DGX box; more are joined by a network.
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Network:
    """What joins nodes: assumed.

    Hops are what NCCL itself takes them to be, in rings of its protocol Simple (``hwLat`` in
    https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc).
    """

    gb_per_s: float = 40.0
    """For each GPU: 400 Gb/s, four fifths used."""
    hop_us: float = 14.0
    """From one node to the next."""
    inner_hop_us: float = 3.4
    """From one GPU of a node to the next, where the ring has several nodes."""


NETWORK = Network()


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


def num_nodes_for(num_gpus: int) -> int:
    """Return over how many nodes of at most `GPUS_PER_NODE` GPUs this many are spread evenly.

    Raises:
        UserError: They would leave a node half empty.
    """
    if num_gpus <= GPUS_PER_NODE:
        return 1
    if num_gpus % GPUS_PER_NODE:
        whole = num_gpus - num_gpus % GPUS_PER_NODE
        raise UserError(
            f"--num-gpus: {num_gpus} does not fill nodes of {GPUS_PER_NODE}; "
            f"try {whole} or {whole + GPUS_PER_NODE}"
        )
    return num_gpus // GPUS_PER_NODE


def gathers_again(config: ResolvedConfig) -> float:
    """Return the share of decoder layers that FSDP2 gathers twice a step, 0 to 1."""
    return {True: 1.0, "half": 0.5, False: 0.0}[config.reshard_after_forward or False]


def traffic(config: ResolvedConfig, shape: ModelShape) -> Traffic:
    """Return what a GPU receives in a pass: whole tensors, less its own share."""
    away, of_nodes = 1 - 1 / config.num_shards, 1 - 1 / config.num_nodes
    if config.strategy != "fsdp2":  # an all-reduce moves FP32 gradients twice
        reduced = (1 - 1 / config.num_gpus) * 8 * shape.num_parameters
        return Traffic(0.0, reduced, 0.0, _entering(config, reduced))
    saved = shape.convertible_parameters if config.fp8_all_gather else 0
    layers = shape.num_layers * (2 * shape.layer_parameters - saved)
    root = 2 * shape.root_parameters
    forward = away * (layers + root)
    wide = 2 if config.collectives == "copy_engines" else 4  # a gradient, bytes
    backward = away * (gathers_again(config) * layers + root + wide * shape.num_parameters)
    if config.sharding == "full":
        return Traffic(forward, backward, 0.0, _entering(config, forward + backward))
    replicas = of_nodes * 8 * shape.num_parameters / config.num_shards
    return Traffic(forward, backward, replicas, replicas)


def _entering(config: ResolvedConfig, moved: float) -> float:
    """Of what each GPU of a node receives in rings through all nodes, each link brings a part."""
    return moved / config.gpus_per_node if config.num_nodes > 1 else 0.0


def communication_ms(
    config: ResolvedConfig, shape: ModelShape, link_gb_per_s: float, network: Network = NETWORK
) -> tuple[float, float]:
    """Return how long a forward and a backward pass communicate, if nothing waits for the other."""
    moved, calls = traffic(config, shape), shape.num_layers + 1
    spanned = 1 if config.sharding == "hybrid" else config.num_nodes
    ring = config.num_gpus if config.strategy == "ddp" else config.num_shards
    rate, start_ms = link_gb_per_s, 0.0
    if spanned > 1:
        rate = min(rate, config.gpus_per_node * network.gb_per_s)
        start_ms = _start_ms(ring, spanned, network)
    gathered = calls if config.strategy == "fsdp2" else 0
    # Gradients: scattered in one round of the ring, or added up in two.
    later = calls * gathers_again(config) + calls if gathered else 2 * calls
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
    """Return how long a GPU that is busy for so long in a pass waits for communication, ms.

    A third of what it does is the forward pass; a quarter, where layers are recomputed.
    """
    forward = 1 / 4 if config.activation_checkpointing else 1 / 3
    times = communication_ms(config, shape, link_gb_per_s, network)
    shares = (forward * busy_ms, (1 - forward) * busy_ms)
    return sum(max(0.0, time - share) for time, share in zip(times, shares, strict=True))
