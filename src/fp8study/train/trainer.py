"""One process's share of a run: set up, trained, watched, and summed up."""

from __future__ import annotations

import gc
import math
import signal
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

import torch
from accelerate import PartialState
from accelerate.utils import set_seed

from fp8study.core.audit_rules import problems
from fp8study.core.config import ResolvedConfig
from fp8study.core.errors import UserError
from fp8study.core.presets import text_config
from fp8study.core.recipes import precision_at
from fp8study.data.tokens import BlockOrder, batch
from fp8study.measure.audit import FirstStepAudit, conversion, stale_casts
from fp8study.measure.clock import FinishedStep, compile_cache
from fp8study.measure.flops import (
    beyond_fp8_pct,
    num_matmul_parameters,
    uncounted_pct,
    work_per_token,
)
from fp8study.measure.instruments import Instruments
from fp8study.measure.noise_meter import NoiseMeter
from fp8study.model.attention import imply_causal_mask, preferred_attention
from fp8study.model.build import blaming_model, build_model
from fp8study.model.compiling import wholly_compiled
from fp8study.model.float8 import compute_in
from fp8study.model.optimizer import make_optimizer
from fp8study.model.sharding import after_update, gradient_sync, make_accelerator, prepare
from fp8study.model.updates import Look, make_updates, untrained_weights
from fp8study.run.children import answering
from fp8study.run.job import Job, Outcome, StartupClock
from fp8study.train.facts import binding_facts, torch_versions, warnings
from fp8study.train.nodes import rank_layout
from fp8study.train.pace import Pace
from fp8study.train.progress import learning_rate, log_step
from fp8study.train.step_graph import NotRecorded, Results, StepGraph
from fp8study.train.summary import headline, notes_on_timing, summarise
from fp8study.train.validation import validation_loss

if TYPE_CHECKING:
    from fp8study.train.checkpoint import Checkpoints

#: Steps between two looks at the gradients' norm, where nothing is clipped: it reads them all.
GRADIENT_NORM_EVERY = 10


class Diverged(Exception):
    """The loss is no longer a number."""


class Trainer:
    """One process's share of a run."""

    def __init__(self, config: ResolvedConfig, job: Job, startup: StartupClock) -> None:
        self.config, self.job, self.startup = config, job, startup
        self.state = PartialState(cpu=not torch.cuda.is_available())
        self.device = self.state.device
        if self.state.num_processes != config.num_gpus:
            raise UserError(
                f"num_gpus: {config.num_gpus}, but {self.state.num_processes} processes were "
                "started; start runs through the notebook or `fp8study run`"
            )
        if job.gpus and torch.cuda.device_count() != config.gpus_per_node:
            raise RuntimeError(
                f"{torch.cuda.device_count()} GPUs are visible, not {config.gpus_per_node}: a "
                "package has touched CUDA before the run had its GPUs; this is a defect of fp8study"
            )
        startup.end("device")
        set_seed(config.seed)
        dtype = torch.float32 if config.master_dtype == "fp32" else torch.bfloat16
        weights = None if job.first_step else job.start_from
        model = build_model(config.model, dtype, self.device, config.seed, weights)
        startup.end("model")
        self.uncounted_pct, self.beyond_fp8_pct = uncounted_pct(model), beyond_fp8_pct(model)
        with preferred_attention(config, self.device):  # fails here without its package
            self.needs_masks = imply_causal_mask(model, config)
        num_parameters = sum(p.numel() for p in model.parameters())
        hf_config = model.config
        accelerator = make_accelerator(config, model)
        with blaming_model(config):
            self.model, self.optimizer = prepare(
                config, accelerator, model, partial(make_optimizer, config)
            )
        after = after_update(config, self.model)
        self.updates = make_updates(config, self.model, self.optimizer, after)
        self.graph = None
        if config.step_launch == "as_graph" and not self.needs_masks:
            self.graph = StepGraph(self._to_be_recorded, self.model, self.updates.adamw)
        startup.end("sharding")
        # Unwrapped: DDP prefixes every module's name, and the skip patterns would not match.
        self.bare_model = accelerator.unwrap_model(self.model)
        self.work = work_per_token(self.bare_model, hf_config, config)
        self.audit: dict[str, Any] = conversion(self.bare_model, config)
        self.noise = NoiseMeter(config, job.data, self.bare_model, self.device)
        self.model_facts: dict[str, Any] = {
            "vocab_size": text_config(hf_config).vocab_size,
            "num_parameters": num_parameters,
            "num_matmul_parameters": num_matmul_parameters(self.bare_model),
            "flops_per_token": self.work.flops_per_token,
            "fp8_flops_per_token": self.work.fp8_flops_per_token,
        } | binding_facts(self)
        self.tokens = job.data.tokens()
        self.order = BlockOrder(config, job.data.num_train_tokens)
        self.instruments = Instruments(config, self.device, config.num_steps)
        self.first_step = job.first_step
        self.pace = Pace(config, self.first_step)
        self.steps: list[FinishedStep] = []
        self.found: dict[str, Any] = {}
        #: Of the step before; None before the first that changes something.
        self.precision: str | None = None
        self._is_audited = False
        self.notes: list[str] = []
        #: Number of completed optimizer steps → loss of the validation sequences, nats per token.
        self.validation_losses: dict[int, float] = {}

    def train(self, metrics: TextIO | None, checkpoints: Checkpoints) -> None:
        """Run all steps; `steps` holds them in order, also where training stops early.

        `metrics` receives one JSON line per logged step; None on all ranks but the first.

        Raises:
            Diverged: A loss was not finite.
            Interrupted: The run was told to end; `checkpoints` holds what was done.
            UserError: Every step was skipped.
        """
        config, watch = self.config, self.instruments
        self.startup.end("rest")
        self.noise.measure_if_due(0)
        step = self.first_step
        watch.start(step)
        try:
            while step < self.pace.num_steps:
                if step == self.pace.first_timed:
                    settle_garbage()
                    self._log(watch.open_window(self.graph is not None), metrics)
                with nullcontext() if step else blaming_model(config):
                    done = self.step(step)
                self._log(watch.clock.end_step(*done, checkpoints.is_told), metrics)
                step += 1
                self.noise.measure_if_due(step)
                if step < config.num_steps:  # the last one follows the timed window
                    self.validate_if_due(step)
                if self.pace.wants_look(step):
                    self._log(watch.pause(), metrics)
                    self.pace.look(self.steps)
                    watch.go_on()
                is_told = watch.clock.is_told  # of a step read, so alike on all ranks
                if step < self.pace.num_steps and (is_told or checkpoints.is_due(step)):
                    self._log(watch.pause(), metrics)
                    checkpoints.save(step)
                    if is_told:
                        raise checkpoints.interrupt(step)
                    watch.go_on()
            if self.updates.scaling().get("num_skipped") == step:
                self._log(watch.clock.finish(), metrics)  # or its loss is no number
                raise UserError(
                    f"num_steps: {step} are too few for precision=fp16, whose loss scale halves "
                    "where a gradient overflows: one did in each, and nothing was trained; raise it"
                )
            was_open = self.pace.first_timed is not None and self.pace.first_timed < step
            self._log(watch.close_window() if was_open else watch.clock.finish(), metrics)
            if checkpoints.is_due(step) and step > self.first_step:
                checkpoints.save(step)
        finally:
            watch.stop()

    def validate_if_due(self, steps_done: int) -> None:
        """Score the validation sequences, if it is their turn; every rank must call it."""
        if steps_done in self.config.validation_steps:
            self.validation_losses[steps_done] = validation_loss(
                self.config, self.bare_model, self.tokens, self.order.held_out(), self.state
            )

    def step(self, step: int, logs_norm: bool = True) -> Results:
        """Do one optimizer step; return its loss on this rank and, now and then, gradient norm.

        Steps count from 0. Where gradients are clipped, their norm is read in every step, else
        every `GRADIENT_NORM_EVERY` ones if it `logs_norm`.

        Raises:
            RuntimeError: As `wholly_compiled`.
        """
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        audit = None
        if precision_at(config, step) != self.precision:
            audit = self._begin_precision(step)
        with wholly_compiled(config), preferred_attention(config, self.device):
            if self.graph is not None and self.graph.is_due:
                try:
                    return self.graph.replay(self._ids(step))
                except NotRecorded as error:
                    self.notes.append(self.graph.taken_back(error))
                    self.graph = None
            with nullcontext() if self.graph is None else self.graph.by_kernel():
                loss, gradient_norm = self._by_kernel(step, audit, logs_norm)
        if audit is not None and self.updates.was_skipped:
            self.precision = None  # the next step is the first to change anything
        elif audit is not None:
            self._judge(audit, step)
        return loss, gradient_norm

    def launch_by_kernel(self) -> None:
        """Do further steps kernel by kernel. NCCL ends only when no graph holds calls of it."""
        if self.graph is not None:
            self.graph.let_go()
            self.graph = None

    def _by_kernel(self, step: int, audit: FirstStepAudit | None, logs_norm: bool) -> Results:
        """Launch a step's kernels one by one."""
        loss = torch.zeros((), device=self.device)
        last = self.config.gradient_accumulation_steps - 1
        for micro_step in range(last + 1):
            if micro_step == last:
                wants_norm = logs_norm and step % GRADIENT_NORM_EVERY == 0
                self.updates.expect(wants_norm, self._look(audit) if audit else None)
            loss += self._micro_step(self._ids(step, micro_step), is_last=micro_step == last)
        return loss, self.updates.finish()

    def _to_be_recorded(self, ids_BT: torch.Tensor) -> Results:
        """Do a step on tokens where they are; where gradients are clipped it gives their norm."""
        self.updates.expect(wants_norm=False)
        return self._micro_step(ids_BT, is_last=True), self.updates.finish()

    def _look(self, audit: FirstStepAudit) -> Look:
        """Return what looks at complete gradients before the first update uses them."""

        def look(parameters: Iterable[torch.nn.Parameter]) -> None:
            self.instruments.memory.gradients_ready(self.model)
            audit.gradients_ready(parameters)

        return look

    def _begin_precision(self, step: int) -> FirstStepAudit:
        """Compute in the precision of a step from here on, and look at what that step changes."""
        config, self.precision = self.config, precision_at(self.config, step)
        if config.precision_schedule:
            num_fp8 = compute_in(self.bare_model, self.precision)
            row = {"step": step, "precision": self.precision, "num_linear_fp8": num_fp8}
            self.audit.setdefault("phases", []).append(row)
        audit = FirstStepAudit(
            self.bare_model, self.optimizer, untrained_weights(config, self.bare_model)
        )
        audit.before()
        return audit

    def _judge(self, audit: FirstStepAudit, step: int) -> None:
        """Keep the audit of a precision's first step; stop a run that trains something else."""
        seen = audit.after()
        if phases := self.audit.get("phases"):
            phases[-1] |= {name: seen[name] for name in ("num_frozen", "stalled_pct")}
        if not self._is_audited:
            self._is_audited = True
            earlier = {n: v for n, v in self.audit.items() if n == "stalled_pct"}  # at a peak rate
            self.audit |= seen | earlier
            self.instruments.memory.first_step_done(self.model, self.optimizer)
        found = problems(self.audit | seen)
        if found and self.config.optimizer_binding == "after_conversion":
            raise RuntimeError(f"the audit failed: {'; '.join(found)}")

    def _ids(self, step: int, micro_step: int = 0) -> torch.Tensor:
        """Return this rank's tokens of a micro-step on its device; B: sequences, T: tokens."""
        blocks = self.order.block_ids(step, micro_step, self.state.process_index)
        ids_BT = torch.from_numpy(batch(self.tokens, blocks, self.config.sequence_length))
        if self.device.type == "cuda":
            ids_BT = ids_BT.pin_memory().to(self.device, non_blocking=True)
        return ids_BT

    def _micro_step(self, ids_BT: torch.Tensor, is_last: bool) -> torch.Tensor:
        with gradient_sync(self.model, is_last, self.config):
            loss = self.model(input_ids=ids_BT, labels=ids_BT).loss
            loss = loss / self.config.gradient_accumulation_steps
            self.updates.scaled(loss).backward()
        return loss.detach()

    def _log(self, finished: Iterable[FinishedStep], metrics: TextIO | None) -> None:
        for done in finished:
            self.steps.append(done)
            if metrics is not None:
                log_step(done, self.config, self.work, metrics, self.pace)
            if not math.isfinite(done.loss):
                raise Diverged(
                    f"loss is {done.loss} at step {done.step + 1}; {self._gradient_history()}; try "
                    "a lower learning_rate, a longer lr_warmup_steps or max_grad_norm=1"
                )

    def _gradient_history(self) -> str:
        seen = [s for s in self.steps if s.gradient_norm is not None][-2:]
        norms = [f"{s.gradient_norm:.3g} at step {s.step + 1}" for s in seen]
        return f"the gradient norm was {', '.join(norms)}"

    def outcome(self, status: str, detail: str | None) -> Outcome:
        """Collect the results over all ranks; every rank must call it."""
        names, first = self.job.gpus.values(), self.pace.first_timed
        num_warm_up = len(self.steps) if first is None else first
        results = summarise(self.steps, self.config, self.work, names, num_warm_up, self.first_step)
        results |= {"startup_seconds": self.startup.busy_seconds} | compile_cache()
        if scaling := self.updates.scaling():
            self.found.setdefault("loss_scaling", scaling)  # what looks closer does further steps
        found = self.found | {"startup": self.startup.parts}
        found |= {"warm_up": warm_up} if (warm_up := self.pace.facts()) else {}
        if self.config.is_timed:  # else they would describe something else
            found |= self.instruments.facts(results["num_timed_steps"])
        results |= headline(results, found)
        if scored := self.validation_losses:
            results["validation_losses"] = [{"step": n, "loss": x} for n, x in scored.items()]
            if self.config.num_steps in scored:
                results["validation_loss"] = scored[self.config.num_steps]
        if status == "completed":  # else weights may be no numbers
            self.audit |= stale_casts(self.bare_model)
        notes = [*warnings(self), *self.pace.warnings(), *notes_on_timing(results), *self.notes]
        return Outcome(
            status,
            detail,
            versions=torch_versions(),
            machine=rank_layout(self.config),
            model=self.model_facts,
            results=results,
            audit=self.audit if "stalled_pct" in self.audit else {},  # no step was looked at
            instruments=found,
            noise=self.noise.to_dict(),
            warnings=notes,
        )


def settle_garbage() -> None:
    """Collect garbage now, and leave what exists by now out of later collections.

    One that looks at all objects of a process takes about 0.3 s, and all ranks wait for it. An
    interrupt waits, too: one that meets an object's finaliser would be lost.
    """
    told: list[int] = []
    # Not by a mask: it holds for one thread, and torch has others that would take the signal.
    with answering((signal.SIGINT,), lambda number, frame: told.append(number)):
        gc.collect()
        gc.freeze()
    if told:
        raise KeyboardInterrupt
