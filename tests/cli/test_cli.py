import dataclasses
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8study import __version__
from fp8study.cli import app
from fp8study.core.checkpoints import ABOUT, place_of
from fp8study.core.errors import UserError
from fp8study.core.presets import hf_config
from fp8study.core.records import read_record, write_record
from fp8study.core.studies import load_study
from fp8study.report.showing import instruments_text
from fp8study.run.terminal import fit, warnings_in_a_line
from tests.checkout import ROOT, fp8study, run_python
from tests.factories import finish, make_record
from tests.instrument_factories import instruments_of


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout without results, so that nothing here touches real ones; we are in it."""
    (tmp_path / "pipelines").symlink_to(ROOT / "pipelines")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "smok"], ["STUDY", "'smok'", "did you mean 'smoke'", "choose one of"]),
        (["plan", "pipelines/studies/smoke.yaml"], ["is no study (did you mean 'smoke'?)"]),
        (["plan", "../studies/smoke"], ["is no study (did you mean 'smoke'?)"]),
        (
            ["plan", "--budget", "5", "--budget", "abc"],
            ["--budget: 'abc' is no number", "plan --help"],
        ),
        (["advise", "--model=x", "--num-gpus=eight"], ["--num-gpus: 'eight' is no whole number"]),
        (["plan", ""], ["STUDY: '' is no study; choose one of"]),
        (["plan", "../secret"], ["STUDY", "choose one of"]),
        (["plan", "smoke", "--set", "seed"], ["--set", "'seed'", "write field=value"]),
        (
            ["plan", "smoke", "--set", "sed=1"],
            ["--set: unknown parameter 'sed'", "did you mean 'seed'"],
        ),
        (["plan", "smoke", "--set", "precision=[bf16"], ["--set", "precision"]),
        (["plan", "smoke", "--set", "skip=*.no_such"], ["skip: '*.no_such' matches no"]),
        (["plan", "--lst"], ["--lst", "plan --help"]),
        (
            ["plan", "smoke", "--set", "seed=4", "--set", "seed = 8"],
            ["--set: 'seed' is given twice", "leave all but one out"],
        ),
        (["plan", "smoke", "--set", "skip={a: 1, a: 2}"], ["--set: 'skip={a: 1, a: 2}'"]),
        (["plan", "smoke", "--set", "precision=[bf16]"], ["precision", "choose one of bf16"]),
        (["reproduce", "smoke", "--set", "precision=fp8_tensr"], ["precision", "fp8_tensorwise"]),
        (["reproduce", "smoke", "--set", "num_gpus=9999"], ["num_gpus", "CPU cores", "lower it"]),
        (["run", "--set", "precision="], ["--set: 'precision=' has no value", "or leave it out"]),
        (["run", "--set", "attention="], ["--set: 'attention=' has no value", "attention=null"]),
        (["run", "--set", "="], ["--set: '=' is no assignment"]),
        (["plan", "--set", "corpus=text:my", "--set", "text.txt"], ["make's SET takes no value"]),
        (["run", "--set", "corpus=text:"], ["corpus: 'text:' is no file; set"]),
        (["run", "--set", "corpus=text: /no.txt"], ["corpus: there is no file ' /no.txt'"]),
        (["run", "--set", "precision=int4"], ["precision", "'int4'", "choose one of bf16"]),
        (["advise", "--gpu", "h200", "--model", ""], ["model: it is empty; choose one of"]),
        (["run", "--set", "model=tiny-lama"], ["model", "did you mean 'tiny-llama'"]),
        (["run", "--set", "corpus=tinystory"], ["corpus", "did you mean 'tinystories'"]),
        (["run", "--out", ""], ["--out", "it is empty; give a folder"]),
        (["report", "--tables", " "], ["--tables", "it is empty; give a folder"]),
        (["report"], ["report", "_quarto.yml", "checkout"]),
        (["report", "--machine", "h200x4"], ["--machine", "add --tables"]),
        (["nope"], ["'nope'", "--help"]),
        (["plan", "--foo"], ["--foo", "--help"]),
        (["compare", "pipelines"], ["Missing argument", "--help"]),
        (["flops", "--set", "model=" + "x" * 5000], ["model"]),
        (["flops", "--measure"], ["--measure", "no NVIDIA GPU is visible"]),
        (["flops", "--set", "modl=x"], ["--set: unknown parameter 'modl'", "'model'"]),
        (["compare", "pipelines", "nowhere"], ["A", "'pipelines'", "run.json", "give a folder"]),
    ],
    ids=lambda value: value[-1][:20],
)
def test_mistake_is_one_line_on_stderr_and_status_2(
    arguments: list[str], words: list[str], checkout: Path
) -> None:
    done = fp8study(*arguments)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("fp8study: ")
    assert [word for word in words if word not in line] == []
    assert not (checkout / "results" / "local" / "adhoc").exists()


@pytest.mark.usefixtures("checkout")
def test_two_mistakes_are_two_lines() -> None:
    done = fp8study("advise", "--gpu", "nosuch", "--model", "nosuch")
    assert (done.returncode, done.stdout) == (2, "")
    starts = [" ".join(line.split()[:3]) for line in done.stderr.splitlines()]
    assert starts == ["fp8study: model: 'nosuch'", "fp8study: --gpu: 'nosuch'"]


def test_a_damaged_record_is_told_with_one_remedy(checkout: Path) -> None:
    (checkout / "run.json").write_text("{")
    done = fp8study("compare", str(checkout), str(checkout))
    assert done.returncode == 2
    assert re.fullmatch(
        r"fp8study: A: \S+: not a run record \([^;]*\); move it away, and do that run again\n",
        done.stderr,
    )


@pytest.mark.usefixtures("checkout")
def test_a_run_that_diverged_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = make_record(status="diverged", status_detail="loss is nan at step 3; lower it")
    monkeypatch.setattr("fp8study.run.launch.launch", lambda *_, **__: record)
    monkeypatch.setattr("sys.argv", ["fp8study", "run", "--out", "mine"])
    with pytest.raises(SystemExit) as end:
        app()
    assert not end.value.code  # it is a result
    assert "diverged: mine/run.json (loss is nan at step 3; lower it)" in capsys.readouterr().out


@pytest.mark.usefixtures("checkout")
def test_a_complaint_does_not_stand_behind_the_progress(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def launch(*_: object, show: Callable[[str], None]) -> None:
        show("tokenising …")
        raise UserError("corpus: too short; give a larger one")

    monkeypatch.setattr("fp8study.run.launch.launch", launch)
    monkeypatch.setattr("sys.argv", ["fp8study", "run", "--out", "mine"])
    with pytest.raises(SystemExit) as end:
        app()
    assert end.value.code == 2
    said = capfd.readouterr()
    assert said.out == "\rtokenising …\n"
    assert said.err == "fp8study: corpus: too short; give a larger one\n"


@pytest.mark.parametrize(
    ("every", "told"),
    [
        (0, "no checkpoint was written, so it begins anew: set checkpoint_every"),
        (5, "no checkpoint was written, so it begins anew"),
        (2, "to go on from the checkpoint of step 2: fp8study run --set checkpoint_every=2 "
            "--out 'my run'"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("checkout")
def test_a_run_that_is_stopped_says_what_is_kept(
    every: int, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch(_: object, run_dir: Path, **__: object) -> None:
        run_dir.mkdir()
        (run_dir / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
        if every == 2:
            place_of(run_dir, 2).mkdir(parents=True)
            (place_of(run_dir, 2) / ABOUT).write_text('{"step": 2, "config": {}}')
        raise KeyboardInterrupt

    monkeypatch.setattr("fp8study.run.launch.launch", launch)
    arguments = ["run", "--set", f"checkpoint_every={every}", "--out", "my run"]
    monkeypatch.setattr("sys.argv", ["fp8study", *arguments])
    with pytest.raises(SystemExit) as end:
        app()
    assert end.value.code == 130
    assert capsys.readouterr().err == f"fp8study: stopped at step 3; {told}\n"


def test_a_terminal_that_lacks_our_letters_gets_others(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = run_python(checkout, "-m", "fp8study.cli", "plan", "smoke")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"judged\s+at\s+\?\d", done.stdout)


@pytest.mark.usefixtures("checkout")
def test_without_a_command_there_is_help_and_a_version() -> None:
    assert fp8study("--version").stdout == f"fp8study {__version__}\n"
    done = run_python(ROOT, "-m", "fp8study.cli")
    assert done.returncode == 0
    assert "reproduce" in done.stdout


@pytest.mark.usefixtures("checkout")
def test_fields_of_flops_are_named_as_everywhere() -> None:
    chosen = ["model=tiny-llama", "sequence_length=256", "precision=bf16"]
    done = fp8study("flops", "--json", *(word for c in chosen for word in ("--set", c)))
    table = json.loads(done.stdout)
    assert [f"{k}={table[k]}" for k in ("model", "sequence_length", "precision")] == chosen
    assert sum(table["linear"].values()) + table["attention"] == table["total"]


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("command", [["flops"], ["plan", "smoke"]])
def test_no_model_folder_ends_in_a_traceback(checkout: Path, name: str, command: list[str]) -> None:
    content = {"model_type": name, "hidden_size": -3, "vocab_size": 512}
    (checkout / "config.json").write_text(json.dumps(content))
    done = fp8study(*command, "--set", f"model={checkout}")
    assert done.returncode == 2 if name == "llama" else done.returncode in (0, 2)
    # transformers may warn of such a configuration first, once a process
    ours = [line for line in done.stderr.splitlines() if not line.startswith("[transformers] ")]
    if done.returncode:
        (line,) = ours
        assert line.startswith(f"fp8study: model: '{checkout}' ")


def test_a_size_that_a_model_folder_leaves_out_is_not_guessed(tmp_path: Path) -> None:
    content = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(content | {"intermediat_size": 128}))
    done = fp8study("flops", "--set", f"model={tmp_path}")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    words = "has no intermediate_size in its config.json; transformers would take 11008 for it"
    assert f"fp8study: model: '{tmp_path}' {words}: add it" in done.stderr
    older = {"model_type": "bloom", "n_embed": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(older))
    assert hf_config(str(tmp_path)).hidden_size == 64
    other = {"model_type": "llama", "n_embed": 64, "num_layers": 2, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(other))
    with pytest.raises(UserError, match="has no hidden_size in its config"):
        hf_config(str(tmp_path))


@pytest.mark.usefixtures("checkout")
def test_plan_prints_every_run_and_starts_nothing() -> None:
    done = fp8study("plan", "smoke", "--set", "num_steps=21")
    assert (done.returncode, done.stderr) == (0, "")
    text = " ".join(done.stdout.split())
    assert text.startswith("Study smoke: ")
    assert "6 runs, 0 done, 6 to do" in text
    assert "Losses are judged at ±0.25 % of BF16's." in text
    assert "Synthetic text is easier than real text" in text
    assert "num_steps=21" in text
    assert "corpus=synthetic" in text
    runs = [line.split() for line in done.stdout.splitlines() if line.startswith("  to do ")]
    assert {len({row[2] for row in runs}), len({tuple(row[3:]) for row in runs})} == {6}
    assert not Path("results").exists()


@pytest.mark.parametrize("study", ["bench", "tuned-switches", "corner-arms", "smoke"])
@pytest.mark.usefixtures("checkout")
def test_a_plan_tells_its_runs_apart_within_80_columns(study: str) -> None:
    text = fp8study("plan", study).stdout
    assert max(map(len, text.splitlines())) <= 80
    entries = re.split(r"^  (?:to do|cannot) +", text, flags=re.MULTILINE)[1:]
    shown = [" ".join(entry.split()[1:]) for entry in entries][: len(load_study(study).runs)]
    assert len(set(shown)) == len(shown) == len(load_study(study).runs)


@pytest.mark.usefixtures("checkout")
def test_plan_without_a_name_is_the_smoke_study_on_a_machine_without_gpu() -> None:
    assert fp8study("plan").stdout.startswith("Study smoke: ")


@pytest.mark.usefixtures("checkout")
def test_an_unquoted_pattern_and_none_are_what_they_say() -> None:
    done = fp8study("plan", "smoke", "--set", "skip=*.o_proj", "--set", "noise_at_steps=none")
    assert (done.returncode, done.stderr) == (0, "")
    assert "skip=*.o_proj" in done.stdout
    assert "compile=false" in done.stdout
    assert "num_gpus=1" in done.stdout
    none_fits = fp8study("plan", "smoke", "--set", "num_gpus=64", "--set", "strategy=fsdp2")
    assert "None of them can be run here" in " ".join(none_fits.stdout.split())


@pytest.mark.usefixtures("checkout")
def test_plan_tells_done_runs_from_those_to_do() -> None:
    run = load_study("smoke").runs[2]
    finish(run)
    done = fp8study("plan", "smoke")
    assert "6 runs, 1 done, 5 to do" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("  done ")]
    assert line.split()[1] == run.run_id.rpartition("-")[2]


@pytest.mark.usefixtures("checkout")
def test_studies_are_listed_with_their_questions() -> None:
    done = fp8study("plan", "--list")
    assert done.returncode == 0
    names = [line.split()[0] for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert names == sorted(path.stem for path in (ROOT / "pipelines/studies").glob("*.yaml"))
    assert done.stdout.count("?") >= len(names)
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_broken_study_is_named_after_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    studies = tmp_path / "pipelines/studies"
    studies.mkdir(parents=True)
    smoke = (ROOT / "pipelines/studies/smoke.yaml").read_text()
    (studies / "folder.yaml").mkdir()
    for name, text in (("broken", "base: {modl: x}"), ("smoke", smoke)):
        (studies / f"{name}.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    done = fp8study("plan", "--list")
    assert done.returncode == 2 and done.stdout.startswith("smoke ")
    assert "broken.yaml" in done.stderr and len(done.stderr.splitlines()) == 1


def test_launcher_and_comparing_import_no_torch(checkout: Path) -> None:
    for side in "ab":
        (checkout / side).mkdir()
        write_record(make_record(), checkout / side)
    code = (
        "import sys, fp8study.run.launch, fp8study.run.pipeline; from fp8study.cli import app\n"
        + ("try: app(['compare', 'a', 'b'])\nfinally: print(*sys.modules)")
    )
    done = run_python(checkout, "-c", code)
    assert "llama-3.2-1b × 1, BF16" in done.stdout
    assert not {"torch", "transformers", "torchao"} & set(done.stdout.split())
    assert '"estimate": 1.0' in fp8study("compare", "a", "b", "--json").stdout


def test_comparisons_fit_80_columns(checkout: Path) -> None:
    for side in "ab":
        for number, precision in enumerate(["bf16", "fp8_tensorwise"] * 3):
            folder = checkout / side / str(number)
            folder.mkdir(parents=True)
            config = make_record().config | {"precision": precision, "repeat": number // 2}
            write_record(make_record(config=config), folder)
    for more in ([], ["--reference", "precision=bf16"]):
        done = fp8study("compare", "a", "b", *more)
        assert done.returncode == 0, done.stderr
        assert max(map(len, done.stdout.splitlines())) <= 80


def test_show_tells_what_was_measured_with_every_denominator(checkout: Path) -> None:
    record = make_record(
        run_id="measured",
        instruments=instruments_of("fp8_tensorwise", 4),
        results={"bf16_peak_tflops": 989.0, "mfu_mixed_peak_pct": 25.0,
                 "mixed_peak_tflops": 1500.0, "mfu_achievable_pct": 40.0},
    )  # fmt: skip
    write_record(record, checkout)
    done = fp8study("show", ".")
    assert done.returncode == 0
    for words in (
        "% of the dense BF16 peak, 989 TFLOP/s",
        "25.0 % of the mixed peak, 1500 TFLOP/s",
        "of the GEMM peak measured here, 1100 TFLOP/s",
        "23.00 GiB steady peak", "0.0120 J per token", "4.000 GiB  all_gather of uint8",
        "20.0 ms  gemm fp8",
    ):  # fmt: skip
        assert words in done.stdout
    write_record(make_record(run_id="bare", results={}), checkout)
    assert "energy" not in fp8study("show", "run.json").stdout  # absent, not zero


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("smoke", "--budget", "30"), "--budget: 30 is for the study machine, and 'smoke' names"),
        (("machine",), "STUDY: 'machine' is for GPUs"),
        (("machine", "--set", "modl=x"), "--set: unknown parameter 'modl'"),
    ],
)
def test_a_budget_is_for_the_machines_study_and_that_for_gpus(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = fp8study("plan", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"fp8study: {words}")


@pytest.mark.parametrize("study", ["quick", "document-a"])
def test_records_older_than_the_instruments_are_shown(study: str) -> None:
    paths = sorted((ROOT / "results/reference/h200x4" / study).glob("*/run.json"))
    assert len(paths) > 11
    for path in paths:
        record = read_record(path)
        assert "tokens/s per GPU" in instruments_text(record)
        assert "of the dense BF16 peak" in instruments_text(record)


@pytest.mark.parametrize("command", ["audit", "show"])
def test_warnings_of_a_run_are_shown(checkout: Path, command: str) -> None:
    audit = read_record(next((ROOT / "results/reference/h200x4/step-trims").glob("*/run.json")))
    warning = "56 % of the weights are in layers that are no nn.Linear"
    write_record(dataclasses.replace(audit, warnings=[warning]), checkout)
    done = fp8study(command, ".")
    assert f"  warning   {warning}" in done.stdout
    assert done.returncode == 0


def test_an_audit_that_is_not_there_says_why(checkout: Path) -> None:
    write_record(make_record(audit={}), checkout)
    assert "the record is older than the audit" in fp8study("audit", ".").stderr
    write_record(make_record(audit={}, status="failed", results={"steps_completed": 0}), checkout)
    assert "ended before a step was audited (status failed)" in fp8study("audit", ".").stderr


@pytest.mark.usefixtures("checkout")
@pytest.mark.parametrize("command", ["show", "audit"])
def test_a_folder_without_a_record_is_named(command: str) -> None:
    done = fp8study(command, "nowhere")
    assert done.returncode == 2
    assert "'nowhere' holds no record; give the folder of a run" in done.stderr


def test_outside_a_checkout_the_list_of_studies_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = fp8study("plan", "--list")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("fp8study: studies: there are none in ")


def test_wrapped_lines_stand_below_what_their_label_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    assert fit("  warning   the allocator ran out of memory") == (
        "  warning   the allocator ran\n            out of memory"
    )
    assert fit("/a/path/that/is/longer/than/the/terminal") == (
        "/a/path/that/is/longer/than/the/terminal"
    )
    assert fit("  fp8study run --set model=tiny --set num_gpus=2") == (
        "  fp8study run \\\n  --set model=tiny \\\n  --set num_gpus=2"
    )
    path = "'model=/a folder/of some model/of mine'"
    assert fit(f"  fp8study run --set {path} --set num_gpus=2") == (
        f"  fp8study run \\\n  --set {path} \\\n  --set num_gpus=2"
    )


def test_our_warnings_are_lines_and_those_of_libraries_stay_theirs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with (
        pytest.warns(FutureWarning, match="theirs"),
        pytest.raises(UserError),
        warnings_in_a_line(),
    ):
        warnings.warn("ours", stacklevel=2)
        warnings.warn("theirs", FutureWarning, stacklevel=2)
        raise UserError("an end")
    assert capsys.readouterr().err == "fp8study: ours\n"
