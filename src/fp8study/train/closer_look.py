"""What a run measures after its timed window, because it would have disturbed it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

import torch

from fp8study.core.audit_rules import without_hidden_products
from fp8study.measure.audit import audited_products
from fp8study.measure.gemm_peaks import linear_shapes, measure_ceilings
from fp8study.measure.instruments import Instruments
from fp8study.measure.overhead import BLOCK_STEPS, measure_overhead
from fp8study.measure.profiling import profiled_step
from fp8study.train.progress import log_step
from fp8study.train.step_graph import Results

if TYPE_CHECKING:
    from fp8study.train.trainer import Trainer

Step = Callable[[], Results]


def look_closer(trainer: Trainer, run_dir: Path) -> None:
    """Fill `Trainer.found` and complete `Trainer.audit` after the last step; on every rank.

    The further steps that it does train the model on, but none of the run's results sees them.
    `run_dir` receives the trace of the profiled one.
    """
    config, device = trainer.config, trainer.device
    is_main = trainer.state.is_main_process
    step = partial(trainer.step, config.num_steps - 1, logs_norm=False)  # few steps read it
    if config.measure_overhead:
        trainer.found["overhead"] = measure_overhead(step, partial(_watched, trainer), device)
    trainer.launch_by_kernel()  # a replay would show kernels, and not what asked for them
    if config.profile:
        trainer.found["step"] = profiled_step(step, run_dir, is_main, device, config)
        found = audited_products(trainer.found["step"], trainer.work, bool(config.fp8_emulate))
        trainer.audit |= without_hidden_products(found, config.to_dict())
    if is_main and device.type == "cuda":
        torch.cuda.empty_cache()
        shapes = linear_shapes(trainer.bare_model, config)
        num_tokens = config.tokens_per_pass
        found = measure_ceilings(shapes, num_tokens, config.precision, device)
        if config.fast_accumulation == "all":  # of which this measures nothing
            found["run_tflops"] = None
        trainer.found["ceilings"] = found


@contextmanager
def _watched(trainer: Trainer, step: Step) -> Iterator[Callable[[], None]]:
    """Give a step as the timed window does it: clock, power meter, metrics and progress."""
    watch = Instruments(trainer.config, trainer.device, num_steps=BLOCK_STEPS)
    watch.start()
    with TemporaryFile("w", encoding="utf-8") as metrics:

        def measured() -> None:
            for done in watch.clock.end_step(*step()):
                if trainer.state.is_main_process:
                    log_step(done, trainer.config, trainer.work, metrics, trainer.pace)

        watch.power.open_window()
        try:
            yield measured
        finally:
            watch.stop()
