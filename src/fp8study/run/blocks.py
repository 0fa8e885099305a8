"""In which order runs are started, and on which GPUs, so that what is compared stays together.

A block is what is compared with each other: all arms of one workload, seed and repeat. A study goes
block by block, so that one which is cut off leaves whole blocks rather than whole arms; and the
runs of a block on one GPU share it, since GPUs of one box differ by 3 to 5 % (docs/log.md).
"""

from __future__ import annotations

import json
from collections.abc import Collection

from fp8study.core.fields import varying
from fp8study.core.studies import PlannedRun
from fp8study.run.machine import Machine

#: In what runs differ that are compared: precision, switches, compilation. Not in the seed.
_COMPARED = {*varying("pair"), *varying("switch"), "strategy", "compile", "compile_cache"}
_COMPARED -= {"seed", "repeat"}


def ordered(runs: Collection[PlannedRun]) -> list[PlannedRun]:
    """Order runs by repeat and seed, then as their study has them.

    A study that names GPUs has made its own timetable, and keeps its order.
    """
    if any(run.gpus for run in runs):
        return list(runs)
    return sorted(runs, key=lambda run: (run.config.repeat, run.config.seed))


def gpus_to_have(machine: Machine, runs: Collection[PlannedRun]) -> dict[str, list[int]]:
    """Return the GPUs that each of a study's runs has to have, by its id; none: any.

    Those that the study names, else one for each block of runs on one GPU: the GPU that has the
    least to do until then.
    """
    places = {run.run_id: run.gpus for run in runs}
    alone = [r for r in ordered(runs) if not r.gpus and r.config.num_gpus == 1]
    blocks: dict[str, list[PlannedRun]] = {}
    for run in alone if len(machine.gpus) > 1 else ():
        shared = {n: v for n, v in run.config.to_dict().items() if n not in _COMPARED}
        blocks.setdefault(json.dumps(shared), []).append(run)
    minutes = [0.0] * len(machine.gpus)
    for block in blocks.values():
        place = minutes.index(min(minutes))
        minutes[place] += sum(run.minutes / run.config.runs_per_gpu for run in block)
        places |= {run.run_id: (place,) for run in block}
    return {
        name: [machine.gpus[place].index for place in chosen] for name, chosen in places.items()
    }
