"""Gradient noise against FP8's error: inner products of a run's gradients come in, tables go out.

Open ``moments`` first, which explains the estimates; ``tables`` puts them in rows.
"""
