"""The planted fault: the optimizer holds the complement, no more and no less."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8study.analysis.losses import loss_gap_table
from fp8study.analysis.runs.frames import runs_frame
from fp8study.analysis.runs.naming import arm_label
from fp8study.analysis.speed import throughput_table
from fp8study.core.audit_rules import audit_text, cautions, problems
from fp8study.core.config import RunConfig, make_config
from fp8study.core.errors import UserError
from fp8study.core.records import RunRecord, StoredRun
from fp8study.measure.audit import FirstStepAudit, conversion
from fp8study.model.build import build_model
from fp8study.model.updates import trained_parameters, untrained_weights
from tests.factories import make_record

ALL_BUT_FIRST_AND_LAST = [
    "model.layers.0.self_attn.[kvo]_proj", "model.layers.0.mlp.*", "model.layers.[1-9]*",
]  # fmt: skip


def config(*untrained: str, **changes: Any) -> RunConfig:
    return make_config({"model": "tiny-llama", "untrained": list(untrained)} | changes)


def tiny() -> torch.nn.Module:
    return build_model("tiny-llama", torch.float32, torch.device("cpu"), seed=0)


def test_the_optimizer_gets_exactly_the_complement() -> None:
    model, run = tiny(), config(*ALL_BUT_FIRST_AND_LAST)
    left_out = {id(weight) for weight in untrained_weights(run, model)}
    names = {name for name, p in model.named_parameters() if id(p) in left_out}
    linear = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert names == linear - {"model.layers.0.self_attn.q_proj.weight", "lm_head.weight"}
    held = {id(p) for p in trained_parameters(run, model)}
    assert held | left_out == {id(p) for p in model.parameters()}
    assert not held & left_out


def test_without_a_pattern_everything_is_trained() -> None:
    model = tiny()
    assert trained_parameters(config(), model) == list(model.parameters())


def test_names_do_not_depend_on_the_wrapper() -> None:
    model = tiny()
    wrapped = torch.nn.Module()
    wrapped.add_module("module", model)  # as DDP does
    run = config("lm_head")
    (bare,), (inside,) = untrained_weights(run, model), untrained_weights(run, wrapped)
    assert bare is inside


@pytest.mark.parametrize("pattern", ["lm_haed", "model.norm", "model.embed_tokens"])
def test_a_pattern_that_names_no_linear_layer_is_refused(pattern: str) -> None:
    with pytest.raises(UserError, match=rf"^untrained: '{pattern}' matches no linear layer"):
        trained_parameters(config(pattern), tiny())


def test_it_cannot_be_mixed_with_a_stale_optimizer() -> None:
    with pytest.raises(UserError, match=r"^untrained: lm_head .* use after_conversion"):
        config("lm_head", optimizer_binding="before_conversion")


def first_step(run: RunConfig, asked_for: RunConfig) -> dict[str, Any]:
    """Audit a step whose optimizer follows `run`, by what `asked_for` says."""
    model = tiny()
    optimizer = torch.optim.AdamW(trained_parameters(run, model), lr=1e-3)
    ids = torch.randint(0, 2048, (2, 32), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, labels=ids).loss.backward()
    audit = FirstStepAudit(model, optimizer, untrained_weights(asked_for, model))
    audit.before()
    audit.gradients_ready(model.parameters())
    optimizer.step()
    return conversion(model, asked_for) | audit.after()


def test_the_audit_counts_what_was_asked_for_and_finds_nothing() -> None:
    run = config(*ALL_BUT_FIRST_AND_LAST)
    audit = first_step(run, run)
    assert audit["num_planted"] == 27
    assert problems(audit) == cautions(audit) == []
    assert audit["stalled_pct"] < 1  # of what can move
    assert "27 weights left out of the optimizer on purpose" in audit_text(audit)
    assert "healthy" not in audit_text(audit)


def test_a_share_of_weights_names_those_that_are_trained() -> None:
    run = config(*ALL_BUT_FIRST_AND_LAST)
    audit, healthy = first_step(run, run), first_step(config(), config())
    share = "% of the weights that are trained changed in the first step"
    assert share in audit_text(audit)
    assert "% of the weights changed in the first step" in audit_text(healthy)
    phase = {"precision": "bf16", "step": 3, "num_linear_fp8": 0, "stalled_pct": 0.0}
    later = audit_text(audit | {"phases": [phase]})
    assert "% of the weights that are trained changed in its first step" in later
    (caution,) = cautions(audit | {"stalled_pct": 90.0})
    assert caution.startswith("90 % of the weights that are trained did not change")


def test_the_audit_finds_what_was_not_asked_for() -> None:
    run = config(*ALL_BUT_FIRST_AND_LAST)
    unasked = problems(first_step(run, config()))
    assert "27 of 39 trainable parameters are not in the optimizer" in unasked[0]
    more_than_asked = problems(first_step(run, config("model.layers.[1-9]*")))
    assert "6 of 39 trainable parameters are not in the optimizer" in more_than_asked[0]
    less_than_asked = first_step(config("model.layers.[1-9]*"), run)
    assert less_than_asked["num_planted"] == 21


def planted_record(precision: str = "bf16") -> RunRecord:
    return make_record(78.4, precision=precision, untrained=["model.layers.*"])


def stored(*records: RunRecord, tmp: Any) -> Any:
    return runs_frame([StoredRun(record, tmp, "local") for record in records])


def test_a_planted_run_says_so_wherever_a_stale_one_does(tmp_path: Any) -> None:
    record = planted_record()
    assert arm_label(record) == "BF16, planted (78.4 % of parameters not trained)"
    del record.model["parameters_outside_optimizer_pct"]
    assert "planted (share of parameters not trained unknown)" in arm_label(record)
    runs = stored(planted_record(), tmp=tmp_path)
    assert runs["stale"].all()
    assert runs["planted"].all()


@pytest.mark.parametrize("precision", ["bf16", "fp8_tensorwise"])
def test_its_speed_and_loss_are_compared_with_nothing(precision: str, tmp_path: Any) -> None:
    healthy = [make_record(), make_record(precision="fp8_tensorwise")]
    runs = stored(*healthy, planted_record(precision), tmp=tmp_path)
    speed = throughput_table(runs)
    planted = speed[speed["stale"]]
    assert len(planted) == 1
    assert planted["speedup_pct"].isna().all()
    assert planted["note"].str.contains("does less work per step").all()
    assert not loss_gap_table(runs)["stale"].any()
    # A planted BF16 run is no baseline either.
    alone = stored(planted_record(), make_record(precision="fp8_tensorwise"), tmp=tmp_path)
    assert throughput_table(alone)["speedup_pct"].isna().all()
