"""What a run sees of itself: time, memory, energy, kernels, FLOPs, noise, and its own health.

In: a model that trains. Out: plain dictionaries for the record. Open `instruments` first for what
watches the timed window, `audit` for the proof that FP8 ran and all weights were trained.
"""
