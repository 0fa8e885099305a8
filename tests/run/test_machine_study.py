"""The study of the machine at hand: chosen once, kept in a file, gone on with."""

from pathlib import Path
from typing import Any

import pytest

from fp8study.core.errors import UserError
from fp8study.core.studies import Study, chosen_path, judgement_of, load_study
from fp8study.run.chosen import study as module
from fp8study.run.chosen.estimates import needed_gib
from fp8study.run.chosen.study import machine_study, study_here
from fp8study.run.machine import Machine
from fp8study.run.plan import impossible_runs, plan_text
from tests.factories import H200, finish
from tests.machines import machine
from tests.run.selections import MACHINES

ONE, TWO = MACHINES["H200"], MACHINES["2 H200"]
SMALL = machine(("NVIDIA GeForce RTX 4080", 15.99, (8, 9)))


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pipelines" / "studies").mkdir(parents=True)
    (tmp_path / "my.txt").write_text("word " * 1_000_000)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "is_reachable", lambda: False)
    return tmp_path


def begun(there: Machine, budget: float | None = None, **overrides: Any) -> Study:
    study = machine_study(there, overrides, budget)
    study.keep_content()
    return study


def finish_first(study: Study) -> None:
    finish(study.runs[0], config={"fp8_emulate": False}, machine=H200)


def ids(study: Study) -> list[str]:
    return [run.run_id for run in study.runs]


def test_what_is_kept_is_an_ordinary_study_of_the_same_runs() -> None:
    study = begun(TWO)
    assert chosen_path("machine").is_file()
    read = load_study("machine")
    assert read.runs == study.runs
    assert read.notes == study.notes
    assert judgement_of("machine")["question"].startswith("Should I pre-train in FP8")


@pytest.mark.parametrize("answers", [False, True])
def test_a_plan_says_where_a_text_cannot_be_fetched(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8study.run.plan.is_reachable", lambda: answers)
    text = plan_text(machine_study(ONE, {"corpus": "tinystories"}), ONE)
    assert ("the data hub cannot be reached" in text) is not answers
    assert "the data hub" not in plan_text(machine_study(ONE, {"corpus": "text:my.txt"}), ONE)


def test_a_later_call_goes_on_and_a_larger_budget_adds() -> None:
    first = begun(TWO, 20)
    finish_first(first)
    assert ids(begun(TWO)) == ids(begun(TWO, 5)) == ids(first)
    more = begun(TWO, 60)
    assert set(ids(first)) < set(ids(more))
    assert first.runs[0] not in more.pending()
    assert {run.run_id: run.gpus for run in first.runs}.items() <= {
        run.run_id: run.gpus for run in more.runs
    }.items()
    assert ids(begun(TWO)) == ids(more)  # 60 minutes from now on


def test_a_text_that_comes_later_adds_the_part_about_loss() -> None:
    first = begun(ONE, 20)
    assert all(run.config.timed_seconds for run in first.runs)
    more = begun(ONE, 40, corpus="text:my.txt")
    assert set(ids(first)) < set(ids(more))
    losses = [run.config for run in more.runs if not run.config.timed_seconds]
    assert {config.corpus for config in losses} == {"text:my.txt"}


def test_where_the_hub_can_be_reached_losses_are_judged_on_its_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "is_reachable", lambda: True)
    assert "tinystories" in {run.config.corpus for run in machine_study(ONE, {}).runs}


@pytest.mark.parametrize("other", [(TWO, {}), (ONE, {"master_dtype": "bf16"})])
def test_another_machine_or_setting_begins_anew_and_keeps_the_earlier_call(
    other: tuple[Machine, dict[str, Any]], checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finish_first(begun(ONE))
    there, overrides = other
    study = begun(there, **overrides)
    assert (checkout / "results/local/earlier/machine-1/study.yaml").is_file()
    assert "the earlier call is kept in " in capsys.readouterr().out
    assert len(study.pending()) == len(study.runs)
    if overrides:  # which stay until others are set
        assert ids(begun(there)) == ids(study)


def test_the_plan_gives_each_run_its_memory_minutes_and_reason() -> None:
    study = machine_study(ONE, {})
    text = " ".join(plan_text(study, ONE).split())
    assert f"{len(study.runs)} to do" in text
    assert "125 GiB" in text
    for run in study.runs:
        gib = needed_gib(run.config)
        assert f"{gib:.0f} GiB {run.minutes:.1f} min {run.why}" in text
    assert "qwen3-14b on 1 GPU needs 225 GiB" in text
    assert "No part about loss: no text can be had" in text


def test_what_is_said_to_make_a_small_gpus_run_fit_does() -> None:
    with pytest.raises(UserError, match=r"master_dtype=bf16 \(14 GiB\). What a run needs is given"):
        machine_study(SMALL, {})
    study = machine_study(SMALL, {"master_dtype": "bf16"})
    assert not impossible_runs(study, SMALL)
    assert len(study.pending()) > 4


def test_gpus_without_fp8_judge_losses_on_synthetic_text_where_there_is_no_other() -> None:
    study = begun(MACHINES["A100"])
    assert {(run.config.corpus, run.config.fp8_emulate) for run in study.runs} == {
        ("synthetic", True)
    }
    text = " ".join(plan_text(study, MACHINES["A100"]).split())
    assert "judge losses on SET='corpus=text:my.txt'" in text
    assert "No part about speed: FP8 needs compute capability 8.9" in text
    assert ids(begun(MACHINES["A100"])) == ids(study)
    more = begun(MACHINES["A100"], 60, corpus="text:my.txt")
    assert {run.config.corpus for run in more.runs} == {"synthetic", "text:my.txt"}


def test_the_plan_of_a_study_of_ones_own_says_where_another_way_is_faster(
    checkout: Path,
) -> None:
    path = checkout / "pipelines/studies/mine.yaml"
    path.write_text(
        "question: Is it faster?\nbase: {path: tuned, num_gpus: 2, strategy: fsdp2, "
        "precision: fp8_tensorwise, sequence_length: 4096}\n"
        "arms: [{model: llama-3.1-8b, micro_batch_size: 4}, {model: llama-3.2-1b}]\n"
    )
    cell = "for llama-3.2-1b at batch 1 on {}: SET='{}'"
    graph = "by the law of speed steps are small here, and faster as one CUDA graph, "
    hint = graph + cell.format("2 GPUs", "step_launch=as_graph")

    def plan(there: Machine = TWO, **overrides: Any) -> str:
        return " ".join(plan_text(load_study("mine", overrides), there).split())

    assert hint in plan()
    for own in ({"fp8_all_gather": False}, {"path": "plain"}, {"step_launch": "as_graph"}):
        assert "by the law" not in plan(**own)
    assert graph + cell.format("4 GPUs", "step_launch=as_graph") in plan(
        MACHINES["8 H200"], num_gpus=4
    )
    eight = plan(MACHINES["8 H200"], num_gpus=8)
    gather = cell.format("8 GPUs", "fp8_all_gather=false")
    assert "by the law of speed BF16 all-gather is faster here " + gather in eight
    alone = {"num_gpus": 1, "strategy": "none"}
    assert graph + cell.format("1 GPU", "step_launch=as_graph") in plan(**alone)
    assert "by the law" not in plan(there=MACHINES["A100"])
    assert "by the law" not in " ".join(plan_text(machine_study(TWO, {}, 60), TWO).split())
    # Its 8B would refuse what its 1B gains by, and SET is for both.
    path.write_text(path.read_text().replace("4}", "4, attention_mask: checked}"))
    assert "by the law" not in plan(**alone, max_grad_norm=1.0)


def test_a_run_beyond_the_gpus_memory_is_refused_before_it_starts(checkout: Path) -> None:
    path = checkout / "pipelines/studies/large.yaml"
    path.write_text("question: Does it fit?\nfactors: {model: [llama-3.1-8b, llama-3.2-1b]}\n")
    study, there = load_study("large"), MACHINES["H100"]
    ((run, reason),) = impossible_runs(study, there).items()
    assert run.config.model == "llama-3.1-8b"
    assert reason.startswith("memory: llama-3.1-8b at batch 1 needs 128 GiB of 80; would fit: on ")
    assert "cannot" in plan_text(study, there)
    assert impossible_runs(study, ONE) == {}
    finish_first(study)
    assert impossible_runs(study, there) == {}  # a result needs no permission


@pytest.mark.parametrize(
    ("there", "overrides", "budget", "words"),
    [
        (Machine((), 2), {}, None, "STUDY: 'machine' is for GPUs"),
        (ONE, {"precision": "bf16"}, None, "--set precision: the study 'machine' chooses it"),
        (ONE, {"num_gpus": 1}, None, "--set num_gpus: the study 'machine' chooses it"),
        (ONE, {}, 0, "--budget: 0 is no time"),
        (ONE, {}, 1.5, "--budget: 1.5 min hold no run here, not even the shortest; BUDGET=5 does"),
        (
            SMALL,
            {},
            20,
            "STUDY: no run of 'machine' is possible here. llama-3.2-1b on 1 GPU needs ",
        ),
        (ONE, {"model": "llama-3.1-70b"}, None, "STUDY: no run of 'machine' is possible here. "),
        (
            ONE,
            {"corpus": "text:none.txt"},
            None,
            "corpus: there is no file 'none.txt' in '",
        ),
    ],
)
def test_what_leaves_nothing_to_choose_is_one_line(
    there: Machine, overrides: dict[str, Any], budget: float | None, words: str
) -> None:
    with pytest.raises(UserError) as caught:
        machine_study(there, overrides, budget)
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)


def test_runs_that_the_file_does_not_tell_of_are_estimated(checkout: Path) -> None:
    content = "question: q\nbase: {model: llama-3.2-1b, num_steps: 250}\nminutes_per_run: 7\n"
    (checkout / "pipelines/studies/own.yaml").write_text(content)

    def minutes(**values: Any) -> float:
        (run,) = study_here(ONE, "own", values, None)[0].runs
        return run.minutes

    assert minutes() == minutes(seed=1) == 7
    assert minutes(model="llama-3.1-8b") > 2 * minutes(num_steps=100) > 0
    alone, shared = (minutes(model="llama-3.1-8b", runs_per_gpu=n) for n in (1, 4))
    assert 3 * alone < shared < 4 * alone  # of which four run side by side


def test_what_is_set_may_leave_too_few_pairs_or_a_text_that_is_read_again(checkout: Path) -> None:
    content = (
        "question: q\nbase: {model: tiny-llama, sequence_length: 512, num_steps: 1000, corpus: "
        "'text:my.txt'}\nfactors: {precision: [bf16, fp8]}\nseeds: [0, 1, 2]\n"
    )
    (checkout / "pipelines/studies/own.yaml").write_text(content)

    def plan(**values: Any) -> str:
        return " ".join(plan_text(study_here(ONE, "own", values, None)[0], ONE).split())

    assert "verdict on losses" not in plan() and "A run reads" not in plan()
    assert "One pair of FP8 and BF16: a verdict on losses takes 3 seeds" in plan(seed=7)
    assert "No pair of FP8 and BF16" in plan(precision="bf16")
    assert "A run reads text:my.txt up to 4.1 times: " in plan(num_steps=8000)
