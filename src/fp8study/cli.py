"""The command line of fp8study; ``fp8study --help`` lists the commands.

Any mistake of the user is one line on stderr and status 2. What a command needs is imported inside
it, so that none waits for torch or for plotting that it does not use.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fp8study import __version__
from fp8study.core.config import make_config
from fp8study.core.errors import NoFp8, UserError
from fp8study.core.files import own_results, results_dir
from fp8study.core.presets import check_model
from fp8study.core.records import read_run
from fp8study.run.defaults import config_for
from fp8study.run.machine import this_machine
from fp8study.run.terminal import (
    AsJson,
    Benchmarks,
    Budget,
    ClaimIds,
    Details,
    Document,
    FurtherFields,
    GbitPerSecond,
    GlobalBatch,
    GpuName,
    GpusPerNode,
    Ignored,
    Links,
    MeasureLayers,
    MicroBatch,
    NumGpus,
    OfMachine,
    OneLineErrors,
    OutDir,
    Overrides,
    ProfileName,
    Reference,
    ResultsDir,
    RunDir,
    StudyName,
    TablesDir,
    Tokens,
    VerdictName,
    complain,
    outcome_text,
    parse_assignments,
    say,
    using_model,
    warnings_in_a_line,
    warnings_text,
)

app = typer.Typer(
    cls=OneLineErrors, help="Should I pre-train in FP8, on my GPUs, for my model?",
    pretty_exceptions_enable=False, add_completion=False,
)  # fmt: skip


def _print(content: object, text: str, as_json: bool) -> None:
    print(json.dumps(content, indent=1)) if as_json else say(text)


@app.callback(invoke_without_command=True)
def _main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"fp8study {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Check this machine and say what to do about each problem; fails if a run would."""
    from fp8study.run.doctor import PROBLEM, examine, report_text

    findings = examine(this_machine())
    _print([asdict(finding) for finding in findings], report_text(findings), as_json)
    if any(finding.state == PROBLEM for finding in findings):
        raise typer.Exit(1)


@app.command()
def fields() -> None:
    """List the fields of a run, as --set and the notebook take them."""
    from fp8study.report.field_table import field_table

    print(field_table())


@app.command()
def flops(
    set_: Overrides = None,
    measure: Annotated[bool, typer.Option(help="Time its GEMMs here, do not count.")] = False,
    as_json: AsJson = False,
) -> None:
    """Count the arithmetic of one token, and how much of it FP8 can take over."""
    config = make_config({"precision": "fp8"} | parse_assignments(set_), "--set").resolved()
    with using_model(config.model):
        check_model(config)
        if measure:
            from fp8study.measure.gemm_peaks import ceilings_of, ceilings_text

            text = ceilings_text(content := ceilings_of(config))
        else:
            from fp8study.measure.flops import count_flops, flops_text

            table = count_flops(config)
            content, text = table.to_dict(), flops_text(table)
    _print(content, text, as_json)


@app.command()
def advise(
    model: Annotated[str, typer.Option(help="A preset, a Hub id, or a folder with a config.json.")],
    num_gpus: NumGpus = None,
    sequence_length: Annotated[int, typer.Option(help="Tokens a sequence.")] = 4096,
    micro_batch_size: MicroBatch = None,
    global_batch: GlobalBatch = None,
    network: GbitPerSecond = None,
    gpus_per_node: GpusPerNode = None,
    links: Links = None,
    gpu: GpuName = None,
    tokens: Tokens = None,
    set_: FurtherFields = None,
    measure: MeasureLayers = False,
    details: Details = False,
    as_json: AsJson = False,
) -> None:
    """Say whether FP8 pays for a model and GPUs: measured where run, else predicted."""
    from fp8study.analysis.advice.question import AS_TRAINED, answer, question_for
    from fp8study.analysis.laws.here import keep
    from fp8study.report.advice_text import advice_text

    here = [(device.name, device.memory_gib) for device in this_machine().gpus]
    with using_model(model), warnings_in_a_line():
        try:
            asked = question_for(
                here, model, num_gpus, sequence_length, micro_batch_size, gpu,
                AS_TRAINED | parse_assignments(set_), tokens, global_batch, network, gpus_per_node,
                links,
            )  # fmt: skip
        except NoFp8 as error:
            return _print({"answer": error.answer}, error.answer, as_json)
        if measure:
            from fp8study.measure.layer_times import measure_here  # nothing else here needs torch

            keep(measure_here(asked.layers_to_measure(), complain), results_dir())
        found = answer(asked)
    _print(asdict(found), advice_text(found, details), as_json)


@app.command()
def plan(
    study: StudyName = None,
    set_: Overrides = None,
    list_: Annotated[bool, typer.Option("--list", help="List the studies instead.")] = False,
    budget: Budget = None,
    profile: ProfileName = None,
) -> None:
    """Show a study's runs, what they cost here, and which are done."""
    from fp8study.run.plan import list_studies, plan_text
    from fp8study.run.slurm.profile import study_there

    if list_:
        return list_studies(say)
    loaded, _, machine, cluster = study_there(profile, study, parse_assignments(set_), budget)
    print(plan_text(loaded, machine, cluster))


@app.command()
def reproduce(
    study: StudyName = None,
    set_: Overrides = None,
    report: Annotated[bool, typer.Option(help="Render the report afterwards.")] = True,
    budget: Budget = None,
    profile: ProfileName = None,
) -> None:
    """Run a study's missing runs on this machine, then render the report."""
    from fp8study.report.study_text import losses_text
    from fp8study.run.pipeline import check_results, run_study
    from fp8study.run.slurm.profile import study_there

    loaded, values, machine, cluster = study_there(profile, study, parse_assignments(set_), budget)
    done = run_study(loaded, machine, values, cluster=cluster)
    if losses := losses_text(done):
        say(losses)
    if report:
        _render(only_if_changed=True)
    check_results(done, "reproduce")


@app.command()
def run(set_: Overrides = None, out: OutDir = None) -> None:
    """Train one run without a notebook; fields that are not set are this machine's defaults."""
    import time

    from fp8study.run.chosen.estimates import check_memory
    from fp8study.run.launch import RunFailed, check_possible, launch, stopped

    with warnings_in_a_line():
        config = config_for(machine := this_machine(), parse_assignments(set_), "--set")
    with using_model(config.model):
        check_possible(config, machine)
        check_memory(config, machine)
    name = f"{time.strftime('%Y%m%dT%H%M%S')}-{config.digest()}"
    run_dir = out or own_results() / "adhoc" / name
    try:
        record = launch(config, run_dir, show=lambda line: print(f"\r{line}", end="", flush=True))
    except RunFailed as error:
        reason = str(error).splitlines()[-1]
        raise UserError(f"{reason}; all that it printed is in {run_dir}/train.log") from None
    except KeyboardInterrupt:
        raise stopped(config, run_dir, set_ or []) from None
    finally:
        print()  # ends the line of its progress, before any complaint
    say(f"{record.status}: {run_dir}/run.json{outcome_text(record)}{warnings_text(record)}")


@app.command()
def audit(run_dir: RunDir) -> None:
    """Show what a run really trained; fails if that is not what it claims."""
    from fp8study.core.audit_rules import audit_of, audit_text, problems

    found = audit_of(record := read_run(run_dir))
    say(f"{record.run_id} ({record.status}){warnings_text(record)}\n{audit_text(found)}")
    if problems(found):
        raise typer.Exit(1)


@app.command()
def show(run_dir: RunDir) -> None:
    """Show what a run's instruments measured: time, memory, energy, GEMMs, communication."""
    from fp8study.report.showing import instruments_text

    record = read_run(run_dir)
    say(f"{instruments_text(record)}{warnings_text(record)}")


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="A folder of results, or a run's folder.")],
    b: Annotated[Path, typer.Argument(help="The one to be judged.")],
    ignore: Ignored = None,
    reference: Reference = None,
    as_json: AsJson = False,
) -> None:
    """Show two folders of results side by side, arm by arm, as ratios B/A.

    With --reference, the arms of each folder are first divided by that folder's reference arm.
    """
    from fp8study.analysis.compare import compare_folders, compare_relative
    from fp8study.report.comparison_text import comparison_text

    if reference and ignore:
        raise UserError("--ignore: cannot be had with --reference; leave one of them out")
    if reference:
        found = compare_relative(a, b, parse_assignments(reference, "--reference"))
    else:
        found = compare_folders(a, b, ignore or [])
    _print(asdict(found), comparison_text(found), as_json)


@app.command()
def bench(
    set_: Overrides = None,
    baseline: Annotated[
        Path | None, typer.Option(help="A folder of results; default: a CPU's, committed.")
    ] = None,
) -> None:
    """Measure this machine's throughput anew, as ratios, and compare them with a baseline's."""
    from fp8study.report.comparison_text import comparison_text
    from fp8study.run.bench import run_bench

    found = run_bench(this_machine(), parse_assignments(set_), baseline)
    say(f"\n{comparison_text(found)}")
    if len(found.sides) == 1:
        say("No baseline of such hardware is committed: keep a copy of this folder as one.")


@app.command()
def claims(
    ids: ClaimIds = None,
    results: ResultsDir = None,
    document: Document = None,
    verdict: VerdictName = None,
    as_json: AsJson = False,
) -> None:
    """Judge the claims of three documents by the records, this machine's own ones first."""
    from fp8study.analysis.claims.ledger import check_choice, claims_table, judge
    from fp8study.report.ledger import ledger_text
    from fp8study.report.page import load_report

    check_choice(document, verdict, ids or [])
    found = load_report(results or results_dir())
    for line in found.unreadable:
        complain(line)
    if found.runs.empty:
        raise UserError(
            f"results: '{results or results_dir()}' holds no record below local/ or reference/; "
            "name a folder that does, or make reproduce first"
        )
    ledger = judge(found, ids or [], document, verdict)
    content = json.loads(claims_table(ledger).to_json(orient="records"))
    _print(content, ledger_text(ledger, counts=not ids and not verdict), as_json)


@app.command()
def report(
    tables: TablesDir = None,
    machine: OfMachine = None,
    benchmarks: Benchmarks = False,
) -> None:
    """Render the report and BENCHMARKS.md; by Quarto, or our own renderer where there is none."""
    if machine is not None and tables is None:
        raise UserError(f"--machine: '{machine}' only chooses what --tables writes; add --tables")
    if tables is not None:
        from fp8study.report.export import write_tables_of

        with warnings_in_a_line():
            print("\n".join(map(str, write_tables_of(results_dir(), tables, machine))))
    if benchmarks or (tables is None and (results_dir() / "reference").is_dir()):
        from fp8study.report.benchmark_page import write_benchmarks

        with warnings_in_a_line():
            print(f"benchmarks: {write_benchmarks(results_dir())}")
    if tables is None and not benchmarks:
        _render(only_if_changed=False)


def _render(only_if_changed: bool) -> None:
    from fp8study.report.rendering import render_report

    print(f"report: {render_report(only_if_changed)}")


if __name__ == "__main__":
    app()
