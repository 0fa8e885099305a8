"""In which order runs are started, and on which GPUs, so that what is compared stays together.

A block is what is compared with each other: all arms of one workload, seed and repeat. Wide runs
come first; of runs on as many GPUs a study goes block by block, so that one which is cut off leaves
whole blocks rather than whole arms. The runs of a block have the same GPUs, since GPUs of one box
differ by 3 to 5 % (docs/log.md).
"""

from __future__ import annotations

import json
from collections.abc import Collection

from fp8study.core.fields import varying
from fp8study.core.studies import PlannedRun, Study
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


def gpus_to_have(machine: Machine, study: Study) -> dict[str, list[int]]:
    """Return the GPUs that each of a study's runs has to have, by its id; none: any.

    All of its runs have to be possible here. Those that the study names, else the same for a whole
    block: the neighbours that have the least to do until then. The widest blocks choose first, as
    they run first. Where only losses are asked for, a repeat belongs to the block that it repeats.
    """
    places = {run.run_id: run.gpus if machine.gpus else () for run in study.runs}
    minutes = [0.0] * len(machine.gpus)
    compared = _COMPARED if study.speed_only else _COMPARED | {"repeat"}
    blocks: dict[str, list[PlannedRun]] = {}
    for run in ordered(study.runs) if len(minutes) > 1 else ():
        shared = {n: v for n, v in run.config.to_dict().items() if n not in compared}
        blocks.setdefault(json.dumps([shared, run.gpus]), []).append(run)
    widest_first = sorted(blocks.values(), key=lambda block: -block[0].config.gpus_per_node)
    for block in widest_first:
        width = block[0].config.gpus_per_node
        starts = range(0, len(minutes) - width + 1, width)
        groups = [tuple(range(start, start + width)) for start in starts]
        chosen = block[0].gpus or min(groups, key=lambda group: max(minutes[n] for n in group))
        places |= {run.run_id: chosen for run in block}
        for place in chosen:
            minutes[place] += sum(run.minutes / run.config.runs_per_gpu for run in block)
    return {
        name: [machine.gpus[place].index for place in chosen] for name, chosen in places.items()
    }
