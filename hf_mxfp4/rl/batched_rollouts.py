# SPDX-License-Identifier: Apache-2.0
"""Rollouts by transformers' continuous batching (`use_transformers_continuous_batching`), in the place of TRL's way,
which casts the master weights to 16 bits in place, records no log-probabilities and makes a manager for each rollout.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import ContinuousBatchingConfig, ContinuousBatchingManager
from transformers.generation.continuous_batching.utils import WorkloadHints

from .._logging import get_logger
from ..integrations.continuous_batching import prepare_manager
from .exit_checkpoint import keep_random_states


#: Tokens of a forward pass, as in transformers.
_MOST_BATCH_TOKENS = 8192


class BatchedRollouts:
    """Samples rollouts of a policy with one manager of transformers for a whole training, which keeps its key-value
    cache and CUDA graphs from rollout to rollout.

    Args:
        model: the policy, which PEFT may have wrapped.
        generation_config: how to sample.
        config: of the manager. Log-probabilities are always recorded.
        refresh: makes stale quantized weights that graphs read again; returns whether the graphs may be replayed.

    Raises `ValueError` where ``generation_config`` asks for something that continuous batching leaves out.
    """

    def __init__(
        self,
        model: nn.Module,
        generation_config: GenerationConfig,
        config: ContinuousBatchingConfig,
        refresh: Callable[[], bool],
    ):
        self._model: Any = next(module for module in model.modules() if isinstance(module, GenerationMixin))
        self._generation_config = generation_config
        self._config = copy.deepcopy(config)
        self._config.return_logprobs = True
        self._refresh = refresh
        self._manager: ContinuousBatchingManager | None = None
        self._was_noisy = False
        self._check_processors()

    def _check_processors(self) -> None:
        # transformers drops them with a warning, or passes them the last token in place of the sequence.
        processors = self._model._get_logits_processor(self._generation_config)
        names = [type(p).__name__ for p in processors if not getattr(p, "supports_continuous_batching", None)]
        if names:
            raise ValueError(
                f"continuous batching of transformers does not support {', '.join(names)}: sample with temperature, "
                "top_k and top_p alone (no min_p, repetition_penalty or others in generation_kwargs), or set "
                "use_transformers_continuous_batching=False"
            )

    def generate(self, prompts: list[list[int]], is_noisy: bool = False) -> tuple[list[list[int]], list[list[float]]]:
        """Return the completion of each prompt, and the log-probability that each of its tokens was drawn with.

        To be called in evaluation mode, under the autocast of the policy, and while kept weights are open.

        Args:
            prompts: tokens, each completed once.
            is_noisy: whether forward functions of the policy are replaced by noisy ones.

        Raises `RuntimeError` with the error of transformers when a completion is missing.
        """
        try:
            with self._unchanged_model():
                manager = self._ready_manager(prompts, is_noisy)
                outputs = self._run(manager, prompts)
        except BaseException:
            self.close()
            raise
        return [output.generated_tokens for output in outputs], [output.logprobs for output in outputs]

    def close(self) -> None:
        """Stop the manager, and give back its memory. The next rollout makes another one."""
        manager = self._manager
        self._manager = None
        if manager is None:
            return
        if manager.is_running():
            manager.stop(hard_stop=True)
        manager.destroy()
        manager.batch_processor = None

    @contextlib.contextmanager
    def _unchanged_model(self) -> Iterator[None]:
        """Restore on exit what the manager changes in the model: its attention, and a reference to the manager, with
        which the model could not be copied."""
        attention = self._model.config._attn_implementation
        try:
            yield
        finally:
            if self._model.config._attn_implementation != attention:
                self._model.set_attn_implementation(attention)
            vars(self._model).pop("_cached_continuous_batching_manager", None)

    def _ready_manager(self, prompts: list[list[int]], is_noisy: bool) -> ContinuousBatchingManager:
        """Return the manager for a rollout of the weights of now."""
        if self._manager is not None:
            n_tokens = _longest(prompts) + self._generation_config.max_new_tokens
            if n_tokens > self._manager.batch_processor.cache.max_tokens_read:
                self.close()
        if self._manager is not None:
            has_graphs = any(self._manager.continuous_batching_config.cuda_graph_booleans)
            # Graphs call no forward function: those that were captured without noise have none.
            if has_graphs and (is_noisy != self._was_noisy or not self._refresh()):
                self.close()
        self._was_noisy = is_noisy
        if self._manager is None:
            self._manager = self._new_manager(prompts)
        else:
            self._manager.switch_to_cb_friendly_attn(self._model, self._config.auto_switch_to_flash)
            # Keys and values of prompts that came before are those of other weights.
            self._manager.batch_processor.cache.reset()
        return self._manager

    def _new_manager(self, prompts: list[list[int]]) -> ContinuousBatchingManager:
        # A manager seeds the random generators, and its graphs draw from them when they are captured: a run that is
        # resumed makes another manager, and is to go on with the same numbers.
        restore_random = keep_random_states()
        try:
            try:
                manager = self._warm_manager(prompts, self._sized(prompts))
            except MemoryError:  # some prompts have to wait for others then
                manager = self._warm_manager(prompts, self._config)
        finally:
            restore_random()
        get_logger().info(
            "rollouts by continuous batching: attention %s, CUDA graphs (prefill, decoding) %s, %d tokens in the cache",
            self._model.config._attn_implementation, manager.continuous_batching_config.cuda_graph_booleans,
            manager.batch_processor.cache.max_tokens_read,
        )  # fmt: skip
        return manager

    def _warm_manager(self, prompts: list[list[int]], config: ContinuousBatchingConfig) -> ContinuousBatchingManager:
        """Return a manager with its key-value cache and, on GPUs, its first graphs. Raises `MemoryError` where the
        cache does not fit."""
        hints = WorkloadHints(_longest(prompts), self._generation_config.max_new_tokens, len(prompts))
        manager = self._model.init_continuous_batching(self._generation_config, config, hints)
        prepare_manager(manager)
        manager.warmup()
        return manager

    def _sized(self, prompts: list[list[int]]) -> ContinuousBatchingConfig:
        """Return the config with a cache for a rollout of such prompts where it does not say how large: transformers
        would take half of the memory, in which the backward pass is to fit."""
        config = copy.deepcopy(self._config)
        if config.num_blocks is None:
            n_tokens = _longest(prompts) + self._generation_config.max_new_tokens
            config.num_blocks = len(prompts) * (math.ceil(n_tokens / config.page_size) + 1)
        if config.max_batch_tokens is None:
            n_tokens = sum(map(len, prompts))
            config.max_batch_tokens = min(_MOST_BATCH_TOKENS, math.ceil(n_tokens / 64) * 64)
        return config

    def _run(self, manager: ContinuousBatchingManager, prompts: list[list[int]]) -> list[Any]:
        """Return the outputs of a rollout in the order of the prompts."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the manager has streams of its own, which do not wait for weights
        manager.start()
        with manager.pause():  # which requests a batch has must not depend on how fast they arrive
            requests = manager.add_requests(prompts, max_new_tokens=self._generation_config.max_new_tokens)
        outputs: dict[str, Any] = {}
        while len(outputs) < len(requests):
            output = manager.get_result(timeout=1)
            if output is not None:
                outputs[output.request_id] = output
            elif not manager.is_running():
                break
        errors = [output.error for output in outputs.values() if output.error is not None]
        if errors or len(outputs) < len(requests):
            raise RuntimeError(
                f"continuous batching completed {len(outputs) - len(errors)} of {len(requests)} prompts: "
                f"{(errors or ['its thread ended'])[0]}"
            )
        manager.stop(keep_for_next_session=True)
        return [outputs[request] for request in requests]


def _longest(prompts: list[list[int]]) -> int:
    return max(map(len, prompts))
