r"""Time torchtitan, plain Accelerate and our tuned path by turns on the same GPUs.

    python scripts/beside_torchtitan.py CHECKOUT beside-torchtitan --repeats 0 1 2 3

CHECKOUT is torchtitan v0.2.2, its packages (tyro, torchdata) installed beside ours. A *cell* is a
model, its batch and its GPUs. A block is a cell at one ``repeat`` of the study: our runs and theirs
in each precision, one after the other on the same GPUs, in an order drawn at random. Groups of GPUs
do blocks side by side. A block is done in one go: repeats that were begun are refused, and another
session does others. The report compares within blocks and pools the sessions. ``--without
accelerate`` leaves that out, and saves a third of a block's time.

Our records lie where `make reproduce` puts them, theirs in ``peer/SESSION`` beside them. The exit
status is 1 if something did not complete.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import queue
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from peer_accelerate import ACCELERATE
from peer_runs import Cell, Configuration
from peer_torchtitan import check_checkout, torchtitan

from fp8study.analysis.peers import read_peers
from fp8study.core.config import ResolvedConfig
from fp8study.core.errors import UserError
from fp8study.core.files import results_dir
from fp8study.core.records import read_record, utc_now
from fp8study.core.studies import PlannedRun, load_study
from fp8study.run.chosen.estimates import step_seconds
from fp8study.run.machine import Machine, this_machine

#: One arm of a block, to be done on these GPUs.
Arm = Callable[[Sequence[int]], None]
LOG_EVERY = 5
#: Steps that torchtitan warms up and then is timed for, in estimated seconds: its FP8 is up to a
#: third faster than the estimate, and 20 s are to be timed.
SECONDS = 27.0


def cell_of(config: ResolvedConfig) -> tuple[int, str, int]:
    return config.num_gpus, config.model, config.micro_batch_size


def train(run: PlannedRun, study: str, gpus: Sequence[int]) -> None:
    """Do one of our runs as the pipeline does."""
    log = run.run_dir / "papermill.log"
    command = [
        sys.executable, "-m", "papermill", "notebooks/run.ipynb", str(run.run_dir / "run.ipynb"),
        "-k", "python3", "-f", str(run.run_dir / "config.yaml"), "-p", "study", study,
        "-r", "run_id", run.run_id, "--no-progress-bar",
    ]  # fmt: skip
    chosen = {"FP8STUDY_GPUS": ",".join(map(str, gpus))}
    with log.open("wb") as output:
        subprocess.run(
            command, env=os.environ | chosen, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
    print(f"{run.run_id}: {ended(run) or f'no record, see {log}'}", flush=True)


def ended(run: PlannedRun) -> str | None:
    """Return the status of a run's record; None where there is none."""
    path = run.run_dir / "run.json"
    return read_record(path).status if path.exists() else None


def configurations(
    options: argparse.Namespace, runs: Sequence[PlannedRun], machine: Machine
) -> list[Configuration]:
    """Return what the other trainers are to do in one cell, in each precision of ours."""
    config = runs[0].config
    steps = LOG_EVERY * math.ceil(SECONDS / step_seconds(config, machine) / LOG_EVERY)
    cell = Cell(
        config.model, config.num_gpus, config.micro_batch_size, config.sequence_length,
        num_steps=2 * steps, num_warmup_steps=steps, log_every=LOG_EVERY,
    )  # fmt: skip
    output = (results_dir() / "local" / options.study / "peer" / options.session).resolve()
    trainers = (torchtitan(options.checkout, cell, output), ACCELERATE)
    return [
        Configuration(trainer, cell, precision, output, len(options.repeats), machine)
        for trainer in trainers
        if trainer.name != options.without
        for precision in sorted({run.config.precision for run in runs})
    ]


def blocks_of(
    options: argparse.Namespace, runs: Sequence[PlannedRun], theirs: Sequence[Configuration]
) -> list[list[Arm]]:
    """Return the blocks of one cell, each in an order of its own."""
    blocks = []
    for repeat in options.repeats:
        ours = [run for run in runs if run.config.repeat == repeat]
        arms: list[Arm] = [partial(train, run, options.study) for run in ours]
        arms += [partial(each.measure, repeat) for each in theirs]
        random.Random(f"{cell_of(runs[0].config)} {repeat}").shuffle(arms)
        blocks.append(arms)
    return blocks


def in_groups(blocks: Sequence[Sequence[Arm]], width: int, gpus: Sequence[int]) -> None:
    """Do blocks side by side, each on as many GPUs as it is wide."""
    free: queue.Queue[Sequence[int]] = queue.Queue()
    for first in range(0, len(gpus) - width + 1, width):
        free.put(gpus[first : first + width])

    def do(block: Sequence[Arm]) -> None:
        group = free.get()
        try:
            for arm in block:
                arm(group)
        finally:  # or the others would wait for it for ever
            free.put(group)

    with ThreadPoolExecutor(free.qsize()) as pool:
        list(pool.map(do, blocks))


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time torchtitan and our tuned path by turns.")
    parser.error = lambda message: sys.exit(f"beside_torchtitan: {message}")  # type: ignore[method-assign]
    parser.add_argument("checkout", type=Path)
    parser.add_argument("study")
    parser.add_argument("--repeats", type=int, nargs="+", help="by default all of the study")
    parser.add_argument("--without", choices=[ACCELERATE.name], help="do not time this trainer")
    options = parser.parse_args(words)
    options.session = utc_now()[:16].replace(":", "")
    return options


def main(words: Sequence[str]) -> int:
    options, machine = parse(words), this_machine()
    check_checkout(options.checkout)
    study = load_study(options.study)
    there = sorted({run.config.repeat for run in study.runs})
    options.repeats = options.repeats or there
    if unknown := {*options.repeats} - {*there}:
        raise UserError(f"--repeats: {min(unknown)} is none of the study's: {there}")
    runs = [run for run in study.runs if run.config.repeat in options.repeats]
    if too_wide := [run for run in runs if run.config.num_gpus > len(machine.gpus)]:
        wide = too_wide[0].config.num_gpus
        raise UserError(f"num_gpus: {wide} is more than the {len(machine.gpus)} visible GPUs")
    begun = {run.config.repeat for run in runs if ended(run)}
    begun |= {
        n for record in read_peers(results_dir() / "local" / study.name) for n in record.blocks
    }
    if again := begun & {*options.repeats}:
        free = [repeat for repeat in there if repeat not in begun]
        raise UserError(f"--repeats: {min(again)} was begun before; not begun are {free or 'none'}")
    study.write_configs()
    gpus, peers = [gpu.index for gpu in machine.gpus], []
    ordered = sorted(runs, key=lambda run: cell_of(run.config))
    cells = [list(cell) for _, cell in itertools.groupby(ordered, lambda run: cell_of(run.config))]
    for width, alike in itertools.groupby(cells, lambda cell: cell[0].config.num_gpus):
        of_cells = []
        for cell in alike:
            theirs = configurations(options, cell, machine)
            of_cells.append(blocks_of(options, cell, theirs))
            peers += theirs
        # Repeat by repeat, so that a session that is cut off leaves each cell the blocks done.
        in_groups(list(itertools.chain(*zip(*of_cells, strict=True))), width, gpus)
    done = all(ended(run) == "completed" for run in runs)
    return int(not done or any(each.record["status"] != "completed" for each in peers))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"beside_torchtitan: {error}")
