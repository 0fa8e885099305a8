"""What GPUs fetch from each other, with a memory that plays the other GPU's."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from fp8study.model.fsdp import peers


class OtherGpu:
    """Has one gradient for every element."""

    released = 0

    def fetch(self, parts: Sequence[torch.Tensor], offset: int) -> None:
        assert offset == 0  # this rank's share comes first
        parts[1].fill_(3.0)

    def release(self) -> None:
        self.released += 1


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> OtherGpu:
    memory = OtherGpu()
    monkeypatch.setitem(peers._MEMORIES, "gradients", memory)
    monkeypatch.setattr(peers.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(peers, "compiled", lambda function, dynamic: function)
    return memory


@pytest.mark.parametrize("notes", [False, True])
def test_shares_are_added_up_in_fp32_and_squared_where_asked(
    other: OtherGpu, notes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add_two(one_N, other_N, sum_N, squares_P, divisor):  # type: ignore[no-untyped-def]
        peers.add_up([one_N, other_N], sum_N, divisor)
        squares_P.copy_(sum_N.square().sum())

    monkeypatch.setitem(
        sys.modules, "fp8study.model.kernels", SimpleNamespace(add_two=add_two)
    )  # which needs Triton
    own_N, sum_N = torch.arange(8.0).bfloat16(), torch.zeros(4)
    squares_P = torch.zeros(1) if notes else None
    torch.ops.fp8study.pull_gradients(sum_N, own_N, 2, squares_P)
    assert sum_N.tolist() == [1.5, 2.0, 2.5, 3.0] and other.released == 1
    assert squares_P is None or float(squares_P) == float(sum_N.square().sum())


def test_squares_are_taken_once_and_their_room_is_used_again() -> None:
    squares, device = peers.Squares(), torch.device("cpu")
    assert squares.take() is None
    first, second = squares.next_unit(device), squares.next_unit(device)
    first.fill_(2.0), second.fill_(3.0)
    assert float(squares.take()) == 5.0 and squares.take() is None
    assert squares.next_unit(device) is first


@pytest.mark.parametrize(
    ("num_seen", "reads", "reason"),
    [
        (2, True, ""),
        (2, False, "GPU 0 cannot read GPU 1's memory"),
        (1, True, "each process sees 1 of 2 GPUs"),
    ],
)
def test_gpus_that_cannot_read_each_other_are_known_before_they_try(
    num_seen: int, reads: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_seen)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: reads)
    assert peers.unreachable() == reason
