"""What all commands share: one-line errors, assignments, text that fits the terminal."""

from __future__ import annotations

import codecs
import errno
import io
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from typer.core import TyperGroup

from fp8study.core.errors import UserError, one_line
from fp8study.core.field_types import read_yaml
from fp8study.core.fields import DEFAULTS, LISTS
from fp8study.core.presets import PRESETS
from fp8study.core.records import RunRecord
from fp8study.data.corpus import REMEMBERS, SEEN_AGAIN


def _folder(text: str) -> Path:
    if not text.strip():  # which `Path` takes for the folder that we are in
        raise typer.BadParameter("it is empty; give a folder")
    return Path(text)


def _run_folder(text: str) -> Path:
    folder = _folder(text)
    if any(folder.glob("*/run.json")) or any(folder.glob("*/*/run.json")):
        raise typer.BadParameter(
            f"'{text}' holds runs; name one of its own, as results/local/mine/first"
        )
    return folder


def _number_of_tokens(text: str) -> float:
    """Read 160e9, 160B or 1.5T."""
    number, suffix = text.strip(), text.strip()[-1:].upper()
    try:
        return float(number[:-1]) * _SCALES[suffix] if suffix in _SCALES else float(number)
    except ValueError:
        raise typer.BadParameter(f"'{text}' is no number; write 160e9, 160B or 1.5T") from None


def _number_of_sequences(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(
            f"'{text}' is no whole number of sequences; about a million tokens are 256 of 4,096"
        ) from None


# Arguments and options that several commands have.
StudyName = Annotated[
    str | None, typer.Argument(help="A file of pipelines/studies; by default machine, chosen for "
                               "the GPUs that are there, or smoke without any.")
]  # fmt: skip
Budget = Annotated[
    float | None, typer.Option(help="Minutes that the study machine may take; 20 by default.")
]
ProfileName = Annotated[
    str | None,
    typer.Option("--profile", help="Run as jobs of a cluster: slurm, or a folder like "
                                   "pipelines/profiles/slurm."),
]  # fmt: skip
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="field=value of the run; repeatable.")
]
FurtherFields = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="As learning_rate=3e-4; max_grad_norm is 1, as in pre-training, unless set.",
    ),
]
NumGpus = Annotated[int | None, typer.Option(help="1 to 1024; default: all here, or 1 with --gpu.")]
GpuName = Annotated[
    str | None, typer.Option(help="To ask about, as h100-80gb; default: the one here.")
]
MeasureLayers = Annotated[
    bool, typer.Option("--measure", help="Time its layers here first: a minute.")
]
MicroBatch = Annotated[
    int | None,
    typer.Option(help="Sequences per GPU and pass; default: what fits, to 32,768 tokens."),
]
GlobalBatch = Annotated[
    int | None, typer.Option("--global-batch-size", parser=_number_of_sequences, metavar="NUMBER",
                             help="Sequences per step; default: those of one pass.")
]  # fmt: skip
GbitPerSecond = Annotated[
    float | None, typer.Option("--network", help="Gb/s between nodes, per GPU; default: 400.")
]
Links = Annotated[float | None, typer.Option(help="GB/s of GPUs without NVLink; default: by PCIe.")]
GpusPerNode = Annotated[int | None, typer.Option(help="Default: 8; of GH200, GB200 and GB300: 4.")]
Tokens = Annotated[
    float | None, typer.Option(parser=_number_of_tokens, metavar="NUMBER",
                               help="Training tokens, as 160B; default: 20 per active weight.")
]  # fmt: skip
Ignored = Annotated[
    list[str] | None, typer.Option(help="A field in which arms may differ; repeatable.")
]
Reference = Annotated[
    list[str] | None, typer.Option(help="field=value of the arms to divide by; repeatable.")
]
RunDir = Annotated[Path, typer.Argument(help="A run's folder, or its run.json.")]
OutDir = Annotated[
    Path | None, typer.Option(parser=_run_folder, metavar="PATH", help="The run's folder.")
]
TablesDir = Annotated[
    Path | None, typer.Option(parser=_folder, metavar="PATH",
                              help="Write the tables there as CSV files, and no pages.")
]  # fmt: skip
OfMachine = Annotated[
    str | None, typer.Option(help="With --tables: only this machine's records, as h200x4.")
]
Benchmarks = Annotated[
    bool, typer.Option("--benchmarks", help="Write BENCHMARKS.md, and no pages.")
]
ClaimIds = Annotated[
    list[str] | None, typer.Argument(metavar="ID", help="Only these claims, as A01.")
]
ResultsDir = Annotated[Path | None, typer.Option(help="A folder that holds local/ and reference/.")]
Document = Annotated[str | None, typer.Option(help="Only those of document A, B or C.")]
VerdictName = Annotated[str | None, typer.Option(help="Only those with this verdict.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Details = Annotated[bool, typer.Option("--details", help="Also print what the answer rests on.")]

#: How numbers of tokens are abbreviated.
_SCALES = {"M": 1e6, "B": 1e9, "T": 1e12}

#: What could not be done when the system refuses, and what helps.
_REMEDIES = {
    errno.ENOSPC: ("write", "free some space"),
    errno.EDQUOT: ("write", "free some space"),
    errno.EROFS: ("write", "make its folder writable"),
    errno.EACCES: ("open", "give yourself access to it and its folder"),
    errno.ENAMETOOLONG: ("open", "give a shorter name"),
}

#: Letters of a name or a reason that are shown; more would hide the rest of the line.
_LONGEST = 300

#: The parser's complaint about a command line; typer has no public name for it.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


#: What stands for a sign that a terminal does not have.
_SIGNS = {"−": "-", "±": "+/-", "×": "x", "…": "...", "–": "-", "\u2011": "-", "·": "*",
          "\u00a0": " ", "µ": "u", "✓": "+", "✗": "x", "◐": "~"}  # fmt: skip


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return "".join(_SIGNS.get(sign, "?") for sign in text), error.end


class OneLineErrors(TyperGroup):
    """Ends a command that the user can mend in one line and status 2, or 130 after Ctrl-C."""

    def main(self, args: Sequence[str] | None = None, **extra: Any) -> Any:  # type: ignore[override]
        extra["standalone_mode"] = False
        if isinstance(sys.stdout, io.TextIOWrapper):
            codecs.register_error("in_ascii", _in_ascii)
            sys.stdout.reconfigure(errors="in_ascii")  # a terminal may not have our − and ±
        try:
            status = super().main(args, **extra)
            if status == 130:
                complain("stopped; finished runs are kept, start again to go on")
        except _UsageError as error:
            message = _number_wanted(error, sys.argv[1:] if args is None else args)
            message = message or " ".join(getattr(error, "format_message", error.__str__)().split())
            context = getattr(error, "ctx", None)
            command = context.command_path if context else "fp8study"
            status = complain(f"{message.rstrip('.')}; {command} --help lists what there is")
        except UserError as error:
            for line in str(error).splitlines() or [""]:
                complain(line)
            status = error.status
        except OSError as error:
            if error.errno == errno.ENOENT and not error.filename:
                sys.exit(complain("the folder that you are in is gone; change to one that is"))
            if error.errno not in _REMEDIES:
                raise
            verb, remedy = _REMEDIES[error.errno]
            name = str(error.filename or "a file, or standard output")[:_LONGEST]
            status = complain(
                f"cannot {verb} '{name}' ({error.strerror}); {remedy}, then start again: nothing "
                "is lost"
            )
        sys.exit(status or 0)


def _number_wanted(error: Exception, args: Sequence[str]) -> str:
    """Name the value of an option that is no number, which the parser's own message leaves out."""
    kinds = {"valid integer": "whole number", "valid number": "number"}
    kind = next((ours for theirs, ours in kinds.items() if theirs in str(error)), None)
    for name in getattr(getattr(error, "param", None), "opts", ()) if kind else ():
        for arg, following in reversed([*zip(args, [*args[1:], ""], strict=True)]):
            option, has_value, value = arg.partition("=")
            if option == name:
                return f"{name}: '{value if has_value else following}' is no {kind}"
    return ""


def complain(message: str) -> int:
    print(f"fp8study: {message}", file=sys.stderr)
    return 2


@contextmanager
def warnings_in_a_line() -> Iterator[None]:
    """Tell our warnings as we tell errors, without the line of code that they came from.

    Also where an error follows. Those of other categories are libraries', and shown as ever.
    """
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            yield
    finally:
        for item in caught:
            if item.category is UserWarning:
                complain(str(item.message))
            else:
                warnings.showwarning(item.message, item.category, item.filename, item.lineno)


#: A path from one's home, where a value begins with one.
_HOME = re.compile(r"^(text:)?~/")


def parse_assignments(assignments: list[str] | None, option: str = "--set") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for assignment in assignments or []:
        name, equals, text = assignment.partition("=")
        if not equals or not name.strip():
            raise UserError(
                f"{option}: '{assignment}' is no assignment; write field=value (make's SET takes "
                "no value with a space in it: fp8study itself does)"
            )
        name = name.strip()
        if not text.strip():
            usual = DEFAULTS.get(name, "")
            none = f"{name}=null for what it is by default" if usual is None else "leave it out"
            none = f"'{name}=[]' for none" if name in LISTS else none
            raise UserError(f"{option}: '{assignment}' has no value; write field=value, or {none}")
        if name in values:
            raise UserError(f"{option}: '{name}' is given twice; leave all but one out")
        text = _HOME.sub(rf"\1{Path.home()}/", text)  # which a shell leaves as it is behind a sign
        try:
            # A pattern such as *.o_proj is a text, not one of YAML's aliases.
            value = text if text.startswith("*") else read_yaml(text)
            # Nor is text: a mapping, which no field takes.
            values[name] = text.strip() if isinstance(value, dict) else value
        except (UserError, yaml.YAMLError):
            raise UserError(
                f"{option}: '{assignment}' has no YAML value after '='; quote it or mend the "
                "brackets"
            ) from None
        if values[name] is None and DEFAULTS.get(name) is not None:
            raise UserError(f"{option}: {name}: null is not valid; give a value, or leave it out")
    return values


@contextmanager
def using_model(model: str) -> Iterator[None]:
    """Name the model when transformers or torch cannot make anything of it; not a preset."""
    try:
        yield
    except (UserError, typer.Exit):
        raise
    except Exception as error:
        if model in PRESETS:
            raise  # whatever it is, another model would not mend it
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(
            f"model: '{model[:_LONGEST]}' cannot be used ({reason[:_LONGEST]}); give a preset, or "
            "a folder with the config.json of a decoder"
        ) from error


#: The label at a line's start, such as ``  warning   ``: what wraps stands below what follows it.
_LABEL = re.compile(r" *\S+(?: \S+)? {2,}(?=\S)| +")
_DEEPEST = 25
#: A line that is there to be copied.
_COMMAND = re.compile(r" +fp8study \w+ .*--set ")


def fit(text: str) -> str:
    """Wrap the lines that are wider than the terminal, or than 80 columns where there is none.

    A word that is too long for a line stays whole, so that a path can be copied; so can a command,
    whose lines end in backslashes.
    """
    width = shutil.get_terminal_size().columns
    return "\n".join(_fit_line(line, width) for line in text.splitlines())


def _fit_line(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    label = _LABEL.match(line)
    indent = " " * (min(label.end(), _DEEPEST) if label else 2)
    whole, more = line, ""
    if _COMMAND.match(line):  # whose lines begin with an option: a quoted path may have spaces
        whole, more = re.sub(r"(?<=\S) (?!--set )", "\0", line), " \\"
    parts = textwrap.wrap(
        whole, width - len(more), subsequent_indent=indent, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    return f"{more}\n".join(parts).replace("\0", " ")


def say(text: str) -> None:
    """Print a text at once, so that it fits."""
    print(fit(text), flush=True)


def outcome_text(record: RunRecord) -> str:
    """Write how a run ended: why so, or with which loss."""
    if record.status_detail:
        return f" ({record.status_detail})"
    losses = {"": "loss_last20_mean", " on held-out text": "validation_loss"}
    said = (
        f"{record.results[n]:.4f}{where}" for where, n in losses.items() if record.results.get(n)
    )
    return f", loss {text}" if (text := ", ".join(said)) else ""


def warnings_text(record: RunRecord) -> str:
    """Write a record's warnings, and if its text was short, each below what was said before."""
    said, passes = list(record.warnings), record.data.get("epochs") or 0.0
    if passes > SEEN_AGAIN and record.config.get("corpus") != "synthetic":
        said.append(f"its text was read {passes:.1f} times: {REMEMBERS}")
    return "".join(f"\n  warning   {warning}" for warning in said)
