"""A model that can be trained: built, converted to FP8, compiled, sharded, bound to its optimizer.

In: a `fp8study.core.config.RunConfig`. Out: the wrapped model and its optimizer. Nothing is timed
or recorded here. Open `sharding` first: it says in which order the parts are put together, and why.
"""
