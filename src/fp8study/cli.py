"""The command line of fp8study; ``fp8study --help`` lists the commands."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
import yaml

from fp8study.core.errors import UserError
from fp8study.core.field_types import read_yaml
from fp8study.core.paths import studies_dir
from fp8study.core.studies import Study, load_study, study_names
from fp8study.run.defaults import config_for, study_for
from fp8study.run.machine import Machine, this_machine

app = typer.Typer(
    help="Should I pre-train in FP8, on my GPUs, for my model?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

P = ParamSpec("P")
R = TypeVar("R")

StudyName = Annotated[
    str | None, typer.Argument(help="A file of pipelines/studies; by default smoke, or quick on "
                               "a machine with GPUs.")
]  # fmt: skip
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="field=value, set in every run; repeatable.")
]


#: What could not be done when the system refuses, and what helps.
_REMEDIES = {
    errno.ENOSPC: ("write", "free some space"),
    errno.EDQUOT: ("write", "free some space"),
    errno.EROFS: ("write", "make its folder writable"),
    errno.EACCES: ("open", "give yourself access to it and its folder"),
}


def _one_line_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Show a mistake of the user as one line, and leave with status 2."""

    @wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except UserError as error:
            print(f"fp8study: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
        except OSError as error:
            if error.errno not in _REMEDIES:
                raise
            print(
                f"fp8study: cannot {_REMEDIES[error.errno][0]} '{error.filename or 'a file'}' "
                f"({error.strerror}); {_REMEDIES[error.errno][1]}, then start again: nothing is "
                "lost",
                file=sys.stderr,
            )
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            print(
                "fp8study: stopped; finished runs are kept, start again to go on", file=sys.stderr
            )
            raise typer.Exit(130) from None

    return guarded


def _parse(assignments: list[str] | None, option: str = "--set") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for assignment in assignments or []:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise UserError(f"{option}: '{assignment}' is no assignment; write field=value")
        try:
            values[name.strip()] = read_yaml(text)
        except yaml.YAMLError:
            raise UserError(
                f"{option}: '{assignment}' has no YAML value after '='; quote it or mend the "
                "brackets"
            ) from None
    return values


def _record_path(run: Path) -> Path:
    """Return the record of a run, which may be named by its folder."""
    path = run if run.suffix == ".json" else run / "run.json"
    if not path.is_file():
        raise UserError(
            f"run_dir: '{run}' holds no record; give the folder of a run that has ended, as "
            "results/local/<study>/<run_id>"
        )
    return path


def _load(name: str | None, overrides: list[str] | None) -> tuple[Study, Machine, dict[str, Any]]:
    machine, values = this_machine(), _parse(overrides)
    return load_study(name or study_for(machine), values), machine, values


@app.command()
@_one_line_errors
def studies() -> None:
    """List the studies with their questions."""
    names = study_names()
    if not names:
        raise UserError(f"studies: there are none in '{studies_dir()}'; run in a checkout")
    for name in names:
        study = load_study(name)
        print(f"{name:<14}{len(study.runs):>4} runs  {study.question}")


@app.command()
def fields() -> None:
    """List the fields of a run, as --set and the notebook take them."""
    from fp8study.core.fields import field_table

    print(field_table())


@app.command()
@_one_line_errors
def plan(study: StudyName = None, set_: Overrides = None) -> None:
    """Show a study's runs, what they cost here, and which are done."""
    from fp8study.run.pipeline import plan_text

    loaded, machine, _ = _load(study, set_)
    print(plan_text(loaded, machine))


@app.command()
@_one_line_errors
def reproduce(
    study: StudyName = None,
    set_: Overrides = None,
    report: Annotated[bool, typer.Option(help="Render the report afterwards.")] = True,
) -> None:
    """Run a study's missing runs on this machine, then render the report."""
    from fp8study.run.pipeline import num_without_result, run_study

    loaded, machine, values = _load(study, set_)
    done = run_study(loaded, machine, values)
    if report:
        _render(only_if_changed=True)
    if number := num_without_result(done):
        raise UserError(
            f"reproduce: {number} of {len(done)} runs have no result; their last lines are "
            "in the notebooks beside their records, and starting again repeats only them"
        )


@app.command()
@_one_line_errors
def run(
    set_: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder.")] = None,
) -> None:
    """Train one run without a notebook; fields that are not set are this machine's defaults."""
    import time

    from fp8study.core.paths import results_dir
    from fp8study.run.launch import RunFailed, launch

    machine = this_machine()
    config = config_for(machine, _parse(set_))
    name = f"{time.strftime('%Y%m%dT%H%M%S')}-{config.digest()}"
    run_dir = out or results_dir() / "local" / "adhoc" / name
    try:
        record = launch(config, run_dir, show=lambda line: print(f"\r{line}", end="", flush=True))
    except RunFailed as error:
        raise UserError(str(error)) from None
    print(f"\n{record.status}: {run_dir}/run.json")


@app.command()
@_one_line_errors
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine and say what to do about each problem; fails if a run would."""
    from fp8study.run.doctor import PROBLEM, examine, report_json, report_text

    findings = examine(this_machine())
    print(report_json(findings) if as_json else report_text(findings))
    if any(finding.state == PROBLEM for finding in findings):
        raise typer.Exit(1)


@app.command()
@_one_line_errors
def audit(
    run_dir: Annotated[Path, typer.Argument(help="A run's folder, or its run.json.")],
) -> None:
    """Show what a run really trained; fails if that is not what it claims."""
    from fp8study.core.audit_rules import audit_text, problems, without_hidden_products
    from fp8study.core.records import read_record

    record = read_record(_record_path(run_dir))
    if not record.audit:
        raise UserError(
            f"audit: '{run_dir}' holds none (status {record.status}); it ended before its first "
            "step, or was made by an earlier version: run it again"
        )
    audit = without_hidden_products(record.audit, record.config)
    print(f"{record.run_id} ({record.status})\n{audit_text(audit)}")
    if problems(audit):
        raise typer.Exit(1)


@app.command()
@_one_line_errors
def show(
    run_dir: Annotated[Path, typer.Argument(help="A run's folder, or its run.json.")],
) -> None:
    """Show what a run's instruments measured."""
    from fp8study.core.records import read_record
    from fp8study.report.showing import instruments_text

    print(instruments_text(read_record(_record_path(run_dir))))


@app.command()
@_one_line_errors
def compare(
    a: Annotated[Path, typer.Argument(help="A folder of results, or a run's folder.")],
    b: Annotated[Path, typer.Argument(help="The one to be judged.")],
    ignore: Annotated[
        list[str] | None, typer.Option(help="A field in which arms may differ; repeatable.")
    ] = None,
    reference: Annotated[
        list[str] | None,
        typer.Option(help="field=value of the arms that the others are divided by; repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show two folders of results side by side, arm by arm, as ratios B/A.

    With --reference, the arms of each folder are first divided by that folder's reference arm.
    """
    import dataclasses
    import json

    from fp8study.analysis.compare import compare_folders, compare_relative
    from fp8study.report.comparison_text import comparison_text, relative_text

    if reference and ignore:
        raise UserError("--ignore: cannot be had with --reference; leave one of them out")
    if reference:
        relative = compare_relative(a, b, _parse(reference, "--reference"))
        content, text = dataclasses.asdict(relative), relative_text(relative)
    else:
        found = compare_folders(a, b, ignore or [])
        content, text = dataclasses.asdict(found), comparison_text(found)
    print(json.dumps(content, indent=1) if as_json else text)


@app.command()
@_one_line_errors
def bench(
    set_: Overrides = None,
    baseline: Annotated[
        Path | None, typer.Option(help="A folder of results; by default a committed one.")
    ] = None,
) -> None:
    """Measure this machine's throughput anew, as ratios, and compare them with a baseline's."""
    from fp8study.analysis.arms import read_folder
    from fp8study.report.comparison_text import relative_text
    from fp8study.run.bench import run_bench

    if baseline is not None:
        read_folder(baseline, "--baseline")  # before an hour of runs
    found = run_bench(this_machine(), _parse(set_), baseline)
    print(f"\n{relative_text(found)}")
    if len(found.sides) == 1:
        print("No baseline of such hardware is committed: keep a copy of this folder as one.")


@app.command()
@_one_line_errors
def ceilings(
    model: Annotated[str, typer.Option(help="A preset, a Hugging Face id or a folder.")],
    sequence_length: Annotated[int, typer.Option(help="Tokens per sequence.")] = 4096,
    micro_batch_size: Annotated[int, typer.Option(help="Sequences per forward pass.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure on this GPU what a model's matrix products reach by themselves."""
    import json

    from fp8study.core.config import make_config
    from fp8study.core.presets import check_model_name

    check_model_name(model)
    config = make_config(
        {"model": model, "sequence_length": sequence_length, "micro_batch_size": micro_batch_size}
    )
    machine = this_machine()
    if not machine.gpus:
        raise UserError(
            "ceilings: no NVIDIA GPU is visible here, and a CPU's products say nothing of one; "
            "run it on the GPU in question"
        )
    import torch

    from fp8study.measure.gemm_peaks import ceilings_text, linear_shapes, measure_ceilings
    from fp8study.model.build import build_model

    shapes = linear_shapes(build_model(model, torch.bfloat16, torch.device("meta"), 0), config)
    num_tokens = config.micro_batch_size * config.sequence_length
    found = measure_ceilings(shapes, num_tokens, "bf16", torch.device("cuda", 0))
    print(json.dumps(found, indent=1) if as_json else ceilings_text(found))


@app.command()
@_one_line_errors
def flops(
    model: Annotated[str, typer.Option(help="A preset, a Hugging Face id or a folder.")],
    sequence_length: Annotated[int, typer.Option(help="Tokens per sequence.")] = 4096,
    precision: Annotated[str, typer.Option(help="bf16 or an FP8 recipe.")] = "fp8",
    skip: Annotated[str, typer.Option(help="Layers kept out of FP8, comma-separated.")] = "lm_head",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Count the arithmetic of one token, and how much of it FP8 can take over."""
    import json

    from fp8study.core.config import make_config
    from fp8study.measure.flops import count_flops, flops_text

    table = count_flops(
        make_config(
            {
                "model": model,
                "sequence_length": sequence_length,
                "precision": precision,
                "skip": skip,
            }
        )
    )
    print(json.dumps(table.to_dict(), indent=1) if as_json else flops_text(table))


@app.command()
@_one_line_errors
def tables(
    folder: Annotated[Path, typer.Argument(help="Where to write them.")],
    machine: Annotated[
        str | None, typer.Option(help="Only records of this machine, such as h200x4 or local.")
    ] = None,
) -> None:
    """Write the report's tables as CSV files."""
    from fp8study.core.paths import results_dir
    from fp8study.core.records import load_runs
    from fp8study.report.export import write_tables

    stored = load_runs(results_dir())
    names = sorted({run.machine_label for run in stored})
    if machine is not None and machine not in names:
        raise UserError(
            f"machine: no record of '{machine}'; there are {', '.join(names) or 'none'}"
        )
    chosen = [run for run in stored if machine in (None, run.machine_label)]
    print("\n".join(str(path) for path in write_tables(chosen, folder)))


@app.command()
@_one_line_errors
def report(
    force: Annotated[bool, typer.Option(help="Render even if nothing changed.")] = True,
) -> None:
    """Render the report: with Quarto where it is installed, else with our own renderer."""
    _render(only_if_changed=not force)


@app.command()
@_one_line_errors
def benchmarks() -> None:
    """Write results/reference/BENCHMARKS.md from the committed records."""
    from fp8study.core.paths import results_dir
    from fp8study.report.benchmark_page import benchmarks_path, benchmarks_text

    path = benchmarks_path(results_dir())
    if not path.parent.is_dir():
        raise UserError(f"results: there is no '{path.parent}'; run in a checkout")
    path.write_text(benchmarks_text(results_dir()), encoding="utf-8")
    print(f"benchmarks: {path}")


def _render(only_if_changed: bool) -> None:
    from fp8study.report.rendering import render_report

    print(f"report: {render_report(only_if_changed)}")


if __name__ == "__main__":
    app()
