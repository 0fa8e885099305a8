"""Children that end with their parent, even if the parent is killed outright.

The parent keeps the other end of the child's standard input. When the parent is gone, however
it ended, that end closes, and the child ends itself.

    python -m fp8study.run.leash MODULE [ARGUMENTS...]    runs a module on such a leash
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any


def follow_parent(whole_group: bool = False) -> None:
    """End this process when its standard input closes.

    Args:
        whole_group: End all processes of our group, not only this one.
    """

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(0 if whole_group else os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def end(child: subprocess.Popen[Any], patience_s: float = 15.0) -> None:
    """Stop a child that leads its own group, and its group, ever more firmly.

    Args:
        child: Started with ``start_new_session=True``.
        patience_s: Seconds to wait after each signal.
    """
    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if child.poll() is not None:
            return
        os.killpg(child.pid, sign)
        try:
            child.wait(timeout=patience_s)
        except subprocess.TimeoutExpired:
            continue


if __name__ == "__main__":
    follow_parent(whole_group=True)
    del sys.argv[0]
    sys.path.insert(0, str(Path.cwd()))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
