# SPDX-License-Identifier: Apache-2.0
"""One quantization of each weight per optimizer step, and their count: kept from its first `training_step` to the end
of the last one, outside of which a Trainer's optimizer steps, loads checkpoints, calls callbacks and evaluates."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

from accelerate import Accelerator
from torch import nn

from ..gemm import GemmSpec, WeightCache, gemm_states, weight_quantizations
from .config import MXFP4GRPOConfig


class StepQuantization:
    """Keeps what the `step_weights` option says, and logs how often weights were quantized.

    Metrics: `quantization/weights_per_step`, quantizations of weights for forward products in an optimizer step, its
    rollouts included; `quantization/dgrad_weights_per_step`, those of schemes whose Dgrad takes another. Each matrix
    of experts counts; evaluation, callbacks and pushes to vLLM do not.
    """

    def __init__(
        self,
        model: nn.Module,
        reference: nn.Module | None,
        args: MXFP4GRPOConfig,
        accelerator: Accelerator,
        record: Callable[[str, float], None],
    ):
        self._accelerator, self._record = accelerator, record
        self._is_counted = any(isinstance(state.spec, GemmSpec) for state in gemm_states(model))
        self._counts: Counter[str] = Counter()
        self._step: int | None = None
        is_off = _is_sharded(accelerator) or args.step_weights == "auto" and not args.cache_rollout_weights
        self.form = "none" if is_off else args.step_weights
        self._policy = WeightCache(model, form=self.form)
        self._reference = WeightCache(*([] if reference is None else [reference]), form=self.form)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Around a whole training, before which weights may have been written, and which may be cut short."""
        self.end()
        try:
            yield
        finally:
            self.end()

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
        with self.training(), self._kept():
            yield

    def release_reference(self) -> None:
        """Let go what is kept of the reference, which takes memory that the passes of training need."""
        self._reference.clear()

    def end(self) -> None:
        """Let go what is kept, and forget what was counted: the weights are about to change, or may have changed."""
        self._policy.clear()
        self._reference.clear()
        self._counts, self._step = Counter(), None

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        if self.form == "none":
            yield
            return
        with self._policy.open(), self._reference.open():
            yield


def _is_sharded(accelerator: Accelerator) -> bool:
    """Whether FSDP or DeepSpeed ZeRO-3 shards the weights over processes."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    is_zero3 = plugin is not None and plugin.zero_stage == 3
    return is_zero3 or getattr(accelerator.state, "fsdp_plugin", None) is not None
