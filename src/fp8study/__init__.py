"""fp8study: should I pre-train in FP8, on my GPUs, for my model?

Data flows one way: study, config, run, record, table, verdict, report. `core` says what a run is,
`data`, `model`, `measure` and `train` do it, `run` starts it, `analysis` and `report` answer. The
half that answers never imports torch, so that a report renders on a laptop from committed records.
"""

__version__ = "0.1.0"
