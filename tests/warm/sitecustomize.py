"""Training processes that are forked from one which has imported torch: five seconds less each.

Python imports a module of this name first of all, from a folder in ``PYTHONPATH``. Where
``WARM_TRAINING`` names the socket of such a process, a command that would train hands over to it
its arguments, its environment and its standard streams, waits, and ends as the training did.

    python sitecustomize.py SOCKET    serves until its standard input closes
"""

from __future__ import annotations

import os
import sys
from typing import Any

#: What training imports at once, and what it imports later on.
IMPORTED = (
    "fp8study.train.trainer", "fp8study.train.closer_look", "torchao.float8",
    "torch._inductor.codegen.triton", "transformers.models.llama.modeling_llama",
)  # fmt: skip
TORCHRUN = ["-m", "torch.distributed.run"]


def trains(arguments: list[str]) -> bool:
    """Say whether this command line is training: ours, a changed one in a test, a test's worker."""
    if arguments[:1] == ["-c"]:
        return "fp8study.train" in arguments[1]
    what = arguments[arguments[0] == "-m"]
    return what == "fp8study.train" or what.endswith(("_worker", "_worker.py"))


def hand_over(path: str, num_ranks: int | None, arguments: list[str]) -> None:
    """Let the warm process do it, and end as it ends; does not return.

    `num_ranks` is what torchrun would start, None where the process is started by itself.
    """
    import json
    import socket

    request = {
        "arguments": arguments, "num_ranks": num_ranks, "folder": os.getcwd(),  # noqa: PTH109
        "environment": dict(os.environ),
    }  # fmt: skip
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [b" "], [0, 1, 2])
        server.sendall(json.dumps(request).encode())
        server.shutdown(socket.SHUT_WR)
        status = int(server.makefile().read() or 1)
    if status < 0:  # by a signal
        os.kill(os.getpid(), -status)
    os._exit(status)


def serve(path: str) -> None:
    import gc
    import importlib
    import select
    import socket
    import threading
    from contextlib import suppress

    for module in IMPORTED:
        importlib.import_module(module)
    assert threading.active_count() == 1, "a fork would lose the other threads"
    gc.collect()
    gc.freeze()  # or each fork's first collection would look at all of it, and copy it
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while 0 not in select.select([listener, 0], [], [])[0]:
            connection, _ = listener.accept()
            with suppress(ChildProcessError):  # those of earlier commands
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            with connection:
                if os.fork() == 0:
                    attend(connection)
                    os._exit(0)


def attend(connection: Any) -> None:
    """Fork the processes of one command, and answer with the status of the first that fails."""
    import json
    import signal
    import socket

    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    request = json.loads(connection.makefile().read())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = set()
    for rank in range(request["num_ranks"] or 1):
        process = os.fork()
        if process == 0:
            connection.close()
            start(request, rank, port, streams)
        processes.add(process)
    first = 0
    while processes:
        process, status = os.wait()
        processes.discard(process)
        if first == 0 and (first := os.waitstatus_to_exitcode(status)) != 0:
            for other in processes:
                os.kill(other, signal.SIGTERM)
    connection.sendall(str(first).encode())


def start(request: dict[str, Any], rank: int, port: int, streams: list[int]) -> None:
    """Be one of the processes; does not return."""
    import runpy
    import traceback

    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if number := request["num_ranks"]:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(number),
            "LOCAL_WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
    what, *rest = request["arguments"]
    status = 1
    try:
        if what == "-m":
            sys.argv = rest
            sys.path.insert(0, request["folder"])  # as Python has it
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif what == "-c":
            sys.argv = ["-c", *rest[1:]]
            exec(rest[0], {"__name__": "__main__"})
        else:
            sys.argv = [what, *rest]
            runpy.run_path(what, run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1 if end.code else 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    serve(sys.argv[1])
elif "WARM_TRAINING" in os.environ:
    command, options = sys.orig_argv[1:], {}
    if command[:2] == TORCHRUN:
        command = command[2:]
        while command[0].startswith("--"):
            name, _, value = command.pop(0).partition("=")
            options[name] = value
        if options.keys() != {"--standalone", "--nproc-per-node"} or not trains(command):
            print(f"tests/warm: {sys.orig_argv} is no command known here", file=sys.stderr)
            os._exit(1)  # an exception in this module would only be printed
    if command and trains(command):
        ranks = int(options["--nproc-per-node"]) if options else None
        hand_over(os.environ["WARM_TRAINING"], ranks, command)
