"""A model that can be trained: built, converted to FP8, compiled, sharded, bound to its optimizer.

In: a `fp8study.core.config.ResolvedConfig`. Out: the wrapped model and its optimizer. Nothing is
timed or recorded here. Open `sharding` first: it says in which order the parts are put together,
and why.
"""

import logging


def _tells_something(record: logging.LogRecord) -> bool:
    """Leave out what torchao logs at import of kernels and enumerations that nothing here uses."""
    said = record.getMessage()
    return not said.startswith("Failed to load ") and "as an opaque value type" not in said


# Before torchao is imported, which everything here does after this line.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).addFilter(_tells_something)
