"""A model that can be trained: built, converted to FP8, compiled, sharded, bound to its optimizer.

In: a `fp8study.core.config.ResolvedConfig`. Out: the wrapped model and its optimizer. Nothing is
timed or recorded here. Open `sharding` first: it says in which order the parts are put together,
and why.
"""

import logging


def _tells_something(record: logging.LogRecord) -> bool:
    """Leave out what is logged at import of kernels and enumerations that nothing here uses.

    Without Triton our operators are made all the same: a CPU asks for no kernel of theirs, and on
    a GPU the first one that is asked for names what is missing.
    """
    said = record.getMessage()
    unused = said.startswith(("Failed to load ", "Triton not available"))
    return not unused and "as an opaque value type" not in said


# Before torchao is imported, which everything here does after this line.
for _name in ("torchao", "torch.utils._pytree", "torch._library.triton"):
    logging.getLogger(_name).addFilter(_tells_something)
