"""What an advice says of how to check it: what to run, for how long, and whether that decides."""

from __future__ import annotations

from fp8study.analysis.advice.answer import Advice, LossCheck
from fp8study.analysis.advice.commands import CHECK_LOSS, CONTINUE, STUDY
from fp8study.core.studies import load_study
from fp8study.core.words import rate

#: Of English text, for vocabularies of today.
_BYTES_PER_TOKEN = 4


def listed(head: str, items: list[str] | tuple[str, ...]) -> list[str]:
    """Set items under a head; nothing where there is none."""
    return ["", head, *(f"  {item}" for item in items)] if items else []


def loss_check(advice: Advice) -> list[str]:
    check = advice.loss_check
    if check is None:
        return []
    at = rate(check.learning_rate)
    going_on, anew = (load_study(name).runs for name in (CONTINUE, CHECK_LOSS))
    longer = going_on[0].config.num_steps / anew[0].config.num_steps
    at_rate = "--set learning_rate=RATE " * ("learning_rate=" not in check.command)
    yours = " (yours: add --set learning_rate=RATE)" * (advice.learning_rate is None)
    fitting = f", at batch {check.micro_batch_size}, where BF16 fits, too" * (not advice.fits)
    millions, megabytes = (_short(check.tokens * each / 1e6) for each in (1, _BYTES_PER_TOKEN))
    return listed(
        f"To check its loss at a learning rate of {at}{yours}{fitting}: {check.num_runs} runs, "
        f"{_short(check.gpu_hours)} GPU hours of steps, a text of {millions} million tokens, "
        f"about {megabytes} MB, to read it once:",
        [
            *_seeds_wanted(check),
            check.command,
            "If you have BF16-trained weights, fewer seeds decide, even at your real learning "
            f"rate: the same with {CONTINUE} for {CHECK_LOSS}, and {at_rate}--set "
            f"init_from=FOLDER --set tokenizer=auto --set runs_per_gpu=1 ({len(going_on)} runs of "
            f"{going_on[0].config.num_steps} steps, of rowwise too; {longer:g} times the text)",
        ],
    )


def _seeds_wanted(check: LossCheck) -> list[str]:
    """Say if so few seeds may not decide, as far as pairs are known to scatter."""
    seeds = check.seeds
    if seeds is None or seeds.most <= seeds.num_in_check:
        return []
    takes = " to ".join(dict.fromkeys(map(str, (seeds.fewest, seeds.most))))
    more = ", at a higher rate perhaps more" * (check.learning_rate > seeds.learning_rate)
    return [
        f"{seeds.num_in_check} seeds may not decide: by the scatter of pairs of {seeds.models} "
        f"from random weights at {rate(seeds.learning_rate)} it takes {takes}{more}; to add one: "
        f"the same with --set seed={seeds.num_in_check}"
    ]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def speed_check(advice: Advice) -> list[str]:
    if advice.building_gib > advice.capacity_gib:
        return listed("To check it:", [
            "fp8study cannot: its runs first build the whole model on each GPU "
            f"({advice.building_gib:.0f} GiB); other trainers need not",
        ])  # fmt: skip
    if advice.study:
        there = f"pipelines/profiles/slurm/config.yaml (max_nodes: {advice.config['num_nodes']})"
        return listed(f"To measure its speed, with this as pipelines/studies/{STUDY}.yaml and your "
                       f"cluster in {there}; no cluster with GPUs has run it yet:",
                       [*advice.study.splitlines(), "", *advice.commands])  # fmt: skip
    if not advice.fits:
        return listed("To measure its speed, in FP8 alone:", advice.commands)
    return listed("To measure its speed (then ask again: your own runs count first):",
                   advice.commands)  # fmt: skip
