"""Render the real report against synthetic records."""

import re
from pathlib import Path

import pytest

from fp8study.report import loss_sentences, sentences
from fp8study.report import page as pages
from tests.factories import (
    make_attribution,
    make_broken,
    make_document_a,
    make_effective_batch,
    make_quick,
    make_record,
    make_smoke,
    store,
    store_trained,
)
from tests.instrument_factories import make_instruments
from tests.noise_factories import make_noise

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "report"
NAMES = (
    "index",
    "performance",
    "quality",
    "attribution",
    "precision-noise",
    "instruments",
    "methods",
)
STALE = "stale optimizer (78.4 % of parameters not trained)"


@pytest.mark.parametrize(
    ("unseen_gap", "epochs", "is_said"),
    [(0.0, 5.0, True), (0.1, 5.0, False), (-0.1, 5.0, False), (0.0, 0.5, False)],
)
def test_a_training_loss_alone_is_called_so_on_repeated_text(
    unseen_gap: float, epochs: float, is_said: bool, tmp_path: Path
) -> None:
    for seed in range(3):
        for precision in ("bf16", "fp8_rowwise"):
            worse = precision != "bf16"
            losses = {
                "loss_last20_mean": 2.0 + seed + (0.1 + seed / 1000) * worse,
                "validation_loss": 3.0 + seed + (unseen_gap + seed / 1000) * worse,
            }
            record = make_record(
                precision=precision, seed=seed, results=losses, data={"epochs": epochs},
                validation_sequences=8,
            )  # fmt: skip
            store(tmp_path, "local", record)
    report = pages.load_report(tmp_path)
    said = loss_sentences.validation_summary(report)
    assert ("on text seen before FP8 is behind" in said) == is_said
    assert ("1 equivalent" in said) == (unseen_gap == 0.0)
    assert ("1 different" in said) == (unseen_gap != 0.0)
    assert ("(FP8 is better in 1)" in said) == (unseen_gap < 0)
    on_training = loss_sentences.loss_summary(report)
    assert ("trained on its text 5.0 times over" in on_training) == (epochs > 1)


def plain(page: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


@pytest.mark.slow
def test_report_renders_without_torch_and_network(site: dict[str, str]) -> None:
    assert site.keys() == set(NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_page_has_no_python_leftovers(site: dict[str, str], name: str) -> None:
    text = plain(site[name])
    for leftover in ("Traceback", "<NA>", "&lt;NA&gt;", " nan ", "None ", "Axes", "@fig", "@tbl"):
        assert leftover not in text, leftover


@pytest.mark.slow
@pytest.mark.parametrize("name", ["performance", "quality", "attribution"])
def test_stale_run_is_labelled_on_every_page(site: dict[str, str], name: str) -> None:
    assert STALE in plain(site[name])


@pytest.mark.slow
def test_answer_is_computed(site: dict[str, str]) -> None:
    text = plain(site["index"])
    # One more sits near the memory limit of one GPU.
    assert "Compiled, FP8 was faster than BF16 in 17 and slower in 3 of 20 comparisons" in text
    assert "Not compiled, FP8 was faster than BF16 in 2 and slower in 0 of 2 comparisons" in text
    assert "1 not compared, where memory was nearly full" in text
    assert "+20.0 % (" in text
    assert "the stale optimizer made the failure" in text


@pytest.mark.slow
def test_failed_runs_and_their_reasons_are_shown(site: dict[str, str]) -> None:
    for status in ("failed", "interrupted", "out_of_memory", "diverged"):
        assert f"synthetic: {status} | with a bar" in plain(site["methods"])


@pytest.mark.slow
def test_every_image_has_an_alternative(site: dict[str, str]) -> None:
    images = re.findall(r"<img[^>]*>", "".join(site.values()))
    assert len(images) == 13
    assert all(re.search(r'alt="[^"]{40,}"', image) for image in images)


def run_cells(page: str) -> str:
    """Run the cells of a page in this process and return what they would show, as text."""
    text = (REPORT / f"{page}.qmd").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    shown = []
    for cell in re.findall(r"```\{python\}\n(.*?)```", text, flags=re.DOTALL):
        code = "\n".join(line for line in cell.splitlines() if not line.startswith("#|"))
        if code.startswith("from"):
            exec(code, names)
            continue
        value = eval(f"({code})", names)
        texts = [t.get_text() for t in getattr(value, "texts", [])]
        shown += [str(getattr(value, "data", "")), *texts]
    return plain("\n".join(shown))


@pytest.mark.parametrize("page", NAMES)
@pytest.mark.parametrize(
    "make",
    [
        make_quick,
        make_document_a,
        make_attribution,
        make_effective_batch,
        make_instruments,
        make_noise,
        make_smoke,
        make_broken,
    ],
)
def test_page_stands_on_any_subset(
    page: str, make: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path)  # type: ignore[operator]
    monkeypatch.setenv(pages.RESULTS_VARIABLE, str(tmp_path))
    monkeypatch.chdir(REPORT)
    assert run_cells(page)


@pytest.mark.parametrize("page", NAMES)
def test_page_says_what_to_run_when_there_is_nothing(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(pages.RESULTS_VARIABLE, str(tmp_path))
    monkeypatch.chdir(REPORT)
    text = run_cells(page).replace("`", "")
    assert "run make reproduce STUDY=" in text
    assert re.search("No GPU records (here )?yet|no records yet", text)


def test_cpu_runs_alone_claim_no_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_smoke(tmp_path)
    monkeypatch.setenv(pages.RESULTS_VARIABLE, str(tmp_path))
    monkeypatch.chdir(REPORT)
    text = "".join(run_cells(page) for page in NAMES)
    assert "faster" not in text
    assert "slower" not in text
    assert "tokens/s" not in text
    assert "No GPU records yet" in text


@pytest.mark.parametrize(
    ("healthy_end", "words"),
    [
        (5.41, "the stale optimizer made the failure"),
        (7.0, "made most of the failure"),
        (9.9, "does not explain the failure"),
    ],
)
def test_document_a_sentence_follows_the_losses(
    healthy_end: float, words: str, tmp_path: Path
) -> None:
    common = {"study": "document-a", "num_steps": 200}
    fp8 = {"precision": "fp8_tensorwise"}
    store_trained(tmp_path, "local", 5.4, **common)
    store_trained(tmp_path, "local", healthy_end, **common, **fp8)
    stale = make_record(
        optimizer_binding="before_conversion", results={"loss_last20_mean": 10.0}, **common, **fp8
    )
    stale.model["parameters_outside_optimizer_pct"] = 78.4
    store(tmp_path, "local", stale)
    text = sentences.document_a(pages.load_report(tmp_path))
    assert words in text
    assert "78.4 %" in text


def test_slower_fp8_is_called_slower(tmp_path: Path) -> None:
    store(tmp_path, "local", make_record())
    store(tmp_path, "local", make_record(precision="fp8_rowwise"))
    report = pages.load_report(tmp_path)
    assert "faster than BF16 in 0 and slower in 1 of 1 comparison" in sentences.speed_summary(
        report
    )
    told = sentences.speed_details(report)
    assert "\u221210.0 % (1 GPU, batch 1) against BF16 in 1 comparison" in told


def test_the_ends_of_a_range_say_where_they_were_measured(tmp_path: Path) -> None:
    for gpus, rate in ((1, 9_000.0), (4, 12_000.0)):
        for precision, speed in (("bf16", 10_000.0), ("fp8_rowwise", rate)):
            results = {"tokens_per_second_per_gpu": speed}
            record = make_record(
                precision=precision, results=results, num_gpus=gpus, strategy="fsdp2"
            )
            store(tmp_path, "local", record)
    told = sentences.speed_details(pages.load_report(tmp_path))
    assert "\u221210.0 % (1 GPU, batch 1) to +20.0 % (4 GPUs, batch 1) against BF16 in 2" in told


def test_corrupt_record_is_named(tmp_path: Path) -> None:
    run_dir = store(tmp_path, "reference/box", make_record())
    (run_dir / "run.json").write_text("{")
    report = pages.load_report(tmp_path)
    assert report.runs.empty
    assert "not a run record" in sentences.unreadable(report)


def test_every_unreadable_record_is_named_on_every_reading(tmp_path: Path) -> None:
    texts = {"corrupt": "{", "newer": '{"schema_version": 3}', "aside": None}
    for name, text in texts.items():
        run_dir = store(tmp_path, "local", make_record(run_id=name))
        if text is None:
            (run_dir / "run.json").rename(run_dir / "run.corrupt1.json")
        else:
            (run_dir / "run.json").write_text(text)
    for _ in range(2):
        text = sentences.unreadable(pages.load_report(tmp_path))
        assert "corrupt/run.json: not a run record" in text
        assert "newer/run.json: schema" in text
        assert "set aside" in text
        assert "aside/run.corrupt1.json" in text


def test_results_folder_is_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(pages.RESULTS_VARIABLE, raising=False)
    (tmp_path / "results").mkdir()
    (tmp_path / "report").mkdir()
    assert pages.find_results(tmp_path / "report") == tmp_path / "results"


def test_named_results_folder_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(pages.RESULTS_VARIABLE, str(tmp_path / "missing"))
    with pytest.raises(pages.UserError, match=pages.RESULTS_VARIABLE):
        pages.find_results()


def test_page_types_no_training_number() -> None:
    """A measured number in the prose would outlive its record."""
    for page in NAMES:
        text = (REPORT / f"{page}.qmd").read_text(encoding="utf-8")
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        found = re.findall(r"\d[\d,.]*\s*(?:tokens/s|TFLOP/s|GiB|nats)", prose)
        assert not found, (page, found)


@pytest.mark.slow
def test_attribution_says_what_its_records_say(site: dict[str, str]) -> None:
    text = plain(site["attribution"])
    assert "study attribution on h200x8" in text
    assert "The stale optimizer is nearly all of it (99.9 %)" in text
    assert "planted (78.4 % of parameters not trained)" in plain(site["performance"])
    assert "So the fault makes the failure, whatever the precision." in text
    assert "% of the stale FP8 run" in text
    assert "7 equivalent, 0 different, 0 undecided" in text
    assert "No run was done again with its seed: run make reproduce STUDY=loss-parity" in text
    assert "Not measured there" not in text


@pytest.mark.parametrize("make", [make_attribution, make_document_a])
def test_attribution_says_which_parts_are_missing(
    make: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path)  # type: ignore[operator]
    monkeypatch.setenv(pages.RESULTS_VARIABLE, str(tmp_path))
    monkeypatch.chdir(REPORT)
    text = run_cells("attribution").replace("`", "")
    _, _, missing = text.partition("Not measured there:")
    assert ("FP8 itself, rowwise (BF16 masters)" in missing) == (make is make_document_a)
    assert "run make reproduce STUDY=effective-batch" in text
    if make is make_document_a:
        assert "run make reproduce STUDY=attribution" in text


@pytest.mark.slow
def test_noise_page_answers_from_its_records(site: dict[str, str]) -> None:
    text = plain(site["precision-noise"])
    assert "2 points of training, 1 recipe, 2 seeds). The two would be equal at" in text
    assert "2 of 2 lie where 95 % of random orders do" in text
    assert "8 sequences of 10 tokens a point, at most 50 steps" in text
    assert "emulated in all of these runs" not in text
