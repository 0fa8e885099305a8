"""Number figures, tables and sections, and resolve the references to them."""

from __future__ import annotations

from dataclasses import dataclass, field

from fp8study.core.errors import UserError
from fp8study.report.site.pandoc import (
    Node,
    Nodes,
    attributes,
    div,
    find,
    raw_html,
    string,
    take_attribute,
    walk,
)

NAMES = {"fig": "Figure", "tbl": "Table", "sec": "Section"}


@dataclass
class CrossReferences:
    """The labels of one page, in order of appearance.

    Use it in two steps, because a reference may come before what it refers to: `number`
    the blocks, then `resolve` them.
    """

    where: str
    source: str
    """the page's text, to tell the line of a broken reference"""
    number_sections: bool
    labels: dict[str, str] = field(default_factory=dict)
    """label: number"""
    _top_level: int = field(default=1, init=False)
    _section: list[int] = field(default_factory=list, init=False)

    def number(self, blocks: Nodes) -> Nodes:
        """Return the blocks with every labelled thing numbered.

        Raises:
            UserError: a label used twice, or a figure or table without what it needs.
        """
        headings = [node["c"] for node in find(blocks, "Header")]
        levels = [level for level, attr, _ in headings if "unnumbered" not in attr[1]]
        self._top_level = min(levels, default=1)
        self._section = []
        return walk(blocks, self._number_node)

    def resolve(self, blocks: Nodes) -> Nodes:
        """Return the blocks with each reference as a link.

        Raises:
            UserError: a reference to a label that the page does not have.
        """

        def action(node: Node) -> Nodes | None:
            return self._links(node["c"][0]) if node["t"] == "Cite" else None

        return walk(blocks, action)

    def _number_node(self, node: Node) -> Nodes | None:
        if node["t"] == "Header":
            return [self._heading(node)]
        if node["t"] not in ("Figure", "Table", "Div"):
            return None
        kind = attributes(node)[0][:4]
        if kind == "fig-":
            return [self._figure(node)]
        if kind == "tbl-":
            return self._table(node)
        return _scrollable(node)

    def _next(self, label: str) -> str:
        """Give the next figure or table its number."""
        count = sum(known.startswith(label[:4]) for known in self.labels) + 1
        self._add(label, str(count))
        return str(count)

    def _add(self, label: str, number: str) -> None:
        if label in self.labels:
            raise UserError(f"{self._at(label)}: label `{label}` is used twice; give each its own.")
        self.labels[label] = number

    def _heading(self, node: Node) -> Node:
        level, (identifier, classes, _), inlines = node["c"]
        number = ""
        if self.number_sections and "unnumbered" not in classes:
            depth = level - self._top_level + 1
            counts = (self._section + [0] * depth)[:depth]
            counts[-1] += 1
            self._section = counts
            number = ".".join(str(count) for count in counts)
            span = [["", ["header-section-number"], []], [string(number)]]
            node["c"][2] = [{"t": "Span", "c": span}, {"t": "Space"}, *inlines]
        if identifier.startswith("sec-"):
            self._add(identifier, number)
        return node

    def _figure(self, node: Node) -> Node:
        attr = attributes(node)
        label = attr[0]
        if node["t"] == "Figure":
            caption, content = node["c"][1][1], node["c"][2]
        else:
            caption, content = self._split_caption(node)
        images = find(content, "Image")
        alts = [take_attribute(image["c"][0], "fig-alt") for image in images]
        alt = take_attribute(attr, "fig-alt") or next((text for text in alts if text), None)
        if len(images) != 1 or not alt:
            need = "`fig-alt`, a text that stands in for it" if images else "an image"
            need = "to be split: one image a label" if len(images) > 1 else need
            raise UserError(f"{self._at(label)}: figure `{label}` needs {need}.")
        image_attr = images[0]["c"][0]
        image_attr[2].append(["alt", alt])
        numbered = self._caption("Figure", self._next(label), caption)
        plain = [{"t": "Plain", "c": [images[0]]}]
        return {"t": "Figure", "c": [[label, ["figure"], []], [None, numbered], plain]}

    def _table(self, node: Node) -> Nodes:
        label = attributes(node)[0]
        if node["t"] == "Table":
            caption, node["c"][1] = node["c"][1][1], [None, []]
            node["c"][0][0] = ""
            content = [node]
        else:
            caption, content = self._split_caption(node)
        numbered = self._caption("Table", self._next(label), caption)
        # pandoc writes the caption of a figure below it; that of a table belongs above.
        return [
            raw_html(f'<figure id="{label}" class="table-float">\n<figcaption>'),
            *numbered,
            raw_html("</figcaption>"),
            *walk(content, _scrollable),
            raw_html("</figure>"),
        ]

    def _split_caption(self, node: Node) -> tuple[Nodes, Nodes]:
        content = node["c"][1]
        if len(content) < 2 or content[-1]["t"] != "Para":
            label = attributes(node)[0]
            raise UserError(
                f"{self._at(label)}: `{label}` needs a caption: one paragraph, the last in its div."
            )
        return [content[-1]], content[:-1]

    def _caption(self, name: str, number: str, caption: Nodes) -> Nodes:
        inlines = caption[0]["c"] if caption else []
        prefix = [string(f"{name}\u00a0{number}:"), {"t": "Space"}]
        return [{"t": "Plain", "c": [*prefix, *inlines]}]

    def _links(self, citations: Nodes) -> Nodes:
        linked: Nodes = []
        for citation in citations:
            if linked:
                linked += [string(","), {"t": "Space"}]
            linked += [self._link(citation), *citation["citationSuffix"]]
        return linked

    def _link(self, citation: Node) -> Node:
        label = citation["citationId"]
        if label not in self.labels:
            known = ", ".join(self.labels) or "none"
            raise UserError(
                f"{self._at('@' + label)}: `@{label}` refers to no label of this page (it has: "
                f"{known}); correct it, link to another page as [text](page.qmd#{label}), or "
                "write \\@ for the plain sign."
            )
        number = self.labels[label]
        if not number:
            raise UserError(
                f"{self._at('@' + label)}: `@{label}` needs `number-sections: true` and a "
                "heading that is numbered."
            )
        text = [string(f"{NAMES[label[:3]]}\u00a0{number}")]
        if citation["citationMode"]["t"] == "SuppressAuthor":
            text = [string(number)]
        elif citation["citationPrefix"]:
            text = [*citation["citationPrefix"], string(f"\u00a0{number}")]
        return {"t": "Link", "c": [["", ["quarto-xref"], []], text, [f"#{label}", ""]]}

    def _at(self, text: str) -> str:
        for index, line in enumerate(self.source.split("\n"), start=1):
            if text in line:
                return f"{self.where}:{index}"
        return self.where


def _scrollable(node: Node) -> Nodes | None:
    """Let a table that is wider than the page scroll by itself."""
    return [div(["table-scroll"], [node])] if node["t"] == "Table" else None
