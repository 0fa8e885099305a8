"""Render a Quarto website project where Quarto itself is not installed.

`quarto render report/` is the reference; this package gives the same text, figures, tables and
cross-references from the same sources, with nbclient running the cells and pandoc doing the
Markdown. It is not a Quarto clone: it supports the subset below, and anything else raises a
`UserError` rather than passing through unrendered.

- `_quarto.yml`: `project` (`type: website`, `output-dir`, `execute-dir`, `render` as a list of
  files), `website` (`title`, `description`, `navbar.left`, `sidebar.contents`), `format.html`
  (`toc`, `toc-depth`, `number-sections`, `embed-resources`, `fig-width`, `fig-height`,
  `fig-dpi`; options that only change looks, such as `theme`, are accepted and ignored),
  `execute` (`echo`, `warning`, `enabled`; `freeze`, `cache` and `error` only as `false`).
- Front matter: `title`, `subtitle`, `description`, `author`, `date`, `lang`,
  `jupyter: python3`, and a page's own `execute`, `toc`, `number-sections`.
- `{python}` cells with the options `label`, `echo`, `include`, `eval`, `output`, `warning`,
  `fig-cap`, `fig-alt`, `tbl-cap`, and inline `{python} expr`. One kernel a page.
- Figures, tables and sections labelled `fig-`, `tbl-`, `sec-`, referred to as `@fig-x`,
  `[@fig-x]`, `[-@fig-x]` or `[Plot @fig-x]` on the same page.
- Callouts, tab sets (as consecutive sections), footnotes, mathematics (MathML), links between
  pages, and whatever else pandoc's Markdown does by itself.

We are stricter than Quarto in three places: an unresolved reference, a local link that leads
nowhere and a numbered figure without `fig-alt` are errors, not warnings.
"""

from fp8study.report.site.build import render_site

__all__ = ["render_site"]
