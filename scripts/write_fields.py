"""Write what follows from the declared fields: `python scripts/write_fields.py`, or `make fields`.

The parameters of each notebook, with what they mean, and docs/configuration.md. A test holds both
to `fp8study.core.fields`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fp8study.core.config import RunConfig
from fp8study.core.field_types import shown
from fp8study.core.fields import FIELDS
from fp8study.report.field_table import field_rows

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "configuration.md"

_PLACE = {
    "study": "str Folder of the results, below results/local.",
    "run_id": "str Folder of the run; by default the time and a digest of the configuration.",
}
#: Settings for which the page shows what the tuned path chooses.
_SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"path": "plain"},
    "tuned, 1 GPU, BF16": {},
    "1 GPU, FP8": {"precision": "fp8_tensorwise"},
    "1 GPU, FP8, clipped": {"precision": "fp8_tensorwise", "max_grad_norm": 1.0},
    "1 GPU under FSDP2, BF16": {"strategy": "fsdp2"},
    "2 GPUs, FP8": {"num_gpus": 2, "precision": "fp8_tensorwise"},
    "2 GPUs, FP8, clipped": {"num_gpus": 2, "precision": "fp8_tensorwise", "max_grad_norm": 1.0},
    "2 GPUs under DDP, BF16": {"num_gpus": 2, "strategy": "ddp"},
}


def parameter_cell(values: dict[str, Any]) -> str:
    """Return the source of a notebook's parameter cell; papermill reads its comments as help.

    Args:
        values: What the notebook's own defaults are; None, or no entry, leaves it to the machine.
    """
    comments = dict(_PLACE)
    for _, name, kind, default, meaning in field_rows():
        comments[name] = f"{kind.split(',')[0]} {meaning} Default: {default}."
    lines = [
        f"{name} = {json.dumps(values.get(name)).replace('null', 'None')}  # type: {comment}"
        for name, comment in comments.items()
    ]
    return "\n".join(["# None: decided by this machine, see fp8study.run.defaults", *lines])


def configuration_page() -> str:
    """Return docs/configuration.md."""
    lines = [
        "# The fields of a run", "",
        "Written by `make fields` from `src/fp8study/core/fields.py`. `fp8study fields` and",
        "`papermill --help-notebook notebooks/run.ipynb` show the same.", "",
    ]  # fmt: skip
    group = ""
    for of, name, kind, default, meaning in field_rows():
        if of != group:
            lines += ["", f"## {of.capitalize()}", "", "| field | type | default | meaning |",
                      "|---|---|---|---|"]  # fmt: skip
            group = of
        choices = kind.replace("|", " \\| ")
        lines.append(f"| `{name}` | {choices} | {default} | {meaning} |")
    header = " | ".join(_SETTINGS)
    lines += ["", "## What a path makes of the tuning fields", "", f"| field | {header} |",
              "|---" * (len(_SETTINGS) + 1) + "|"]  # fmt: skip
    configs = [
        RunConfig(**{"path": "tuned", **setting}).resolved() for setting in _SETTINGS.values()
    ]
    for name, field in FIELDS.items():
        if field.words:
            cells = " | ".join(shown(getattr(config, name)) for config in configs)
            lines.append(f"| `{name}` | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the notebooks' parameter cells and the page."""
    PAGE.write_text(configuration_page(), encoding="utf-8")
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        for cell in notebook["cells"]:
            if "parameters" in cell["metadata"].get("tags", []):
                values: dict[str, Any] = {}
                exec("".join(cell["source"]), values)  # the notebook's own defaults stay
                cell["source"] = parameter_cell(values).splitlines(keepends=True)
        text = json.dumps(notebook, indent=1, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")
    print("written: docs/configuration.md, notebooks/*.ipynb")


if __name__ == "__main__":
    main()
