"""The study check-loss answers "FP8, check its loss first", in the setting it is given."""

import dataclasses

from fp8study.analysis import decision
from fp8study.core.records import StoredRun
from fp8study.core.studies import load_study
from fp8study.report.page import report_of
from tests.checkout import committed_runs


def as_if_run(committed: list[StoredRun]) -> list[StoredRun]:
    """Return what the study's runs of an 8B would leave on that GPU, both precisions alike."""
    fields = {"model": "llama-3.1-8b", "strategy": "none", "corpus": "text:my.txt",
              "max_grad_norm": None, "skip": ["lm_head"]}  # fmt: skip
    known = {(r.record.config["precision"], r.record.config["seed"]): r for r in committed}
    found = []
    for run in load_study("check-loss", fields).runs:
        stored = known[run.config.precision, run.config.seed]
        record = dataclasses.replace(
            stored.record, run_id=run.run_id, study="check-loss", config=run.config.to_dict(),
            results=stored.record.results | {"loss_last20_mean": 6 + run.config.seed / 1000},
        )  # fmt: skip
        found.append(dataclasses.replace(stored, record=record, machine_label="local"))
    return found


def test_an_equivalent_loss_turns_check_its_loss_first_into_fp8() -> None:
    first = [run for run in committed_runs() if run.record.study == "loss-8b"]
    first = [run for run in first if run.record.config["learning_rate"] == 1e-4]
    timed = [run for run in committed_runs() if run.record.study in ("machine", "shapes")]

    def actions(*runs: StoredRun) -> dict[tuple[int, int], str]:
        rows = report_of([*timed, *first, *runs]).decisions
        rows = rows[(rows["model"] == "llama-3.1-8b") & (rows["machine"] == "h200x2")]
        return {(row.num_gpus, row.micro_batch_size): row.action for row in rows.itertuples()}

    before, after = actions(), actions(*as_if_run(first))
    assert before[1, 1] == decision.CHECK
    assert after == before | {(1, 1): decision.FP8}  # nor does it decide any other setting
