"""The Triton kernels by Triton's interpreter; by a GPU they are tested in tests/gpu."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("kernel_checks.py")


def test_the_kernels_do_what_plain_torch_does() -> None:
    """In a process of its own: how Triton runs is decided where it is first imported."""
    pytest.importorskip("triton", reason="torch for CPUs comes without Triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(CHECKS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "49 cases\n"), done.stderr[-3000:]
