"""Render the report where Quarto itself is not installed.

`quarto render report/` is the reference; this package gives the same text, figures, tables and
cross-references from the same sources. It is no Quarto clone: it supports what the report uses,
and refuses the rest with one line that names the page and the place.

- `_quarto.yml`: the options of `config.Config`.
- Front matter: `title` and `subtitle`.
- `{python}` cells that show Markdown, with the options `label` (`tbl-`) and `tbl-cap`; inline
  `{python} expr`; figures in a div `#fig-x` whose last paragraph is their caption.
- References `@fig-x` and `@tbl-x` within a page, links between pages, mathematics, and what else
  pandoc's Markdown does by itself.

We are stricter than Quarto where a reader would be let down: a reference or local link that leads
nowhere is an error.

In: a folder with `_quarto.yml`. Out: `_site`. Open `build` first: it reads the pages (`config`,
`qmd`), starts `__main__` as a process of its own, which runs the cells (`execute`) and writes the
pages (`pandoc`, `filter.lua`), and checks what came out (`links`).
"""

from fp8study.report.site.build import render_site

__all__ = ["render_site"]
