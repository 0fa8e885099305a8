"""What a study says of its losses when its runs have ended."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fp8study.analysis.matched import LEAST_POINTS
from fp8study.core.records import RunRecord
from fp8study.report.study_text import losses_text
from tests.factories import make_record


def text(*records: RunRecord | None) -> str:
    runs: list[Any] = [SimpleNamespace(run_dir=None) for _ in records]
    return losses_text(zip(runs, records, strict=True))


def pairs(number: int, gap: float, **changes: Any) -> list[RunRecord]:
    return [
        make_record(
            precision=precision, seed=seed, validation_sequences=8, **changes,
            results={"loss_last20_mean": 5 * worse, "validation_loss": 6.0 * worse},
        )
        for seed in range(number)
        for precision, worse in (("bf16", 1.0), ("fp8_tensorwise", 1 + gap * (1 + seed / 10)))
    ]  # fmt: skip


def test_the_verdict_is_told_with_its_interval_and_on_unseen_text() -> None:
    title, line = text(*pairs(3, 0.01)).splitlines()
    assert title.startswith("Losses, FP8 against BF16: llama-3.2-1b, 1 GPU, ")
    assert line.startswith(
        "  FP8 tensorwise: different at ±0.25 %, +1.10 % (90 % CI +0.93 to +1.27"
    )
    assert line.endswith(", 3 seeds); on unseen text different, +1.10 %")
    assert "equivalent at ±0.25 %, +0.00 %" in text(*pairs(3, 0.0))


def test_how_much_bf16_learnt_is_told_and_nothing_is_no_verdict() -> None:
    line = text(*pairs(3, 0.0, data={"unigram_loss": 6.25})).splitlines()[1]
    assert line.endswith("; BF16 20.0 % below the loss of token frequencies alone")
    assert text(*pairs(3, 0.0, data={"unigram_loss": 5.0})) == (
        "Losses: no verdict, as BF16 itself learnt little more than how often each token comes; "
        "raise learning_rate or num_steps."
    )

    other = pairs(3, 0.0, micro_batch_size=2, data={"unigram_loss": 5.0})
    both = text(*pairs(3, 0.0, data={"unigram_loss": 6.25}), *other).splitlines()
    assert len(both) == 3 and both[2].startswith("  no verdict on 1 arm, as BF16 itself learnt lit")
    assert "different" in text(*pairs(3, 0.01, data={"unigram_loss": 5.0}))


@pytest.mark.parametrize(("step_ms", "change"), [(80.0, "\u221220.0"), (125.0, "+25.0")])
def test_where_curves_tell_it_the_time_to_one_loss_is_told(
    step_ms: float, change: str, tmp_path: Path
) -> None:
    scored = [{"step": step, "loss": 8 - step / 8} for step in range(1, LEAST_POINTS + 1)]
    runs: list[Any] = []
    for record in pairs(3, 0.0):
        record.results["validation_losses"] = scored
        own = step_ms if record.config["precision"] != "bf16" else 100.0
        folder = tmp_path / f"{record.config['precision']}-{record.config['seed']}"
        folder.mkdir()
        lines = [{"step": step, "loss": 5.0, "step_time_ms": own} for step in range(1, 9)]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        runs.append((SimpleNamespace(run_dir=folder), record))
    said = f"+0.00 %; time to one loss there {change} % "
    _, line = losses_text(runs).splitlines()
    assert line.endswith(f"{said}(95 % CI {change} to {change})")
    (tmp_path / "bf16-0" / "metrics.jsonl").write_text("what nobody wrote\n[")
    _, line = losses_text(runs).splitlines()
    assert line.endswith(f"{said}(2 seeds)")
    runs[1][1].results["validation_losses"] = None
    runs[3][1].results["validation_losses"] = scored[1:]
    assert "time to one loss" in losses_text(runs) and "(1 seed)" in losses_text(runs)


def test_what_diverged_alone_is_told_without_a_gap() -> None:
    records = pairs(4, 0.0)
    records[-1] = dataclasses.replace(records[-1], status="diverged")
    assert text(*records).splitlines()[1] == "  FP8 tensorwise: diverged in 1 of 4 seeds"


def test_without_a_verdict_the_reason_is_told_and_speed_is_silent() -> None:
    assert text(*pairs(2, 0.0)) == "Losses: no verdict, as three seeds are the least."
    only_bf16 = [record for record in pairs(3, 0.0) if record.config["precision"] == "bf16"]
    assert text(*only_bf16) == "Losses: no verdict, as no FP8 run has a BF16 one beside it."
    none = "Losses: no verdict, as "
    diverged = [dataclasses.replace(record, status="diverged") for record in pairs(1, 0.0)]
    assert text(*diverged) == f"{none}BF16 diverged; lower learning_rate."
    bf16, fp8 = pairs(1, 0.0)
    fp8.data["corpus_sha256"] = "another"
    assert text(bf16, fp8).startswith(f"{none}FP8 and BF16 trained on different texts, as the ")
    bf16, fp8 = pairs(1, 0.0)
    bf16.model["config_sha256"], fp8.model["config_sha256"] = "one", "another"
    assert text(bf16, fp8).startswith(f"{none}FP8 and BF16 trained models of different shapes, as ")
    assert text(*pairs(3, 0.0, judgement={"speed_only": True})) == ""
    assert text(None, *pairs(1, 0.0, status="failed")) == ""
    assert text() == ""
