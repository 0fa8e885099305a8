"""Execute and write the pages of a site, each in a process that parts from this one.

Starting Python, importing what the pages import and reading the records takes longer than the
pages themselves. So it is done here once, and each page then runs in a fork of this process: what
it finds is shared, what it changes is its own.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import gc
import multiprocessing
import os
import pickle
import pkgutil
import sys
from multiprocessing.connection import wait
from typing import NoReturn

from IPython.core.interactiveshell import InteractiveShell

from fp8study.core.errors import UserError
from fp8study.report.site.build import Job
from fp8study.report.site.execute import PageRun, start_shell
from fp8study.report.site.pandoc import write_html
from fp8study.report.site.qmd import Code, Page


def main() -> None:
    """Do the job; where that fails, say why in its `complaint` and exit with a status of `_end`."""
    job: Job = pickle.load(sys.stdin.buffer)
    try:
        shell = start_shell()
        _import_what_is_imported(job.pages)
        if job.preload:
            pkgutil.resolve_name(job.preload)()
        gc.freeze()  # so that collecting garbage in the forks copies nothing
        _fork_each(job, shell)
    except (UserError, OSError) as error:
        _end(job, error)


def _end(job: Job, error: Exception) -> NoReturn:
    """Leave word of what was wrong; on a full disk only the status can say it."""
    if isinstance(error, UserError):
        try:
            job.complaint.write_text(str(error), encoding="utf-8")
            sys.exit(1)
        except OSError as why:
            error = why
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        sys.exit(errno.ENOSPC)
    raise error


def _import_what_is_imported(pages: list[Page]) -> None:
    for code in (part.source for page in pages for part in page.parts if isinstance(part, Code)):
        # What fails here fails again in its cell, and is reported there with its line.
        with contextlib.suppress(Exception):
            body = ast.parse(code).body
            imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
            exec(compile(ast.Module([*imports], []), "<imports>", "exec"), {})


def _fork_each(job: Job, shell: InteractiveShell) -> None:
    """Render as many pages at a time as there are cores; stop at the first that fails."""
    context = multiprocessing.get_context("fork")
    waiting = list(job.pages)
    running: dict[int, tuple[multiprocessing.context.ForkProcess, Page]] = {}
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            page = waiting.pop(0)
            process = context.Process(target=_render, args=(job, page, shell), daemon=True)
            process.start()
            running[process.sentinel] = (process, page)
        for sentinel in wait(list(running)):
            process, page = running.pop(sentinel)  # type: ignore[arg-type]
            process.join()
            if process.exitcode:
                if process.exitcode == errno.ENOSPC:
                    sys.exit(errno.ENOSPC)
                if job.complaint.is_file():
                    sys.exit(1)
                raise UserError(f"{page.where}: its process ended with {process.exitcode}.")


def _render(job: Job, page: Page, shell: InteractiveShell) -> None:
    try:
        markdown = PageRun(page, shell).markdown()
        html = write_html(page, markdown, job.site.config, job.scratch)
        (job.build / page.name).with_suffix(".html").write_text(html, encoding="utf-8")
    except (UserError, OSError) as error:
        _end(job, error)


if __name__ == "__main__":
    main()
