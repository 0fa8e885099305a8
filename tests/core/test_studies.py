"""What a study's file says, and what becomes of a mistake in it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8study.core.errors import UserError
from fp8study.core.files import project_root, results_dir, studies_dir
from fp8study.core.presets import PRESETS
from fp8study.core.studies import Study, estimated_minutes, judgement_of, load_study, study_names
from fp8study.data.corpus import KINDS
from tests.checkout import ROOT

SHIPPED = sorted(path.stem for path in (ROOT / "pipelines" / "studies").glob("*.yaml"))


def write_study(checkout: Path, name: str = "mine", **content: Any) -> None:
    content = {"question": "Does it?", "base": {"model": "tiny-llama"}} | content
    (checkout / "pipelines" / "studies" / f"{name}.yaml").write_text(yaml.safe_dump(content))


def load(checkout: Path, overrides: dict[str, Any] | None = None, **content: Any) -> Study:
    write_study(checkout, **content)
    return load_study("mine", overrides)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_study_is_valid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    study = load_study(name)
    assert study.question.endswith("?")
    assert all(run.minutes > 0 for run in study.runs)
    assert study.runs
    assert len({run.run_id for run in study.runs}) == len(study.runs)
    for run in study.runs:
        # A study of one's own may name a folder, a hub id, a file of text.
        assert run.config.model in PRESETS or "/" in run.config.model
        assert run.config.corpus in KINDS or run.config.corpus.startswith("text:")
        assert run.run_dir == ROOT / "results" / "local" / name / run.run_id


def test_a_study_for_either_kind_of_machine_is_shipped() -> None:
    assert {"smoke", "quick"} <= set(SHIPPED)


def test_runs_are_the_product_of_arms_factors_and_seeds(checkout: Path) -> None:
    study = load(
        checkout,
        arms=[{"precision": "bf16"}, {"precision": "fp8", "skip": ["lm_head", "*.o_proj"]}],
        factors={"num_gpus": [2, 1], "sequence_length": [64, 128]},
        seeds=[0, 1, 2],
        minutes_per_run=3,
    )
    configs = [run.config for run in study.runs]
    assert len(configs) == len(set(configs)) == 2 * 2 * 2 * 3
    assert {(c.precision, len(c.skip)) for c in configs} == {("bf16", 1), ("fp8_tensorwise", 2)}
    assert {c.model for c in configs} == {"tiny-llama"}
    assert {run.minutes for run in study.runs} == {3.0}


def test_without_arms_factors_and_seeds_there_is_one_run(checkout: Path) -> None:
    (run,) = load(checkout).runs
    assert run.config.seed == 0


def test_run_ids_are_stable_unique_and_speak(checkout: Path) -> None:
    content = {"factors": {"precision": ["bf16", "fp8"]}, "seeds": [0, 7]}
    ids = [run.run_id for run in load(checkout, **content).runs]
    assert ids == [run.run_id for run in load(checkout, **content).runs]
    assert len(set(ids)) == 4
    assert ids[3].startswith("tiny-llama-fp8_tensorwise-1gpu-s7-")


def test_run_id_of_a_hub_model_or_folder_is_one_path_part(checkout: Path) -> None:
    ids = [load(checkout, {"model": m}).runs[0].run_id for m in ("org/Model-1B", "/some/folder/")]
    assert [run_id.split("-bf16-")[0] for run_id in ids] == ["Model-1B", "folder"]


def test_overrides_win_over_the_file_and_change_the_ids(checkout: Path) -> None:
    content = {"arms": [{"num_steps": 50}], "seeds": [1]}
    plain, changed = load(checkout, **content), load(checkout, {"num_steps": 30}, **content)
    assert changed.runs[0].config.num_steps == 30
    assert plain.runs[0].run_id != changed.runs[0].run_id


@pytest.mark.parametrize("overrides", [{"num_gpus": 1}, {"seed": 3}])
def test_runs_that_an_override_made_equal_are_one_run(
    checkout: Path, overrides: dict[str, Any]
) -> None:
    study = load(checkout, overrides, factors={"num_gpus": [1, 2]}, seeds=[0, 1])
    assert len(study.runs) == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"factor": {"num_gpus": [1]}}, ["mine.yaml", "unknown key 'factor'", "mean 'factors'?"]),
        ({"base": {"modl": "x"}}, ["mine.yaml", "unknown parameter 'modl'", "mean 'model'?"]),
        ({"arms": [{"minute": 2}]}, ["mine.yaml: arms: unknown parameter 'minute'", "'minutes'?"]),
        ({"factors": {"num_gpu": [1]}}, ["mine.yaml", "parameter 'num_gpu'", "mean 'num_gpus'?"]),
        ({"arms": [{"precision": "fp9"}]}, ["precision", "fp9"]),
        ({"question": ""}, ["mine.yaml", "question: missing"]),
        ({"question": 3}, ["mine.yaml", "question"]),
        ({"base": ["model"]}, ["mine.yaml", "base"]),
        ({"arms": {"precision": "bf16"}}, ["mine.yaml", "arms"]),
        ({"factors": ["num_gpus"]}, ["mine.yaml", "factors"]),
        ({"factors": {"num_gpus": 2}}, ["mine.yaml", "num_gpus", "list"]),
        ({"factors": {"precision": "bf16"}}, ["mine.yaml", "precision", "list"]),
        ({"seeds": 3}, ["mine.yaml", "seeds"]),
        ({"minutes_per_run": "long"}, ["mine.yaml", "minutes_per_run", "long"]),
        ({"margin_pct": "wide"}, ["mine.yaml", "margin_pct", "wide"]),
        ({"margin_pct": 0}, ["mine.yaml", "margin_pct: 0 is outside", "0.25 by default"]),
        ({"margin_pct": -1.5}, ["mine.yaml", "margin_pct: -1.5 is outside"]),
        ({"expectation": ["none"]}, ["mine.yaml", "expectation", "a text"]),
        ({"question": False}, ["mine.yaml: question: False is not valid; give a text in quotes"]),
        ({"base": {"num_steps": -1}}, ["mine.yaml: num_steps: -1 is outside"]),
        ({"reference": {"precision": "fp9"}}, ["mine.yaml: reference: precision: 'fp9'"]),
        ({"arms": []}, ["mine.yaml: arms: the list is empty; give values or remove it"]),
        ({"seeds": []}, ["mine.yaml: seeds: the list is empty"]),
        ({"arms": [{"seeds": []}]}, ["mine.yaml: arms: seeds: the list is empty"]),
        ({"minutes_per_run": -1}, ["mine.yaml: minutes_per_run: -1 is no time; give minutes"]),
        ({"arms": [{"minutes": 0}]}, ["mine.yaml: arms: minutes: 0 is no time"]),
        ({"minutes_per_run": 1e300}, ["mine.yaml: minutes_per_run: 1e+300 is no time"]),
        (
            {"factors": {"model": ["lama-3.1-8b"]}},
            ["mine.yaml: model: 'lama-3.1-8b' is no preset (did you mean 'llama-3.1-8b'?)"],
        ),
        ({"seeds": [0, 1, 0]}, ["mine.yaml: 'seed=0' is planned already, as tiny-llama-bf16-1gpu"]),
        (
            {"arms": [{"precision": "fp8_rowwise"}], "factors": {"precision": ["bf16", "fp8"]}},
            ["mine.yaml: arms: precision is in factors, too; leave it out of one"],
        ),
        ({"arms": [{"num_steps": 50}] * 2}, ["'num_steps=50, seed=0' is planned already"]),
        (
            {"factors": {"precision": ["bf16", "fp8", "fp8_tensorwise"]}},
            ["mine.yaml: 'precision=fp8_tensorwise, seed=0' is planned already", "; drop it"],
        ),
        ({"question": "  "}, ["mine.yaml: question: missing"]),
        ({"speed_only": "yes"}, ["mine.yaml", "speed_only: 'yes' is not valid; give true or"]),
    ],
)
def test_mistake_in_a_study_file_is_named_in_one_line(
    checkout: Path, content: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        load(checkout, **content)
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize("text", ["", "- question", "question: [", "\tquestion: x", "question: é"])
def test_file_that_is_no_study_is_refused_in_one_line(checkout: Path, text: str) -> None:
    (checkout / "pipelines" / "studies" / "mine.yaml").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=r"mine\.yaml: ") as caught:
        load_study("mine")
    assert "\n" not in str(caught.value)


def test_a_key_that_is_given_twice_is_refused(checkout: Path) -> None:
    text = "question: Does it?\nbase:\n  model: tiny-llama\nbase: {seed: 1}\n"
    (checkout / "pipelines" / "studies" / "mine.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        load_study("mine")
    told = "mine.yaml: 'base' is given twice (lines 2 and 4); merge them"
    assert str(caught.value).endswith(told)


def test_a_wrong_override_is_not_blamed_on_the_file(checkout: Path) -> None:
    with pytest.raises(UserError, match=r"^num_steps: -1 is outside"):
        load(checkout, {"num_steps": -1})
    with pytest.raises(UserError, match=r"^num_warmup_steps: 10 leaves none of num_steps=5"):
        load(checkout, {"num_steps": 5})
    with pytest.raises(UserError, match=r"mine.yaml: num_steps: -1 is outside"):
        load(checkout, {"seed": 1}, base={"num_steps": -1})


def test_unknown_study_is_refused_with_the_nearest_name(checkout: Path) -> None:
    write_study(checkout, "quick")
    write_study(checkout, "smoke")
    assert study_names() == ["quick", "smoke"]
    with pytest.raises(UserError, match=r"^STUDY: 'smok' .*mean 'smoke'\?\); .*pipelines/studies'"):
        load_study("smok")
    with pytest.raises(UserError, match=r"^STUDY: 'other' is no study; choose a file of .*--list"):
        load_study("other")
    write_study(checkout, "a{b}")
    with pytest.raises(UserError, match=r"^STUDY: 'a\{b\}' cannot be run with braces .*; rename '"):
        load_study("a{b}")


def test_invalid_override_is_refused(checkout: Path) -> None:
    with pytest.raises(UserError, match="unknown parameter 'steps'"):
        load(checkout, {"steps": 3})


def test_time_is_shared_among_gpus_but_never_below_one_run(checkout: Path) -> None:
    study = load(checkout, factors={"num_gpus": [1, 2, 4]}, seeds=[0, 1], minutes_per_run=3)
    runs = list(study.runs)
    assert estimated_minutes(runs, num_slots=7) == 6.0
    assert estimated_minutes(runs, num_slots=100) == 3.0
    assert estimated_minutes([], num_slots=1) == 0.0


def test_checkout_is_found_from_a_folder_below(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = checkout / "notebooks" / "deep"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert project_root() == checkout
    assert studies_dir() == checkout / "pipelines" / "studies"
    assert results_dir() == checkout / "results"


def test_outside_a_checkout_results_appear_where_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert results_dir() == tmp_path / "results"
    with pytest.raises(UserError, match=r"^STUDY: there are none in '.*'; run in a check"):
        load_study("smoke")


def test_what_is_written_before_the_runs_is_kept(checkout: Path) -> None:
    study = load(checkout, margin_pct=1, expectation="Nothing.\n")
    assert (study.margin_pct, study.expectation) == (1.0, "Nothing.")
    assert (load(checkout).margin_pct, load(checkout).expectation) == (0.25, "")


def test_a_judgement_is_what_the_file_states(checkout: Path) -> None:
    write_study(checkout, "wide", margin_pct=2, expectation="Equal.", speed_only=True)
    assert judgement_of("wide") == {
        "margin_pct": 2.0,
        "speed_only": True,
        "expectation": "Equal.",
        "question": "Does it?",
    }
    write_study(checkout, "silent")
    silent = judgement_of("silent")
    assert (silent["margin_pct"], silent["speed_only"], silent["expectation"]) == (0.25, False, "")
    assert judgement_of("adhoc") == {}
    write_study(checkout, "wrong", margin_pct=-2)
    with pytest.raises(UserError, match=r"wrong.yaml: margin_pct: -2 is outside"):
        judgement_of("wrong")
