// Every figure leads to its full size, and a link to a run opens it. Tables of class `searchable`
// get a text filter, headings that sort, and a CSV download; headings with `data-choose` a list of
// their values, or of as many first letters. Without this script they read as they are.
"use strict";

function numeric(text) {
  const found = text.replace(/[,\u00a0]/g, "").replace("\u2212", "-").match(/[-+]?\d*\.?\d+(e[-+]?\d+)?/i);
  return found ? parseFloat(found[0]) : NaN;
}

function compare(one, other) {
  const [a, b] = [numeric(one), numeric(other)];
  return isNaN(a) || isNaN(b) ? isNaN(a) - isNaN(b) || one.localeCompare(other) : a - b;
}

const isGroup = (row) => row.cells[0].scope === "rowgroup";
const rowsOf = (body) => [...body.rows].filter((row) => !isGroup(row));
const groupOf = (body) => [...body.rows].find(isGroup);

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function filter(table, search, choices, counter) {
  const words = search.value.toLowerCase().split(/\s+/);
  let shown = 0;
  for (const body of table.tBodies) {
    const group = groupOf(body);
    let any = false;
    for (const row of rowsOf(body)) {
      const text = `${group ? group.textContent : ""} ${row.textContent}`.toLowerCase();
      const chosen = choices.every(
        ([place, list, part]) => !list.value || part(row.cells[place]) === list.value);
      row.hidden = !chosen || !words.every((word) => text.includes(word));
      any ||= !row.hidden;
      shown += !row.hidden;
    }
    if (group) group.hidden = !any;
  }
  counter.textContent = `${shown} rows`;
}

function sort(heading, place, table) {
  const down = heading.getAttribute("aria-sort") === "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  for (const body of table.tBodies) {
    const text = (row) => row.cells[place].textContent.trim();
    const sorted = rowsOf(body).sort((a, b) => (down ? -1 : 1) * compare(text(a), text(b)));
    body.append(...sorted);
  }
}

function csv(table) {
  const quote = (text) => `"${text.trim().replace(/"/g, '""')}"`;
  const lines = [["group", ...[...table.tHead.rows[0].cells].map((cell) => cell.textContent)]];
  for (const body of table.tBodies) {
    const group = [groupOf(body), table.caption].map((part) => part?.textContent ?? "").join(" ");
    for (const row of rowsOf(body)) {
      if (!row.hidden) lines.push([group, ...[...row.cells].map((cell) => cell.textContent)]);
    }
  }
  return lines.map((line) => line.map(quote).join(",")).join("\r\n");
}

function enhance(table) {
  const name = table.closest("figure[id], div[id]")?.id ?? "table";
  const search = element("input", { type: "search", placeholder: "filter" });
  search.setAttribute("aria-label", "Filter the rows");
  const counter = element("output", {});
  const save = element("button", { type: "button", textContent: "CSV" });
  save.setAttribute("aria-label", "Download the rows shown as CSV");
  save.onclick = () => {
    const file = URL.createObjectURL(new Blob([csv(table)], { type: "text/csv" }));
    element("a", { href: file, download: `${name}.csv` }).click();
    setTimeout(() => URL.revokeObjectURL(file), 1000);
  };
  const headings = [...table.tHead.rows[0].cells];
  const choices = headings.flatMap((heading, place) => {
    if (!("choose" in heading.dataset)) return [];
    const part = (cell) => cell.textContent.trim().slice(0, heading.dataset.choose || undefined);
    const rows = [...table.tBodies].flatMap(rowsOf);
    const values = [...new Set(rows.map((row) => part(row.cells[place])))].sort();
    const list = element("select", {}, new Option(`any ${heading.textContent}`, ""),
      ...values.map((value) => new Option(value)));
    list.setAttribute("aria-label", heading.textContent);
    return [[place, list, part]];
  });
  const update = () => filter(table, search, choices, counter);
  search.oninput = update;
  for (const [, list] of choices) list.onchange = update;
  for (const [place, heading] of headings.entries()) {
    const button = element("button", { type: "button" }, ...heading.childNodes);
    button.onclick = () => sort(heading, place, table);
    heading.append(button);
  }
  const tools = element("div", { className: "table-tools" }, search,
    ...choices.map(([, list]) => list), counter, save);
  (table.closest(".table-scroll") || table).before(tools);
  update();
}

// A row's link names its runs: the others step back.
function showOnly(keys) {
  const isWanted = (run) => keys.includes(run.dataset.key);
  const runs = [...document.querySelectorAll("details.run")];
  for (const run of runs) run.hidden = !isWanted(run);
  const holdsOne = (part) => [part, ...part.querySelectorAll("details.run")].some(
    (run) => run.matches("details.run") && isWanted(run));
  for (const arm of document.querySelectorAll("section.arm")) arm.hidden = !holdsOne(arm);
  for (const heading of document.querySelectorAll("main h2")) {
    const study = [heading];
    while (study.at(-1).nextElementSibling && !study.at(-1).nextElementSibling.matches("h2")) {
      study.push(study.at(-1).nextElementSibling);
    }
    if (!study.some(holdsOne)) for (const part of study) part.hidden = true;
  }
  const all = element("a", { href: location.pathname, textContent: "Show all" });
  document.querySelector("main p")?.before(
    element("p", { className: "only" }, `The ${keys.length} runs behind one row. `, all));
}

function openTarget() {
  document.getElementById(location.hash.slice(1))?.setAttribute("open", "");
}

document.querySelectorAll("main img").forEach((image) => {
  const link = element("a", { href: image.src, className: "full-size", title: "Full size" });
  if (image.src.startsWith("data:")) link.download = "figure.svg";  // no page may open one
  image.replaceWith(link);
  link.append(image);
});
// What scrolls by itself must be reached by keyboard.
document.querySelectorAll("math[display=block], .cell-output-display").forEach((part) => {
  if (part.scrollWidth > part.clientWidth) part.tabIndex = 0;
});
document.querySelectorAll("table.searchable").forEach((table) => table.tHead && enhance(table));
addEventListener("beforeprint", () => {
  document.querySelectorAll("main details:not(.run)").forEach((part) => { part.open = true; });
});
const only = new URLSearchParams(location.search).get("of");
if (only && document.querySelector("details.run")) showOnly(only.split("."));
addEventListener("hashchange", openTarget);
openTarget();
