"""The report in a browser: accessible, quiet, and whole without a network.

Skipped where there is no Chromium (Debian: ``apt-get install chromium``) or no axe
(``npm pack axe-core``, unpacked to ``.make/package``); ``.ci/run`` brings both.
"""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
AXE = Path(os.environ.get("FP8STUDY_AXE") or ROOT / ".make" / "package" / "axe.min.js")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WIDTHS = (1280, 390)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium"),
    pytest.mark.skipif(
        not AXE.exists(), reason="no axe: npm pack axe-core, unpacked to .make/package"
    ),
]

#: Runs in each page before its own scripts: keeps what goes wrong.
LISTENER = """<script>
window.wrong = [];
addEventListener("error", (e) => wrong.push(e.message || `not loaded: ${e.target.src}`), true);
console.error = console.warn = (...words) => wrong.push(words.join(" "));
</script>"""
#: Runs in each page after them: reports to the page that frames it.
REPORTER = """<script src="axe.min.js"></script><script>
addEventListener("load", async () => {
  const cells = [...document.querySelectorAll("#tbl-answer td")];
  const answered = cells.find((cell) => /FP8|BF16/.test(cell.textContent));
  const decided = answered && answered.getBoundingClientRect().bottom;
  const header = document.querySelector(".site-header");
  const sticky = getComputedStyle(header).position === "sticky";
  const covered = [...document.querySelectorAll(".toc a")].map((a) => a.hash.slice(1)).filter(
    (id) => {
      const target = document.getElementById(decodeURIComponent(id));
      target.scrollIntoView();
      return sticky && target.getBoundingClientRect().top < header.getBoundingClientRect().bottom;
    });
  const widest = document.documentElement.scrollWidth - innerWidth;
  const cut = [...document.querySelectorAll("main img")].filter(
    (image) => image.getBoundingClientRect().right > innerWidth);
  document.querySelectorAll("main img").forEach((image) => {
    if (!image.closest("a[href]")) wrong.push("a figure that leads to no full size");
  });
  const run = document.querySelector("details.run");
  if (run) {
    location.hash = run.id;
    await new Promise((done) => setTimeout(done, 100));
    if (!run.open) wrong.push(`closed: ${run.id}`);
  }
  document.querySelectorAll("details").forEach((part) => { part.open = !part.className; });
  const found = await axe.run({ resultTypes: ["violations"], preload: false });
  const table = document.querySelector("table.searchable"), said = {};
  if (table) {
    const cells = () => [...table.querySelectorAll("tr")].filter(
      (row) => !row.hidden && row.querySelector("td")).map((row) => row.cells[0].textContent);
    const search = document.querySelector(".table-tools input");
    said.all = cells().length;
    search.value = "no row holds this";
    search.dispatchEvent(new Event("input"));
    said.none = cells().length;
    search.value = "";
    search.dispatchEvent(new Event("input"));
    const heading = table.querySelector("th button");
    heading.click();
    heading.click();
    said.sorted = heading.parentElement.getAttribute("aria-sort");
    said.again = cells().length;
  }
  if (run) {
    showOnly([run.dataset.key]);
    const runs = [...document.querySelectorAll("details.run")];
    const left = runs.filter((one) => one.checkVisibility());
    if (left.length !== 1 || left[0] !== run || !document.querySelector("p.only a")) {
      wrong.push(`${left.length} runs are left where one is named`);
    }
  }
  parent.postMessage(JSON.stringify({
    said,
    page: location.pathname.split("/").pop(), width: innerWidth, wrong, covered, widest, decided,
    cut: cut.map((image) => image.alt.slice(0, 50)),
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
    tools: document.querySelectorAll(".table-tools").length,
    tables: document.querySelectorAll("table.searchable").length,
    loaded: performance.getEntriesByType("resource").map((entry) => entry.name),
    violations: found.violations.map((v) => ({
      id: v.id, impact: v.impact, number: v.nodes.length,
      first: v.nodes[0].html.slice(0, 200) + " " + (v.nodes[0].failureSummary || "").slice(0, 300),
    })),
  }), "*");
});
</script>"""


@pytest.fixture(scope="module", params=["light", "dark"])
def seen(
    request: pytest.FixtureRequest, built_site: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each page says of itself at each width, in one scheme of colours."""
    folder = tmp_path_factory.mktemp("browser") / "site"
    shutil.copytree(built_site, folder)
    shutil.copyfile(AXE, folder / "axe.min.js")
    pages = sorted(folder.glob("*.html"))
    for page in pages:
        text = page.read_text(encoding="utf-8").replace("<head>", f"<head>{LISTENER}")
        page.write_text(text.replace("</body>", f"{REPORTER}</body>"), encoding="utf-8")
    frames = "".join(
        f'<iframe src="{page.name}" width="{width}" height="900"></iframe>'
        for page in pages
        for width in WIDTHS
    )
    collect = "addEventListener('message', (e) => { const line = document.createElement('pre'); \
line.textContent = e.data; document.body.append(line); });"
    wrapper = folder / "all-frames.htm"
    wrapper.write_text(f"<body><script>{collect}</script>{frames}</body>")
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--virtual-time-budget=120000", *["--force-dark-mode"] * (request.param == "dark")]
    done = subprocess.run(
        [*command, wrapper.as_uri()], capture_output=True, text=True, timeout=280, check=True
    )
    found = re.findall(r"<pre>(.*?)</pre>", done.stdout, flags=re.S)
    said = [json.loads(html.unescape(line)) for line in found]
    assert len(said) == len(pages) * len(WIDTHS), [each["page"] for each in said]
    assert {each["dark"] for each in said} == {request.param == "dark"}
    return said


def test_axe_finds_nothing_serious(seen: list[dict[str, Any]]) -> None:
    serious = [
        (each["page"], each["width"], violation)
        for each in seen
        for violation in each["violations"]
        if violation["impact"] in ("serious", "critical")
    ]
    assert not serious


def test_nothing_complains_and_nothing_comes_from_the_network(seen: list[dict[str, Any]]) -> None:
    for each in seen:
        assert not each["wrong"], each
        assert all(name.startswith(("file:", "data:")) for name in each["loaded"]), each
        assert each["tools"] == each["tables"], each


def test_a_table_can_be_filtered_and_sorted(seen: list[dict[str, Any]]) -> None:
    tried = [each["said"] for each in seen if each["said"]]
    assert tried
    for said in tried:
        assert said["all"] == said["again"] > 0 == said["none"], said
        assert said["sorted"] == "descending", said


def test_every_screen_holds_its_page(seen: list[dict[str, Any]]) -> None:
    """No anchor under the header, no page wider than the screen, no figure cut off."""
    for each in seen:
        assert not each["covered"] and each["widest"] <= 0 and not each["cut"], each


def test_the_first_screen_holds_the_decision(seen: list[dict[str, Any]]) -> None:
    """The sentences and the table's first answer by model: of a laptop and of a phone."""
    lowest = {each["width"]: each["decided"] for each in seen if each["page"] == "index.html"}
    assert {*lowest} == {*WIDTHS}
    assert lowest[1280] <= 800 and lowest[390] <= 844
