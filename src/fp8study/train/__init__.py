"""The training process: the loop, what it prints, and what it measures after its last step.

In: a run's folder with ``config.yaml`` and ``job.json``. Out: ``metrics.jsonl`` and
``outcome.json``. Started as ``python -m fp8study.train`` by `fp8study.run.launch`. Open `trainer`
first.
"""
