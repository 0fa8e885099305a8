"""A small site that uses everything that the renderer knows."""

from pathlib import Path

CONFIG = """
project:
  type: website
  execute-dir: project
  render: [index.qmd, other.qmd]
website:
  title: Test site
  description: What it is about
  favicon: still.png
  navbar: {left: [{href: index.qmd, text: Start}, {href: other.qmd, text: 'A & B'}]}
format:
  html: {theme: cosmo, html-math-method: mathml}
execute: {echo: false, freeze: false}
date: today
jupyter: python3
"""


FRONT = "---\ntitle: The *title*\n---\n\n"


INDEX = (
    FRONT
    + """
```{python}
import os, sys
from IPython.display import Markdown, display
number, name = 3.14159, "fp8_row_*wise*"
```

## First {#sec-first}

Pi is `{python} f"{number:.2f}"`, raw `{python} 6 * 7`, named `{python} name`, and
`{python} Markdown("**strong**")`. Torch: `{python} "torch" in sys.modules`.
Refers ahead to @tbl-b and @fig-plot.
See [other](other.qmd#sec-x) and [data](data.csv). In `{python} os.path.basename(os.getcwd())`.

::: {#fig-plot}

```{python}
Markdown('```{=html}\\n<img src="still.png" alt="Rising &quot;line&quot; &amp; dots">\\n```')
```

A *curve* with [brackets], see @tbl-a

:::

```{python}
#| label: tbl-a
#| tbl-cap: >
#|   Two
#|   lines
Markdown("```{=html}\\n<table><tr><td>a&lt;b</td></tr></table>\\n```")
```

## Third {#sec-third}

```{python}
#| label: tbl-b
#| tbl-cap: Other
Markdown("```{=html}\\n<table></table>\\n```")
```

```{python}
display(Markdown("shown"))
Markdown("*twice*")
```

Text.^[A footnote.] $a^2$

A set has an order that changes from process to process: `{python} list(set("abcdefgh"))`.

```` markdown
```{python}
not_run()
```
````
"""
)


OTHER = """---
title: Other
---

## X {#sec-x}

Back to [start](index.qmd#sec-first). Write \\@fig-x. Seen: `{python} "number" in globals()`.
"""


STILL = b"\x89PNG\r\n\x1a\nstill"


def make_site(root: Path, index: str = INDEX, config: str = CONFIG) -> Path:
    root.mkdir(parents=True)
    (root / "_quarto.yml").write_text(config)
    (root / "index.qmd").write_text(index)
    (root / "other.qmd").write_text(OTHER)
    (root / "data.csv").write_text("a\n1\n")
    (root / "still.png").write_bytes(STILL)
    return root
