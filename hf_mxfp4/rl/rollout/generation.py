# SPDX-License-Identifier: Apache-2.0
"""How transformers generates rollouts: in the dtype of training, without dropout, compiled, or in continuous batches.

`generate` compiles the forward pass of single tokens by itself when its cache is static; prompts run in eager mode. TRL
switches that off. Where it is on, state that moves from rollout to rollout must not end in the compiled code: quantized
weights are found by the layers' operators when they run (see [`hf_mxfp4.gemm.compile`]), noise is an input (see
[`NormNoise`]), and the size of the cache is rounded up.
"""

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig, GenerationMixin, StaticCache

from ..._logging import get_logger
from ...hooks import evaluation_mode
from ...layers import cached_weights, trainable_matrices
from ..config import MXFP4GRPOConfig


#: Static caches hold a multiple of this many tokens, so that prompts of other lengths fit code that was compiled.
_CACHE_STEP = 64


class RolloutGeneration:
    """Rollouts by the policy that training computes, compiled (`compile_rollouts`) or not, and continuous batching that
    does not lose completions.

    accelerate puts autocast on the forward pass of what TRL trains. For adapters that is PEFT's, which `generate` goes
    past, so that the policy would sample in the dtype of its parameters; and the policy samples in training mode, in
    which dropout would draw another policy for each token.

    Args:
        args: `compile_rollouts`, `cache_rollout_weights` and `rollout_weights` are read.
        accelerator: knows the dtype of autocast.
        config: of `generate`, in which compilation is switched on; `None` under vLLM.
        batching: of `generate_batch`, under continuous batching; else `None`.
        is_custom: whether `rollout_func` generates instead.
        sharding: what shards the weights over processes, in words; `None` where every process has them all.

    Raises `ValueError` where what the options ask for cannot work.
    """

    def __init__(
        self,
        args: MXFP4GRPOConfig,
        accelerator: Accelerator,
        config: GenerationConfig | None,
        batching: ContinuousBatchingConfig | None,
        is_custom: bool,
        sharding: str | None,
    ):
        self._args, self._accelerator, self._batching = args, accelerator, batching
        if not args.compile_rollouts:
            return
        if is_custom:
            raise ValueError("compile_rollouts=True compiles generation by transformers, which rollout_func replaces")
        if sharding is not None:
            raise ValueError(
                f"compile_rollouts=True does not work with {sharding}: "
                "compiled code would run on sharded weights; use DDP or ZeRO up to stage 2, or compile_rollouts=False"
            )
        compile_generation(config)

    @property
    def is_compiled(self) -> bool:
        """Whether any forward pass of a rollout may be compiled code."""
        return self._args.compile_rollouts or self._batching is not None and _compiles(self._batching)

    def weight_copies(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Within this context each quantized weight is copied once (`cache_rollout_weights`, `rollout_weights`)."""
        return cached_weights(model, self._args.rollout_weights if self._args.cache_rollout_weights else "none")

    @contextlib.contextmanager
    def sampling(self, model: nn.Module) -> Iterator[None]:
        """Within this context ``model`` generates as the class says."""
        with contextlib.ExitStack() as stack:
            # Which mode the model was in comes back with the end of this context: after continuous batching TRL puts
            # it in training mode, in evaluation too, and the next prompts would be sampled with noise.
            stack.enter_context(evaluation_mode(model))
            stack.enter_context(self._accelerator.autocast())
            if self._args.compile_rollouts:
                stack.enter_context(_static_caches(model))
            elif self._batching is not None:
                stack.enter_context(_complete_batches(model, self._args.cache_rollout_weights))
                generator = generating_module(model)
                if generator is not self._accelerator.unwrap_model(model):
                    stack.enter_context(_autocast_in_threads(generator, self._accelerator))
            yield


def describe_rollout_weights(model: nn.Module, kept: bool, form: str) -> str:
    """Which copies of a model's trainable layers [`RolloutGeneration.weight_copies`] keeps, counted."""
    if not kept:
        return "no copies"
    return f"copies ({form}) of {sum(1 for _ in trainable_matrices(model))} weight matrices"


class RolloutCache(StaticCache):
    """A static cache for autocast, which leaves keys in float32 where they are rotated, and values in the dtype of
    products. Attention takes both in the latter."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):
        return super().update(key_states.to(value_states.dtype), value_states, *args, **kwargs)


def compile_generation(config: GenerationConfig) -> None:
    """Have `generate` compile the forward pass of single tokens when it is given a static cache: by inductor and with
    CUDA graphs where the device has them, unless ``config`` already says how.

    Raises `ValueError` when it asks for another kind of cache, or for none.
    """
    if config.cache_implementation not in (None, "static") or config.use_cache is False:
        raise ValueError(
            "compile_rollouts=True generates with a static key-value cache; leave out "
            f"cache_implementation={config.cache_implementation!r} and use_cache={config.use_cache}"
        )
    config.cache_implementation = None  # of the caches that `generate` makes, and it makes none
    config.disable_compile = False
    if config.compile_config is None:
        config.compile_config = CompileConfig()
    # Otherwise transformers leaves CPUs out, silently.
    config.compile_config._compile_all_devices = True
    get_logger().info("rollouts are compiled by %s, mode %s", config.compile_config.backend, config.compile_config.mode)


@contextlib.contextmanager
def _static_caches(model: Any) -> Iterator[None]:
    """Within this context `generate` gets a [`RolloutCache`] for all tokens that it may need."""
    generator = generating_module(model)
    generate = generator.generate

    @functools.wraps(generate)
    def with_cache(*, input_ids: torch.Tensor, generation_config: GenerationConfig, **kwargs: Any) -> torch.Tensor:
        size = input_ids.shape[1] + generation_config.max_new_tokens
        cache = RolloutCache(generator.config, max_cache_len=-(-size // _CACHE_STEP) * _CACHE_STEP)
        # The model's own config fills in what the trainer's leaves open, a kind of cache, too.
        own = generator.generation_config
        generator.generation_config = copy.deepcopy(own)
        generator.generation_config.cache_implementation = None
        try:
            with _without_input_gradients(generator):
                return generate(
                    input_ids=input_ids, generation_config=generation_config, past_key_values=cache, **kwargs
                )
        finally:
            generator.generation_config = own

    generator.generate = with_cache
    try:
        yield
    finally:
        del generator.generate


@contextlib.contextmanager
def _without_input_gradients(model: torch.nn.Module) -> Iterator[None]:
    """Take the hooks off that gradient checkpointing needs at the input: TRL switches it off for generation and on
    again, by which transformers adds one hook each time and takes none away, and each would need compilation."""
    found = [
        (module._forward_hooks, key, hook)
        for module in model.modules()
        for key, hook in module._forward_hooks.items()
        if getattr(hook, "__name__", "").startswith("make_inputs_require_grad")
    ]
    for hooks, key, _ in found:
        del hooks[key]
    try:
        yield
    finally:
        for hooks, key, hook in found:
            hooks[key] = hook


def generating_module(model: Any) -> Any:
    """Return what generates of a model that PEFT may have wrapped."""
    return next(module for module in model.modules() if isinstance(module, GenerationMixin))


def _compiles(batching: Any) -> bool:
    """Whether a `ContinuousBatchingConfig` has forward passes compiled."""
    configs = batching.varlen_compile_config, batching.decode_compile_config
    return bool(batching.default_compile_level) or any(config is not None for config in configs)


@contextlib.contextmanager
def _autocast_in_threads(generator: Any, accelerator: Any) -> Iterator[None]:
    """Within this context the forward pass of ``generator`` runs under autocast in any thread: continuous batching
    has one of its own, and autocast is a state of threads."""
    forward, replaced = generator.forward, vars(generator).get("forward")  # by TRL

    @functools.wraps(forward)
    def under_autocast(*args: Any, **kwargs: Any) -> Any:
        with accelerator.autocast():
            return forward(*args, **kwargs)

    generator.forward = under_autocast
    try:
        yield
    finally:
        del generator.forward
        if replaced is not None:
            generator.forward = replaced


@contextlib.contextmanager
def _complete_batches(model: Any, copies_weights: bool) -> Iterator[None]:
    """Within this context `generate_batch` raises `RuntimeError` when a sequence is missing or was not finished: TRL
    takes what is left, in place of what it asked for. Copies of weights are made before anything else, since the cache
    for keys and values takes most of the memory that is free when generation begins."""
    generator = generating_module(model)
    generate = generator.generate_batch

    @functools.wraps(generate)
    def complete(inputs: list[list[int]], *args: Any, **kwargs: Any) -> dict[str, Any]:
        if copies_weights:
            generator(input_ids=torch.tensor([inputs[0][:1]], device=generator.device), use_cache=False)
        outputs = generate(inputs, *args, **kwargs)
        errors = [output.error for output in outputs.values() if output.error is not None]
        if errors or len(outputs) != len(inputs):
            finished = len(outputs) - len(errors)
            reason = f": {errors[0]}" if errors else "; transformers has logged why"
            raise RuntimeError(f"continuous batching finished {finished} of {len(inputs)} sequences{reason}")
        return outputs

    generator.generate_batch = complete
    try:
        yield
    finally:
        del generator.generate_batch
