"""Render the real report against synthetic records."""

import json
import math
import re
from pathlib import Path

import pytest
import yaml

from fp8study.analysis.frames import cost_table
from fp8study.report import (
    cause_sentences,
    layouts,
    loss_sentences,
    method_sentences,
    rows,
    sentences,
    speed_rows,
    words,
)
from fp8study.report import page as pages
from fp8study.report.table import show
from scripts.count_words import count_words
from tests.analysis.test_leads import store_leads
from tests.factories import make_record, store
from tests.instrument_factories import make_instruments
from tests.noise_factories import make_noise
from tests.study_factories import (
    make_attribution,
    make_broken,
    make_document_a,
    make_effective_batch,
    make_quick,
    make_smoke,
    store_trained,
)

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "report"
NAMES = [Path(name).stem for name in
         yaml.safe_load((REPORT / "_quarto.yml").read_text())["project"]["render"]]  # fmt: skip
#: The pages that show something of the records.
MEASURED = [name for name in NAMES if "load_report" in (REPORT / f"{name}.qmd").read_text()]
STALE = "stale optimizer (78.4 % of parameters not trained)"


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
def test_stale_run_is_labelled_wherever_it_is_shown(site: dict[str, str]) -> None:
    assert STALE in plain(site["attribution"])
    for name in ("index", "performance", "quality"):
        assert "stale" not in plain(site[name])


@pytest.mark.slow
def test_answer_is_computed(site: dict[str, str]) -> None:
    text = plain(site["index"])
    assert "h200x8 (NVIDIA H200): " in text
    assert "+20.0 %" in text
    assert "measure more" in text
    # One sits near the memory limit of one GPU.
    assert "1 lead left out, memory nearly full" in text
    assert "What would a synthetic run decide?" in text
    assert "the stale optimizer made the failure" in plain(site["attribution"])


@pytest.mark.slow
def test_failed_runs_and_their_reasons_are_shown(site: dict[str, str]) -> None:
    for status in ("failed", "interrupted", "out_of_memory", "diverged"):
        assert f"synthetic: {status} | with a bar" in plain(site["runs"])


@pytest.mark.slow
def test_the_pages_are_short(site: dict[str, str]) -> None:
    """Half of what once stood there; the page of runs holds data."""
    pages = {name: count_words(page) for name, page in site.items() if name != "runs"}
    assert 3_000 < sum(text for text, _ in pages.values()) < 5_500
    assert max(text for text, _ in pages.values()) < 1_000


@pytest.mark.slow
def test_every_image_has_an_alternative(site: dict[str, str]) -> None:
    images = re.findall(r"<img[^>]*>", "".join(site.values()))
    assert len(images) >= 12
    assert all(re.search(r'alt="[^"]{40,}"', image) for image in images)


def run_cells(page: str) -> str:
    """Run the cells of a page in this process and return what they would show, as text."""
    text = (REPORT / f"{page}.qmd").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    shown = []
    for cell in re.findall(r"```\{python\}\n(.*?)```", text, flags=re.DOTALL):
        code = "\n".join(line for line in cell.splitlines() if not line.startswith("#|"))
        if code.startswith(("from", "for")):
            exec(code, names)
            continue
        value = eval(f"({code})", names)
        data = str(getattr(value, "data", ""))
        shown += [data, *re.findall(r' alt="([^"]*)"', data)]
    shown += [eval(code, names).data for code in re.findall(r"`\{python\} (Markdown[^`]*)`", text)]
    return plain("\n".join(shown))


@pytest.mark.parametrize("page", MEASURED)
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


@pytest.mark.parametrize("page", MEASURED)
def test_page_says_what_to_run_when_there_is_nothing(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(pages.RESULTS_VARIABLE, str(tmp_path))
    monkeypatch.chdir(REPORT)
    text = run_cells(page).replace("`", "")
    assert "run make reproduce" in text
    assert re.search("No GPU records (here )?yet|no records yet", text)


def test_cpu_runs_alone_claim_no_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_smoke(tmp_path)
    monkeypatch.setenv(pages.RESULTS_VARIABLE, str(tmp_path))
    monkeypatch.chdir(REPORT)
    text = "".join(run_cells(page) for page in NAMES)
    assert "No answer yet" in text
    assert "once its loss is checked" not in text and "so far)" not in text
    assert "tokens/s per GPU" not in text
    assert "No GPU records yet" in text


@pytest.mark.parametrize(
    ("healthy_end", "words"),
    [
        (5.41, "the stale optimizer made the failure"),
        (7.0, "made most of the failure"),
        (9.9, "does not explain it"),
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
    text = cause_sentences.document_a(pages.load_report(tmp_path))
    assert words in text
    assert "78.4 %" in text


def test_slower_fp8_is_left_alone(tmp_path: Path) -> None:
    store_leads(tmp_path, 1, 0.90, 0.91, 0.92)
    told = sentences.decide(pages.load_report(tmp_path))
    assert "Train llama-3.2-1b in BF16 (\u22129.0 %)." in told
    assert "in FP8" not in told


def test_the_decision_says_where_it_was_measured(tmp_path: Path) -> None:
    for gpus, leads in ((1, (0.90, 0.91, 0.92)), (2, (1.0, 1.1)), (4, (1.20, 1.21, 1.22))):
        store_leads(tmp_path, 1, *leads, num_gpus=gpus)
    report = pages.load_report(tmp_path)
    assert (
        "Train llama-3.2-1b (4 GPUs, batch 1) in FP8 (+21.0 %), once its loss is checked; "
        "train llama-3.2-1b (1 GPU, batch 1) in BF16 (\u22129.0 %); measure more in 1 setting of 3 "
        "(+4.9 % so far)."
    ) in sentences.decide(report)
    unknown = sentences.unknown(report)
    assert "Of 1 setting in which FP8 is surely faster, none has a conclusive loss" in unknown
    assert "would end in *FP8* or *BF16*" in sentences.changes(report)


def test_a_condition_is_named_where_size_and_tokens_tell_the_settings_apart(tmp_path: Path) -> None:
    def told() -> str:
        for path in tmp_path.rglob("run.json"):
            record = json.loads(path.read_text(encoding="utf-8"))
            is_large = record["config"]["model"] == "qwen3-4b"
            record["model"]["num_parameters"] = 4_022_468_096 if is_large else 1_235_814_400
            path.write_text(json.dumps(record), encoding="utf-8")
        return sentences.decide(pages.load_report(tmp_path))

    store_leads(tmp_path, 1, 0.90, 0.91, 0.92)
    store_leads(tmp_path, 2, 1.20, 1.21, 1.22, micro_batch_size=8)
    assert told().endswith(
        "Pre-train in FP8 if each GPU gets 32,768 tokens a step or more (measured up to 32,768) "
        "(+21.0 %), once its loss "
        "is checked; stay with BF16 up to 1.2 billion parameters with at most 4,096 tokens "
        "(\u22129.0 %)."
    )
    store_leads(tmp_path, 3, 1.10, 1.11, 1.12, model="qwen3-4b")
    assert "if the model has 4 billion parameters or more (measured up to 4) or each" in told()
    store_leads(tmp_path, 4, 0.80, 0.81, 0.82, model="qwen3-4b", micro_batch_size=8)
    assert "if the model" not in told() and "qwen3-4b (1 GPU, batch 1) in FP8" in told()


def test_no_range_joins_two_machines(tmp_path: Path) -> None:
    """A `quick` of one's own, on another GPU, never stands in one range with the reference."""
    mine = {"gpu_name": "NVIDIA H100 80GB HBM3", "gpu_memory_gib": 80.0}
    for place, facts, lead, loss in (
        ("reference/h200x8", {}, 1.2, 5.5), ("local", mine, 0.8, 7.7),
    ):  # fmt: skip
        for precision, factor in (("bf16", 1.0), ("fp8_rowwise", lead)):
            for seed in range(3):
                results = {
                    "tokens_per_second_per_gpu": 10_000 * factor, "memory_peak_gib": 50 * factor,
                    "loss_last20_mean": loss * (1 + (factor - 1) / 10) + seed / 1000,
                }  # fmt: skip
                record = make_record(precision=precision, seed=seed, results=results, machine=facts)
                record.judgement["question"] = "Is FP8 faster here?"
                store(tmp_path, place, record)
    report = pages.load_report(tmp_path)
    for tell in (sentences.decide, loss_sentences.training):
        own, theirs = tell(report).split("h200x8 (NVIDIA H200)")
        assert "our machine (NVIDIA H100 80GB HBM3)" in own
        assert "+20.0" not in own and "\u221220.0" not in theirs and "H100" not in theirs
    unknown = sentences.unknown(report).splitlines()
    assert unknown[0].startswith("- **Your machine (NVIDIA H100") and "h200x8" in unknown[1]
    (both,) = speed_rows.side_by_side(speed_rows.decisions(report.decisions)).to_dict("records")
    assert (round(both["lead_pct"]), round(both["lead_pct_other"])) == (-20, 20)
    asked = rows.questions(report, cost_table(report.runs))
    assert asked["machine"].tolist() == ["local", "h200x8"]
    assert set(asked["question"]) == {"Is FP8 faster here?"}


def test_runs_that_warn_are_counted_where_their_numbers_are_judged(tmp_path: Path) -> None:
    store(tmp_path, "local", make_record())
    warned = make_record(precision="fp8_rowwise", warnings=["a fallback <b>"])
    store(tmp_path, "local", warned)
    report = pages.load_report(tmp_path)
    assert report.with_warnings(report.throughput)["num_warned"].tolist() == [0, 1]
    gaps = rows.with_labels(report.with_warnings(report.loss_gaps))
    shown = show(gaps.assign(unseen_judged="", unseen_gap_pct=None), layouts.LOSS_GAP, "").data
    assert "runs with a warning" in shown
    listed = show(rows.warnings(report.stored), layouts.WARNINGS, "").data
    assert "a fallback &lt;b&gt;" in listed
    assert "1 run with [a warning]" in sentences.unknown(report)


def test_what_rows_share_is_their_header(tmp_path: Path) -> None:
    make_quick(tmp_path)
    table = pages.load_report(tmp_path).throughput
    shown = show(table, layouts.STARTUP, "").data
    groups = re.findall(r'<th scope="rowgroup" colspan="\d+"', shown)
    assert len(groups) == shown.count("<tbody>") > 1
    assert "master weights" in shown and "masters" not in shown
    assert shown.count('scope="col"') == int(groups[0].split('"')[-2])


@pytest.mark.parametrize(("value", "spec", "text"), [
    (-0.001, "+.2f", "+0.00"), (-1.26, "+.1f", "\u22121.3"), (math.inf, ",.0f", "∞"),
    (-0.2, ".0f", "0"), (1234.5, ",.1f", "1,234.5"),
])  # fmt: skip
def test_numbers_are_written_one_way(value: float, spec: str, text: str) -> None:
    assert words.number(value, spec) == text
    assert words.span([value, value], spec, " %") == f"{text} %"


def test_corrupt_record_is_named(tmp_path: Path) -> None:
    run_dir = store(tmp_path, "reference/box", make_record())
    (run_dir / "run.json").write_text("{")
    report = pages.load_report(tmp_path)
    assert report.runs.empty
    assert "not a run record" in method_sentences.unreadable(report)


def test_every_unreadable_record_is_named_on_every_reading(tmp_path: Path) -> None:
    texts = {"corrupt": "{", "newer": '{"schema_version": 3}', "aside": None}
    for name, text in texts.items():
        run_dir = store(tmp_path, "local", make_record(run_id=name))
        if text is None:
            (run_dir / "run.json").rename(run_dir / "run.corrupt1.json")
        else:
            (run_dir / "run.json").write_text(text)
    for _ in range(2):
        text = method_sentences.unreadable(pages.load_report(tmp_path))
        assert "corrupt/run.json: not a run record" in text
        assert "newer/run.json: schema" in text
        assert "set aside" in text
        assert "aside/run.corrupt1.json" in text


def test_results_folder_is_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(pages.RESULTS_VARIABLE, raising=False)
    for name in ("results", "report", "pipelines/studies"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "report")
    assert pages.find_results() == tmp_path / "results"


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
    assert "attribution on h200x8" in text
    assert "The stale optimizer is nearly all of it (99.9 %)" in text
    assert "masters" not in text
    assert "So the fault makes the failure, whatever the precision." in text
    assert "in 7 ways to an effective batch of 1 to 4: 7 equivalent." in text
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
    assert ("FP8 itself, rowwise (BF16 master weights)" in missing) == (make is make_document_a)
    assert "run make reproduce STUDY=effective-batch" in text
    if make is make_document_a:
        assert "run make reproduce STUDY=attribution" in text


@pytest.mark.slow
def test_noise_page_answers_from_its_records(site: dict[str, str]) -> None:
    text = plain(site["precision-noise"])
    assert "2 points of training, 1 recipe, 2 seeds). The two would be equal at" in text
    assert "Variance falls as 1/N, within chance (2 runs)" in text
    assert "8 sequences of 10 tokens a point, at most 50 steps" in text
    assert "emulated in all of these runs" not in text
