"""Starts runs and writes their records, from one run to a whole study. No torch here.

In: a configuration or a study. Out: ``run.json`` for every run, whatever its end. Open `launch`
first for one run, `pipeline` for a study.
"""
