"""The studies of this repository."""

from collections import Counter
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest

from fp8study.core.presets import PRESETS
from fp8study.core.studies import Study, load_study
from tests.checkout import ROOT


def shipped(name: str, monkeypatch: pytest.MonkeyPatch) -> Study:
    monkeypatch.chdir(ROOT)
    return load_study(name)


@pytest.mark.parametrize("name", ["attribution", "corner-arms"])
def test_the_planted_fault_loses_what_the_stale_run_loses(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerate converts all linear layers but the first and the last: the plants must match."""
    for model in {run.config.model for run in shipped(name, monkeypatch).runs}:
        num_layers = PRESETS[model]["num_hidden_layers"]
        parts = [f"self_attn.{name}_proj" for name in "qkvo"]
        parts += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
        linears = [f"model.layers.{n}.{part}" for n in range(num_layers) for part in parts]
        configs = [r.config for r in shipped(name, monkeypatch).runs if r.config.model == model]
        planted = {c.untrained for c in configs if c.untrained}
        skip = {c.skip for c in configs}
        assert len(planted) == len(skip) == 1
        left_out = [n for n in linears if any(fnmatchcase(n, p) for p in next(iter(planted)))]
        assert left_out == [n for n in linears if n not in next(iter(skip))]


def test_the_attribution_is_affordable_and_pairs_every_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    study = shipped("attribution", monkeypatch)
    assert len(study.runs) <= 50
    arms = [replace(run.config, seed=0) for run in study.runs]
    assert set(Counter(arms).values()) == {5}


def test_the_effective_batch_study_fits_four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = shipped("effective-batch", monkeypatch).runs
    assert {run.config.sequences_per_step for run in runs} == {1, 2, 4, 8}
    assert max(run.config.num_gpus for run in runs) == 4


def test_loss_parity_repeats_bf16_for_a_control(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = [run.config for run in shipped("loss-parity", monkeypatch).runs]
    repeats = [c for c in configs if c.repeat == 1]
    assert {c.precision for c in repeats} == {"bf16"}
    assert all(replace(c, repeat=0) in configs for c in repeats)


@pytest.mark.parametrize(
    ("first", "second", "recipes"),
    [
        ("bf16-start", "continue-in-fp8", {"bf16", "fp8_tensorwise", "fp8_rowwise"}),
        ("bf16-start-3b", "continue-3b", {"bf16", "fp8_tensorwise"}),
        ("bf16-start-8b", "continue-8b", {"bf16", "fp8_tensorwise"}),
    ],
)
def test_what_goes_on_starts_from_what_a_bf16_start_leaves(
    first: str, second: str, recipes: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (start,) = shipped(first, monkeypatch).runs
    configs = [run.config for run in shipped(second, monkeypatch).runs]
    assert {c.init_from for c in configs} == {f"results/local/{first}/{start.run_id}"}
    assert start.config.checkpoint_every == start.config.num_steps
    assert {c.precision for c in configs} == recipes
    for field in ("model", "corpus", "tokenizer", "sequence_length", "validation_sequences"):
        assert {getattr(c, field) for c in configs} == {getattr(start.config, field)}, field
