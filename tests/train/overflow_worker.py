"""Train as `fp8study.train` does, with a loss scale at which the first gradients overflow."""

from __future__ import annotations

from functools import partial

import torch

from fp8study.train import __main__ as train

if __name__ == "__main__":
    torch.amp.GradScaler = partial(torch.amp.GradScaler, init_scale=2.0**24)  # type: ignore[misc]
    train.leave(train.main())
