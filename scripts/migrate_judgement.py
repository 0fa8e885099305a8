"""Write into records how their study's losses are to be judged, as its file says today.

    python scripts/migrate_judgement.py [FOLDER …]        by default results/reference

Runs record that themselves since layout 2 (`fp8study.core.records.RunRecord.judgement`); this is
for those that were made before. A record that has a judgement, and one of a study without a file,
stays as it is; in the others nothing else changes.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from fp8study.core.errors import UserError
from fp8study.core.files import results_dir
from fp8study.core.records import SCHEMA_VERSION, read_record
from fp8study.core.studies import judgement_of

_RESULTS = re.compile(r'^ "results": \{(?:\}|.*?\n \}),\n', re.MULTILINE | re.DOTALL)
_VERSION = re.compile(r'^( "schema_version": )1$', re.MULTILINE)


def migrate(path: Path) -> bool:
    """Give one ``run.json`` its judgement; return whether it was changed.

    Raises:
        UserError: The record, or its study's file, is invalid.
    """
    record = read_record(path)
    judgement = judgement_of(record.study)
    if record.judgement or not judgement:
        return False
    # In the text, since records of earlier versions are laid out otherwise than new ones.
    text = path.read_text(encoding="utf-8")
    section = json.dumps({"judgement": judgement}, indent=1)[2:-2]
    text, judged = _RESULTS.subn(lambda found: f"{found.group()}{section},\n", text, count=1)
    text, bumped = _VERSION.subn(rf"\g<1>{SCHEMA_VERSION}", text, count=1)
    if not (judged and bumped):
        raise UserError(f"{path}: not laid out as records are; run the study again")
    part = path.with_name(".run.json.migrated")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
    return True


def main(folders: list[str]) -> None:
    """Migrate every record below the folders and say how many changed."""
    for folder in map(Path, folders or [str(results_dir() / "reference")]):
        changed = [migrate(path) for path in sorted(folder.rglob("run.json"))]
        print(f"{folder}: {sum(changed)} of {len(changed)} records have a judgement now")


if __name__ == "__main__":
    main(sys.argv[1:])
