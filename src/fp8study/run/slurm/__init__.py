"""Runs as SLURM jobs: a profile comes in, jobs' requests and what became of them go out.

Snakemake's executor plugin submits and follows the jobs. Open ``profile`` first: what a run asks
for. ``jobs`` asks SLURM what became of one that could not say so itself.
"""
