"""Mistakes on the command line and what went wrong: one line each, and none behind the progress."""

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
from fp8study.core.studies import load_study
from fp8study.run.terminal import fit, using_model, warnings_in_a_line
from tests.checkout import ROOT, fp8study, run_python
from tests.factories import finish, make_record


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "smok"], ["STUDY", "'smok'", "did you mean 'smoke'", "choose a file of"]),
        (["plan", "pipelines/studies/smoke.yaml"], ["is no study (did you mean 'smoke'?)"]),
        (["plan", "../studies/smoke"], ["is no study (did you mean 'smoke'?)"]),
        (
            ["plan", "--budget", "5", "--budget", "abc"],
            ["--budget: 'abc' is no number", "plan --help"],
        ),
        (
            ["advise", "--model=x", "--global-batch-size=1M"],
            ["'--global-batch-size': '1M' is no whole number of sequences; about a million tokens"],
        ),
        (["advise", "--model=x", "--num-gpus=eight"], ["--num-gpus: 'eight' is no whole number"]),
        (["plan", ""], ["STUDY: '' is no study; choose a file of"]),
        (["plan", "../secret"], ["STUDY", "choose a file of"]),
        (["advise", "--model=x", "--tokens=160BB"], ["'160BB' is no number; write 160e9, 160B"]),
        (
            ["advise", "--model=qwen3-4b", "--gpu=h200", "--tokens", "0.5 m"],
            ["--tokens: 500000 is outside 1e+06"],
        ),
        (
            ["advise", "--model=qwen3-4b", "--gpu=h200", "--tokens=2000T"],
            ["--tokens: 2e+15 is outside"],
        ),
        (["plan", "smoke", "--set", "seed"], ["--set", "'seed'", "write field=value"]),
        (
            ["plan", "smoke", "--set", "sed=1"],
            ["--set: unknown parameter 'sed'", "did you mean 'seed'"],
        ),
        (["plan", "smoke", "--set", "precision=[bf16"], ["--set", "precision"]),
        (["plan", "smoke", "--set", "skip=*.no_such"], ["skip: '*.no_such' matches no"]),
        (["plan", "--lst"], ["--lst", "plan --help"]),
        (["claims", "A1"], ["ID: 'A1' is no claim (did you mean 'A01'?); give one of A01 to A29"]),
        (["claims", "A01", "zzz"], ["ID: 'zzz' is no claim; give one of", "C01 to C14"]),
        (
            ["plan", "smoke", "--set", "seed=4", "--set", "seed = 8"],
            ["--set: 'seed' is given twice", "leave all but one out"],
        ),
        (["plan", "smoke", "--set", "skip={a: 1, a: 2}"], ["--set: 'skip={a: 1, a: 2}'"]),
        (["plan", "smoke", "--set", "precision=[bf16]"], ["precision", "choose one of bf16"]),
        (["reproduce", "smoke", "--set", "precision=fp8_tensr"], ["precision", "fp8_tensorwise"]),
        (["reproduce", "smoke", "--set", "num_gpus=9999"], ["num_gpus", "CPU cores", "lower it"]),
        (["run", "--set", "foo=1"], ["--set: unknown parameter 'foo'"]),
        (["run", "--set", "precision="], ["--set: 'precision=' has no value", "or leave it out"]),
        (["run", "--set", "skip="], ["--set: 'skip=' has no value", "or 'skip=[]' for none"]),
        (["run", "--set", "model=~"], ["--set: model: null is not valid; give a value"]),
        (["run", "--set", "corpus=text:~/no.txt"], [f"there is no file '{Path.home()}/no.txt'; "]),
        (["run", "--set", "attention="], ["--set: 'attention=' has no value", "attention=null"]),
        (["run", "--set", "="], ["--set: '=' is no assignment"]),
        (["plan", "--set", "corpus=text:my", "--set", "text.txt"], ["make's SET takes no value"]),
        (["run", "--set", "corpus=text:"], ["corpus: 'text:' is no file; set"]),
        (["run", "--set", "corpus=text: /no.txt"], ["corpus: there is no file ' /no.txt'"]),
        (["run", "--set", "precision=int4"], ["precision", "'int4'", "choose one of bf16"]),
        (["advise", "--gpu", "h200", "--model", ""], ["model: it is empty; choose one of"]),
        (["run", "--set", "model=tiny-lama"], ["model", "did you mean 'tiny-llama'"]),
        (["run", "--set", "corpus=tinystory"], ["corpus", "did you mean 'tinystories'"]),
        (["run", "--set", "model=llama-3.1-70b"], ["memory: llama-3.1-70b", "of this host's"]),
        (["run", "--out", ""], ["--out", "it is empty; give a folder"]),
        (["claims", "A01", "--document", "B"], ["ID: 'A01' is of document A; leave --document"]),
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
def test_a_run_gets_no_folder_that_holds_others() -> None:
    finish(load_study("smoke").runs[0])
    for folder in ("results/local", "results/local/smoke"):
        done = fp8study("run", "--out", folder)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"'{folder}' holds runs; name one of its own, as results/local/" in done.stderr


@pytest.mark.usefixtures("checkout")
def test_two_mistakes_are_two_lines() -> None:
    done = fp8study("advise", "--gpu", "nosuch", "--model", "nosuch")
    assert (done.returncode, done.stdout) == (2, "")
    starts = [" ".join(line.split()[:3]) for line in done.stderr.splitlines()]
    assert starts == ["fp8study: model: 'nosuch'", "fp8study: --gpu: 'nosuch'"]


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


def test_only_a_model_that_is_no_preset_is_blamed_for_what_goes_wrong() -> None:
    said = r"^model: '\./mine' cannot be used \(KeyError"
    with pytest.raises(UserError, match=said), using_model("./mine"):
        raise KeyError("hidden_size")
    with pytest.raises(KeyError), using_model("llama-3.2-1b"):
        raise KeyError("hidden_size")


def test_a_terminal_that_lacks_our_letters_gets_others(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = run_python(checkout, "-m", "fp8study.cli", "plan", "smoke")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"judged\s+at\s+\+/-\d", done.stdout)


def test_a_folder_that_is_gone_is_said_in_a_line(tmp_path: Path) -> None:
    code = "import os, sys; os.rmdir(os.getcwd()); from fp8study.cli import app; app(['doctor'])"
    gone = tmp_path / "gone"
    gone.mkdir()
    done = run_python(gone, "-c", code)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "fp8study: the folder that you are in is gone; change to one that is\n"


@pytest.mark.usefixtures("checkout")
def test_without_a_command_there_is_help_and_a_version() -> None:
    assert fp8study("--version").stdout == f"fp8study {__version__}\n"
    done = run_python(ROOT, "-m", "fp8study.cli")
    assert done.returncode == 0
    assert "reproduce" in done.stdout


def test_help_says_whose_weights_tokens_are_counted_by() -> None:
    """A mixture trains more weights than a token meets, and 20 of each would be other days."""
    words = fp8study("advise", "--help").stdout.replace("│", "").split()
    assert "20 per active weight" in " ".join(words)


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
