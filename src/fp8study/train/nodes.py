"""On which node each process of a run was, and what joins the nodes."""

from __future__ import annotations

import itertools
from typing import Any

import torch.distributed

from fp8study.core.config import ResolvedConfig
from fp8study.run.machine import host_hash, network_link


def rank_layout(config: ResolvedConfig) -> dict[str, Any]:
    """Return what a record says of its nodes, nothing of a single one; every rank must call it.

    ``nodes``: for each its hashed name and its ranks, in the order of the ranks.
    ``network_link``: what joins them, where all say the same, else all that they say.
    """
    if config.num_nodes == 1:
        return {}
    told: list[Any] = [None] * config.num_gpus
    torch.distributed.all_gather_object(told, (host_hash(), network_link()))
    by_node = itertools.groupby(range(len(told)), key=lambda rank: told[rank][0])
    return {
        "nodes": [{"host_hash": name, "ranks": list(ranks)} for name, ranks in by_node],
        "network_link": " / ".join(sorted({link for _, link in told})),
    }
