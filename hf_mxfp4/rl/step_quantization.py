# SPDX-License-Identifier: Apache-2.0
"""One quantization of each weight per optimizer step, for its rollouts, log-probabilities and passes, and the count of
quantizations; and what the trainers of this package do around a training.

Quantizations are kept from the first `training_step` of an optimizer step to the end of the last one, outside of which
a Trainer's optimizer steps, loads checkpoints, calls callbacks and evaluates.
"""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from accelerate import Accelerator
from torch import nn
from transformers import TrainerCallback

from ..layers import TRAINABLE
from ..ops import WeightCache, weight_quantizations
from ..utils import warn_of_slow_bfloat16
from .callbacks import StepMovementCallback
from .callbacks.run_log import RunLogCallback, run_facts
from .exact_resume import ExactResumeMixin
from .exit_checkpoint import CheckpointOnExit, keep_random_states


class StepQuantization:
    """Keeps what `step_weights` of ``args`` says, and logs how often weights were quantized.

    Metrics: `quantization/weights_per_step`, quantizations of weights for forward products in an optimizer step, its
    rollouts included; `quantization/dgrad_weights_per_step`, those of schemes whose Dgrad takes another. Each matrix
    of experts counts; evaluation, callbacks and pushes to vLLM do not. ``reference`` keeps the reference policy's.
    """

    def __init__(
        self,
        model: nn.Module,
        reference: nn.Module | None,
        args: Any,
        accelerator: Accelerator,
        record: Callable[[str, float], None],
    ):
        self._accelerator = accelerator
        self._record = record
        self._is_counted = any(isinstance(module, TRAINABLE) for module in model.modules())
        self._counts: Counter[str] = Counter()
        self._step: int | None = None
        self.is_training = False
        plugin = getattr(accelerator.state, "deepspeed_plugin", None)
        is_zero3 = plugin is not None and plugin.zero_stage == 3
        self.is_sharded = is_zero3 or getattr(accelerator.state, "fsdp_plugin", None) is not None
        self.form = args.step_weights
        # FSDP and ZeRO-3 free gathered weights between passes: there is nothing to keep quantizations of.
        if self.is_sharded or args.step_weights == "uncached":
            self.form = "none"
        self._policy = WeightCache(model, form=self.form)
        references = []
        if reference is not None:
            references.append(reference)
        self.reference = WeightCache(*references, form=self.form)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Around a whole training, before which weights may have been written, and which may be cut short."""
        self.end()
        self.is_training = True
        try:
            yield
        finally:
            self.is_training = False
            self._release()

    @contextlib.contextmanager
    def micro_batch(self, step: int) -> Iterator[None]:
        """Around `training_step` of one micro-batch of the optimizer step after ``step`` others."""
        if step != self._step:  # the one before was cut short
            self.end()
            self._step = step
        before = weight_quantizations()
        with self._kept():
            yield
        self._counts += weight_quantizations() - before
        if self._accelerator.sync_gradients:
            counts = self._counts
            self.end()
            if self._is_counted:
                self._record("quantization/weights_per_step", counts["fprop"])
            if counts["dgrad"]:
                self._record("quantization/dgrad_weights_per_step", counts["dgrad"])

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around an evaluation, which writes no weight."""
        self.end()
        try:
            with self._kept():
                yield
        finally:
            self.end()
            if not self.is_training:
                self._release()

    @contextlib.contextmanager
    def serving_graphs(self) -> Iterator[None]:
        """Within this context CUDA graphs that are captured read the policy's weights that are kept. Before they are
        replayed in a later rollout, [`refresh_graphs`] is called."""
        with self._policy.serving_graphs():
            yield

    def refresh_graphs(self) -> bool:
        """See [`WeightCache.refresh`], for the policy."""
        return self._policy.refresh()

    def end(self) -> None:
        """Use nothing that is kept, and forget what was counted: the weights are about to change, or may have changed.
        The next step's quantized weights are written to the same memory."""
        self._policy.clear()
        self.reference.clear()
        self._counts = Counter()
        self._step = None

    def _release(self) -> None:
        """Give back the memory of quantized weights."""
        self.end()
        self._policy.release()
        self.reference.release()

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        if self.form == "none":
            yield
            return
        with self._policy.open(), self.reference.open():
            yield


class QuantizedTrainerMixin(ExactResumeMixin):
    """What trainers of this package have in common around a training: TRL's trainers with metrics by mode.

    Attributes:
        quantization: keeps quantized weights within an optimizer step.
        exit_checkpoint: saves the last finished step, whatever ends training.
        run_log: writes `run_log.jsonl`; `None` without `report_every`.
    """

    quantization: StepQuantization
    _grad_norm: Any = None

    def _add_run_callbacks(self, *first: TrainerCallback) -> None:
        """Add the run log and the checkpoint on exit.

        First in line: what ``first`` add to the logs reaches the trackers, which are callbacks too, and the run log has
        written it down when a tracker fails.
        """
        if self.args.bf16 and self.accelerator.device.type == "cpu":
            warn_of_slow_bfloat16()
        callbacks = list(first)
        self.run_log = None
        if self.args.report_every:
            self.run_log = RunLogCallback(functools.partial(run_facts, self))  # gathered when training begins
            callbacks.append(self.run_log)
        self.callback_handler.callbacks[:0] = callbacks
        self.exit_checkpoint = CheckpointOnExit(self)
        self.add_callback(self.exit_checkpoint)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any):
        """[`transformers.Trainer.train`]; an exception, Ctrl-C or SIGTERM leaves a checkpoint of the last finished step
        behind.

        Raises `ValueError` when the checkpoint to resume from is not whole, or there is none that is.
        """
        for callback in self.callback_handler.callbacks:  # of the user, after the run log in line
            if isinstance(callback, StepMovementCallback) and callback.record is None:
                callback.record = self._record
        with self.exit_checkpoint.checkpoint_on_exit(), self.quantization.training():
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """[`transformers.Trainer.evaluate`], which leaves training as it was, also where it is cut short: what is
        sampled draws from the random generators of training.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(keep_random_states())
            stack.enter_context(self.quantization.evaluation())
            return super().evaluate(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self.exit_checkpoint.at_step_end():
            super()._save_checkpoint(*args, **kwargs)

    def log(self, *args: Any, **kwargs: Any) -> None:
        with self.exit_checkpoint.logging():
            super().log(*args, **kwargs)

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        self._grad_norm = super()._get_grad_norm(*args, **kwargs)  # for a log that a failure has prevented
        return self._grad_norm

    def _record(self, name: str, value: float) -> None:
        """Add to the next training log, where values of one name are averaged."""
        self._metrics["train"][name].append(value)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        # The epoch has begun before a Trainer loads them, and the states of then belong to no step.
        self.exit_checkpoint.remember(self.state.global_step)
