"""From tables to pages: sentences, figures, shown tables, and the renderer where Quarto is not.

In: the tables of `fp8study.analysis`. Out: ``report/_site``, CSV files, ``BENCHMARKS.md``. No
training number is computed here. Open `page` first; `site` is the renderer.
"""
