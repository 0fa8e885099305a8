"""The training path: a run comes in, and how each switch of it stands goes out.

Open ``switches`` first: what each switch is, and what it rules out. ``choices`` says what the tuned
path makes of those that depend on the run.
"""
