import itertools
from pathlib import Path
from typing import Any

import pytest

from fp8study.analysis.losses import loss_gap_table
from fp8study.analysis.speed import switch_table
from fp8study.core.config import RunConfig
from fp8study.report import speed_rows
from tests.factories import make_record, store
from tests.table_factories import frame


def _store(results: Path, name: str, seed: int, rate: float, loss: float, **values: Any) -> None:
    measured = {"tokens_per_second_per_gpu": rate, "loss_last20_mean": loss,
                "memory_peak_gib": rate / 1000}  # fmt: skip
    kept = ("judgement", "machine", "status", "study", "versions")
    told = {name: values.pop(name) for name in kept if name in values}
    told["results"] = measured | values.pop("more", {})
    record = make_record(run_id=f"{name}-{seed}", seed=seed, **told)
    chosen = {k: v for k, v in record.config.items() if k not in values} | values
    record.config.clear()
    record.config.update(RunConfig(**{k: _plain(v) for k, v in chosen.items()}).to_dict())
    store(results, "local", record)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def table_of(results: Path) -> Any:
    return switch_table(frame(results))


def test_switches_are_held_against_the_plain_path_by_seed(tmp_path: Path) -> None:
    for seed in range(3):
        _store(tmp_path, "plain", seed, 10_000, 5.0 + seed)
        _store(tmp_path, "head", seed, 10_500, 5.0 + seed, loss_head="chunked")
        _store(tmp_path, "tuned", seed, 12_000, 5.1 + seed, path="tuned", strategy="none")
        # Without FSDP2 it is a switch's arm too: the documents have FSDP2.
        _store(tmp_path, "none", seed, 11_000, 5.0 + seed, strategy="none")
        _store(tmp_path, "fp8", seed, 99_000, 5.0 + seed, precision="fp8_rowwise", path="tuned")
    table = table_of(tmp_path).set_index("gain_pct")
    assert sorted(table.index) == pytest.approx([5, 10, 20])  # FP8 has no plain run of its own
    head, tuned = table.loc[table.index < 6].iloc[0], table.loc[table.index > 19].iloc[0]
    assert (head["num_pairs"], head["verdict"]) == (3, "equivalent")
    assert tuned["verdict"] == "different"
    assert tuned["loss_gap_pct"] == pytest.approx(100 * (0.1 / 5 + 0.1 / 6 + 0.1 / 7) / 3)
    assert tuned["memory_change_pct"] == pytest.approx(20)
    assert tuned["setting"] == "not sharded, tuned"
    assert "FSDP2" in tuned["setting_plain"]


def test_seeds_that_are_left_of_a_divergence_are_not_judged(tmp_path: Path) -> None:
    for seed in range(4):
        end = "diverged" if seed == 3 else "completed"
        _store(tmp_path, "plain", seed, 10_000, 5.0 + seed)
        _store(tmp_path, "tuned", seed, 12_000, 5.0 + seed, path="tuned", status=end)
    row = table_of(tmp_path).iloc[0]
    assert (row["num_pairs"], row["loss_gap_pct"], row["verdict"]) == (3, 0, "diverged")


def test_switches_of_the_tuned_path_are_held_against_it_where_there_is_no_plain_one(
    tmp_path: Path,
) -> None:
    for seed in range(3):
        _store(tmp_path, "tuned", seed, 10_000, 5.0 + seed, path="tuned")
        _store(tmp_path, "one", seed, 10_300, 5.0 + seed, path="tuned", attention_mask="checked")
    (row,) = table_of(tmp_path).to_dict("records")
    assert (row["num_pairs"], row["verdict"]) == (3, "equivalent")
    assert row["gain_pct"] == pytest.approx(3)
    assert row["setting"] == "masks checked"
    assert "tuned" in row["setting_plain"]


def test_where_all_arms_have_switches_the_one_of_fewest_is_the_measure(tmp_path: Path) -> None:
    kept = {"path": "tuned", "attention_mask": "checked"}
    _store(tmp_path, "base", 0, 10_000, 5.0, **kept)
    _store(tmp_path, "more", 0, 10_400, 5.0, **kept, allocator="default")
    (row,) = table_of(tmp_path).to_dict("records")
    assert row["gain_pct"] == pytest.approx(4)
    assert row["setting"] == "default allocator"
    assert "masks checked" in row["setting_plain"]


def test_a_run_short_of_memory_gives_no_gain(tmp_path: Path) -> None:
    _store(tmp_path, "plain", 0, 10_000, 5.0, more={"num_alloc_retries": 3})
    _store(tmp_path, "tuned", 0, 20_000, 5.0, path="tuned")
    row = table_of(tmp_path).iloc[0]
    assert row["gain_pct"] != row["gain_pct"]
    assert row["tokens_per_second_per_gpu"] == 20_000
    assert row["verdict"] == "undecided"


def test_a_repeat_short_of_memory_leaves_the_gain_to_the_others(tmp_path: Path) -> None:
    for repeat, (rate, retries) in enumerate(((12_000, 0), (5_000, 3), (12_000, 0))):
        _store(tmp_path, f"plain{repeat}", 0, 10_000, 5.0, repeat=repeat)
        _store(tmp_path, f"tuned{repeat}", 0, rate, 5.0, path="tuned", repeat=repeat,
               more={"num_alloc_retries": retries})  # fmt: skip
    row = table_of(tmp_path).iloc[0]
    assert (row["gain_pct"], row["num_runs"]) == (pytest.approx(20), 3)


def test_shards_short_of_memory_leave_the_comparison_to_the_unsharded(tmp_path: Path) -> None:
    _store(tmp_path, "sharded", 0, 7_000, 5.0, more={"num_alloc_retries": 3})
    _store(tmp_path, "none", 0, 10_000, 5.0, strategy="none")
    _store(tmp_path, "tuned", 0, 12_000, 5.0, strategy="none", path="tuned")
    table = table_of(tmp_path).set_index("setting")
    assert table.loc["tuned", "gain_pct"] == pytest.approx(20)
    assert table.loc["FSDP2", "gain_pct"] != table.loc["FSDP2", "gain_pct"]
    assert set(table["setting_plain"].str.split(",").str[0]) == {"not sharded"}


def test_losses_of_a_study_of_speed_say_nothing(tmp_path: Path) -> None:
    speed = {"margin_pct": 0.25, "speed_only": True}
    for path in ("plain", "tuned"):
        _store(tmp_path, path, 0, 10_000, 5.0, path=path, more={}, judgement=speed)
    row = table_of(tmp_path).iloc[0]
    assert row[["loss_gap_pct", "verdict"]].isna().all()
    pair = {"study": "bench", "judgement": speed, "results": {"loss_last20_mean": 3.0}}
    store(tmp_path, "local", make_record(run_id="bf16", **pair))
    store(tmp_path, "local", make_record(run_id="fp8", precision="fp8_rowwise", **pair))
    assert loss_gap_table(frame(tmp_path)).empty


def test_repeats_count_for_speed_and_once_for_the_loss(tmp_path: Path) -> None:
    for repeat in range(3):
        _store(tmp_path, f"plain{repeat}", 0, 10_000, 5.0, repeat=repeat)
        _store(tmp_path, f"tuned{repeat}", 0, 10_000 + 1000 * repeat, 5.0, path="tuned",
               repeat=repeat)  # fmt: skip
    row = table_of(tmp_path).iloc[0]
    gain = 100 * ((1.0 * 1.1 * 1.2) ** (1 / 3) - 1)
    assert (row["num_runs"], row["num_pairs"], row["gain_pct"]) == (3, 1, pytest.approx(gain))


def test_a_gain_is_of_runs_that_shared_a_repeat(tmp_path: Path):
    for repeat, rate in enumerate((10_000, 8_000, 9_000)):  # the last has no partner
        _store(tmp_path, f"plain{repeat}", 0, rate, 5.0, repeat=repeat)
        if repeat < 2:
            _store(tmp_path, f"tuned{repeat}", 0, 1.1 * rate, 5.0, path="tuned", repeat=repeat)
    row = table_of(tmp_path).iloc[0]
    assert (row["num_runs"], row["gain_pct"]) == (2, pytest.approx(10))


def test_a_gain_is_of_runs_of_one_session(tmp_path: Path):
    """A study goes on where it stopped, on another box perhaps."""
    for repeat, (box, late, gain) in enumerate([("a", "a", 1.1), ("a", "b", 1.5)]):
        for path, host, rate in (("plain", box, 10_000), ("tuned", late, gain * 10_000)):
            _store(tmp_path, f"{path}{repeat}", 0, rate, 5.0, path=path, repeat=repeat,
                   machine={"host_hash": host})  # fmt: skip
    assert table_of(tmp_path)["gain_pct"].tolist() == [pytest.approx(10)]


def test_a_further_session_of_a_study_is_the_same_row(tmp_path: Path):
    """Its gain is the mean over sessions, however many blocks each has, and none is the last."""
    for study, box, gains in (("quick", "a", (1.10, 1.10, 1.10)), ("quick-2", "b", (1.20,))):
        for repeat, gain in enumerate(gains):
            for path, times in (("plain", 1), ("tuned", gain)):
                _store(tmp_path, f"{path}{repeat}", 0, 10_000 * times, 5 * times, path=path,
                       repeat=repeat, study=study, machine={"host_hash": box})  # fmt: skip
    (row,) = table_of(tmp_path).to_dict("records")
    assert row["study"] == "quick" and (row["num_blocks"], row["num_sessions"]) == (4, 2)
    assert row["gain_pct"] == pytest.approx(100 * ((1.1 * 1.2) ** 0.5 - 1))
    assert row["gain_low_95"] < 0 and row["gain_high_95"] > 50  # two sessions tell little
    assert row["sessions"].count("+10.0 %") == row["sessions"].count("+20.0 %") == 1
    # A seed that was run again on another box is no further seed.
    assert (row["num_pairs"], row["loss_gap_pct"]) == (1, pytest.approx(15))


@pytest.mark.parametrize(
    ("margins", "verdict"), [((2.0,), "equivalent"), ((2.0, 3.0), "undecided")]
)
def test_sessions_are_judged_by_the_margin_that_all_state(
    margins: tuple[float, ...], verdict: str, tmp_path: Path
) -> None:
    """One that asks for speed alone has no part in it, and keeps the others from no verdict."""
    stated: list[dict[str, Any]] = [{"speed_only": True}, *({"margin_pct": of} for of in margins)]
    for study, judgement in zip(("quick", "quick-2", "quick-3"), stated, strict=False):
        for seed, path in itertools.product(range(3), ("plain", "tuned")):
            loss = (5.0 + seed) * (1.01 if path == "tuned" else 1)
            _store(tmp_path, path, seed, 10_000, loss, path=path, study=study, judgement=judgement)
    (row,) = table_of(tmp_path).to_dict("records")
    assert (row["num_pairs"], row["loss_gap_pct"]) == (3, pytest.approx(1))
    assert row["verdict"] == verdict


def test_blocks_of_one_session_give_a_gain_its_interval(tmp_path: Path):
    for repeat, gain in enumerate((1.09, 1.10, 1.11)):
        _store(tmp_path, f"plain{repeat}", 0, 10_000, 5.0, repeat=repeat)
        _store(tmp_path, f"tuned{repeat}", 0, gain * 10_000, 5.0, path="tuned", repeat=repeat)
    (row,) = table_of(tmp_path).to_dict("records")
    assert row["num_sessions"] == 1
    assert 7 < row["gain_low_95"] < row["gain_pct"] < row["gain_high_95"] < 13
    (shown,) = speed_rows.gains(table_of(tmp_path)).to_dict("records")
    assert shown["ci"].startswith("+7.") and shown["recipe"] == "BF16"
    alone = tmp_path / "alone"
    _store(alone, "plain", 0, 10_000, 5.0)
    _store(alone, "tuned", 0, 11_000, 5.0, path="tuned")
    (row,) = table_of(alone).to_dict("records")
    assert row["gain_low_95"] != row["gain_low_95"]
    assert speed_rows.gains(table_of(alone)).empty  # one block may say anything


def test_a_session_of_another_version_is_a_row_of_its_own(tmp_path: Path):
    """Nothing says that its plain path is as fast."""
    for study, versions in (("quick", "0.17.0"), ("quick-2", "0.18.0")):
        for path, rate in (("plain", 10_000), ("tuned", 11_000)):
            _store(tmp_path, path, 0, rate, 5.0, path=path, study=study, precision="fp8_rowwise",
                   versions={"torchao": versions})  # fmt: skip
    assert table_of(tmp_path)["num_blocks"].tolist() == [1, 1]


def test_shards_are_not_compared_with_replicas(tmp_path: Path) -> None:
    _store(tmp_path, "plain", 0, 10_000, 5.0, num_gpus=2)
    _store(tmp_path, "ddp", 0, 20_000, 5.0, num_gpus=2, strategy="ddp", path="tuned")
    assert table_of(tmp_path).empty
