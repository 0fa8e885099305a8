"""Laws of memory and speed: what a run would take that nobody has done yet. No torch here.

In: a resolved configuration, a model's shape, and committed records to fit a few constants to. Out:
GiB, milliseconds and tokens per second by part. Open `memory` first: it shows how a law is made of
counted parts and few constants, which `constants.json` keeps with the records they are from.
"""
