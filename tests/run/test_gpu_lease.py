import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fp8study.core.errors import UserError
from fp8study.core.files import locked, open_lock, try_lock
from fp8study.run.gpu_lease import lease, lock_dir

ACROSS_PROCESSES_S = 10.0
NOT_YET_S = 0.15


@pytest.fixture(autouse=True)
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FP8STUDY_LOCKS", str(tmp_path / "locks"))
    return tmp_path / "locks"


def is_free(index: int) -> bool:
    descriptor = open_lock(lock_dir() / f"gpu-{index}.0.lock", "FP8STUDY_LOCKS")
    try:
        return try_lock(descriptor)
    finally:
        os.close(descriptor)


class Holder(threading.Thread):
    """Leases GPUs in a thread of its own and keeps them until it is released."""

    def __init__(self, num_gpus: int, indices: list[int], runs_per_gpu: int = 1) -> None:
        super().__init__(daemon=True)
        self.wanted = (num_gpus, indices, runs_per_gpu)
        self.held: tuple[int, ...] = ()
        self.has_them, self.may_go = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        with lease(*self.wanted, poll_seconds=0.01) as held:
            self.held = held.indices
            self.has_them.set()
            self.may_go.wait(ACROSS_PROCESSES_S)

    def release(self) -> None:
        self.may_go.set()
        self.join(ACROSS_PROCESSES_S)


def test_leases_are_disjoint_and_follow_the_preference() -> None:
    with lease(2, [3, 1, 0, 2]) as first, lease(2, [3, 1, 0, 2]) as second:
        assert first.indices == (3, 1)
        assert second.indices == (0, 2)
        assert not any(map(is_free, range(4)))
    assert all(map(is_free, range(4)))


def test_shared_gpus_are_filled_evenly_and_up_to_their_number() -> None:
    with lease(1, [0, 1], 2) as a, lease(1, [0, 1], 2) as b, lease(2, [0, 1], 2) as c:
        assert (a.indices, b.indices, c.indices) == ((0,), (1,), (0, 1))
        waiting = Holder(1, [0, 1], runs_per_gpu=2)
        assert not waiting.has_them.wait(NOT_YET_S)
    assert waiting.has_them.wait(ACROSS_PROCESSES_S)
    waiting.release()
    assert all(map(is_free, range(2)))


def test_a_run_that_needs_half_a_gpu_leaves_room_for_two_quarters() -> None:
    with lease(1, [0], 2), lease(1, [0], 4), lease(1, [0], 4):
        waiting = Holder(1, [0], runs_per_gpu=4)
        assert not waiting.has_them.wait(NOT_YET_S)
    assert waiting.has_them.wait(ACROSS_PROCESSES_S)
    waiting.release()


def test_a_gpu_is_shared_with_no_run_that_wants_it_alone() -> None:
    with lease(1, [0], 2):
        alone = Holder(1, [0])
        assert not alone.has_them.wait(NOT_YET_S)
    assert alone.has_them.wait(ACROSS_PROCESSES_S)
    shared = Holder(1, [0], runs_per_gpu=2)
    assert not shared.has_them.wait(NOT_YET_S)
    alone.release()
    assert shared.has_them.wait(ACROSS_PROCESSES_S)
    shared.release()


def test_gpus_are_given_back_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="boom"), lease(1, [0]):
        assert not is_free(0)
        raise RuntimeError("boom")
    assert is_free(0)


def test_lease_waits_until_enough_gpus_are_free() -> None:
    with lease(1, [0, 1]):
        waiting = Holder(2, [0, 1])
        assert not waiting.has_them.wait(NOT_YET_S)
    assert waiting.has_them.wait(ACROSS_PROCESSES_S)
    assert waiting.held == (0, 1)
    waiting.release()


def test_waiting_lease_holds_none_of_the_gpus() -> None:
    first = Holder(1, [1])
    assert first.has_them.wait(ACROSS_PROCESSES_S)
    second = Holder(1, [2])
    assert second.has_them.wait(ACROSS_PROCESSES_S)
    large = Holder(2, [0, 1, 2])
    assert not large.has_them.wait(NOT_YET_S)
    small = Holder(1, [0])
    assert small.has_them.wait(ACROSS_PROCESSES_S)
    first.release()
    assert not large.has_them.wait(NOT_YET_S)
    small.release()
    assert large.has_them.wait(ACROSS_PROCESSES_S)
    large.release()
    second.release()


def test_nobody_who_comes_later_has_a_gpu_that_one_who_waits_has_to_have(locks: Path) -> None:
    first = Holder(1, [1])
    assert first.has_them.wait(ACROSS_PROCESSES_S)
    wide = Holder(2, [0, 1])
    deadline = time.monotonic() + ACROSS_PROCESSES_S
    while not any('"num_gpus": 2' in ticket.read_text() for ticket in locks.glob("waiting/*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    narrow = Holder(1, [0])
    elsewhere = Holder(1, [0, 2])
    assert elsewhere.has_them.wait(ACROSS_PROCESSES_S)
    assert elsewhere.held == (2,)
    assert not narrow.has_them.wait(NOT_YET_S)
    first.release()
    assert wide.has_them.wait(ACROSS_PROCESSES_S)
    assert not narrow.has_them.is_set()
    wide.release()
    assert narrow.has_them.wait(ACROSS_PROCESSES_S)
    narrow.release()
    elsewhere.release()


def test_many_waiting_runs_all_get_their_turn() -> None:
    in_use: set[int] = set()
    clashes: list[int] = []

    def work() -> None:
        with lease(2, [0, 1, 2], poll_seconds=0.005) as held:
            clashes.extend(in_use & set(held.indices))
            in_use.update(held.indices)
            threading.Event().wait(0.005)
            in_use.difference_update(held.indices)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ACROSS_PROCESSES_S)
    assert not any(thread.is_alive() for thread in threads)
    assert clashes == []


def test_lease_outlives_us_in_the_child_that_inherited_it_and_ends_when_that_is_killed() -> None:
    with lease(1, [0]) as held:
        child = subprocess.Popen(
            [sys.executable, "-S", "-c", "import time; time.sleep(60)"],
            pass_fds=held.file_descriptors,
        )
    try:
        assert not is_free(0)
        waiting = Holder(1, [0])
        assert not waiting.has_them.wait(NOT_YET_S)
    finally:
        child.kill()
        child.wait()
    assert waiting.has_them.wait(ACROSS_PROCESSES_S)
    waiting.release()
    assert is_free(0)


def test_child_that_inherits_nothing_does_not_keep_the_lease() -> None:
    with lease(1, [0]):
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    try:
        assert is_free(0)
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("indices", [[], [0]])
def test_more_gpus_than_there_are_is_refused(indices: list[int]) -> None:
    with (
        pytest.raises(UserError, match=r"^num_gpus: 2 is more than the .*CUDA_VISIBLE_DEVICES"),
        lease(2, indices),
    ):
        pass


def test_unwritable_lock_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FP8STUDY_LOCKS", str(tmp_path / "file" / "locks"))
    with pytest.raises(UserError, match=r"^FP8STUDY_LOCKS: cannot write "), lease(1, [0]):
        pass


def test_lock_says_who_is_busy_or_waits(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "a.lock", "field"),
        pytest.raises(UserError, match=r"^busy here$"),
        locked(tmp_path / "a.lock", "field", busy="busy here"),
    ):
        pass
    with locked(tmp_path / "a.lock", "field", busy="busy here"):
        pass


def test_who_has_waited_longest_comes_first() -> None:
    with lease(1, [0]):
        waiting = []
        for _ in range(4):
            waiting.append(Holder(1, [0]))
            assert not waiting[-1].has_them.wait(NOT_YET_S)
    for number, holder in enumerate(waiting):
        assert holder.has_them.wait(ACROSS_PROCESSES_S), number
        assert not any(later.has_them.is_set() for later in waiting[number + 1 :])
        holder.release()


def test_those_who_come_first_leave_what_they_do_not_need() -> None:
    with lease(2, [0, 1, 2]):
        first = Holder(2, [0, 1, 2])
        assert not first.has_them.wait(NOT_YET_S)
        small = Holder(1, [0, 1, 2])  # cannot keep the first from its two
        assert small.has_them.wait(ACROSS_PROCESSES_S)
    assert first.has_them.wait(ACROSS_PROCESSES_S)
    first.release()
    small.release()


@pytest.mark.parametrize(
    "content", ["", "{}", '{"num_gpus": 1, "indices": [0], "runs_per_gpu": 1}']
)
def test_tickets_of_the_dead_are_cleared_away(locks: Path, content: str) -> None:
    ticket = locks / "waiting" / "00000000000000000000-1-1.json"
    ticket.parent.mkdir(parents=True)
    ticket.write_text(content)
    with lease(1, [0]):
        assert list(ticket.parent.iterdir()) == []


def test_a_broken_ticket_of_the_living_is_passed_by(locks: Path) -> None:
    ticket = locks / "waiting" / "00000000000000000000-1-1.json"
    descriptor = open_lock(ticket, "FP8STUDY_LOCKS")
    assert try_lock(descriptor)
    with lease(1, [0]) as held:
        assert held.indices == (0,)
    os.close(descriptor)
