# SPDX-License-Identifier: Apache-2.0
"""Compiled decoding steps of `generate` that do not evaluate guards which cannot fail.

With a static cache transformers compiles the decoding step, and Dynamo evaluates hundreds of guards in each step.
`torch.compiler.set_stance(skip_guard_eval_unsafe=True)` leaves most of them out. It is a setting of the whole process,
under which compiled code of other inputs or another model may be run by mistake, and code that is not compiled yet
raises an error. So a step skips guards only where all of them are known to hold:

* The two steps before it passed all guards and ran as one compiled frame. This makes its code the first that Dynamo
  tries. The inputs are of the same kind in all three steps.
* A step changes tensors only. Layers of the cache that count in Python, such as those with a sliding window, and hooks
  on modules keep their guards, as do models whose code is not part of transformers.
* No code of the user runs between two steps, and every other thread waits for work in a helper of PyTorch or tqdm.
"""

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import StaticCache, TextStreamer
from transformers.cache_utils import StaticLayer

from .._logging import get_logger


#: Steps with all guards before those without. What a step leaves behind is known to pass them after the second.
WARM_UP = 2
#: Positional arguments of `generate` before the first with code of the user.
_PLAIN_ARGUMENTS = 2
#: Arguments of `generate` that have code run between two steps.
_CODE_BETWEEN_STEPS = (
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "assistant_model",
    "custom_generate",
)
#: Modules in which the threads of PyTorch's compiler and of tqdm wait for work.
_WAITING = ("threading", "concurrent.futures.thread", "torch._inductor.compile_worker.subproc_pool", "tqdm._monitor")


class DecodingSteps:
    """The compiled steps of one call of `generate`.

    Attributes:
        n_steps: how many ran.
        n_skipped: how many of them skipped guards.
    """

    def __init__(self) -> None:
        self.n_steps = 0
        self.n_skipped = 0

    def without_guards(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a compiled step that skips guards after its warm-up."""
        last_kind = None
        n_passed = 0

        def run(**inputs: Any) -> Any:
            nonlocal last_kind, n_passed
            self.n_steps += 1
            kind = _kind_of(inputs)
            if kind != last_kind or not _other_threads_wait():
                n_passed = 0
            last_kind = kind
            if n_passed < WARM_UP:
                with _guards_seen() as hits:
                    outputs = step(**inputs)
                n_passed = n_passed + 1 if hits == [True] else 0
                return outputs
            with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
                outputs = step(**inputs)
            self.n_skipped += 1
            return outputs

        return run


#: Those of the `generate` that is running, if they may skip guards.
_steps: ContextVar[DecodingSteps | None] = ContextVar("decoding_steps", default=None)


@contextlib.contextmanager
def skipped_guards(model: nn.Module, arguments: Sequence[Any], options: Mapping[str, Any]) -> Iterator[DecodingSteps]:
    """Let compiled decoding steps skip guards in a call of `generate`, where this is safe.

    Args:
        model: that generates.
        arguments: of the call, those by position.
        options: of the call, those by name.
    """
    steps = DecodingSteps()
    is_safe = _can_skip() and _is_fixed(model) and not _runs_code_of_user(arguments, options)
    token = _steps.set(steps if is_safe else None)
    try:
        yield steps
    finally:
        _steps.reset(token)
        if steps.n_steps:
            get_logger().debug("%d of %d compiled steps skipped guards", steps.n_skipped, steps.n_steps)


def compiled_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the step that `generate` is to call in place of a compiled one."""
    steps = _steps.get()
    return step if steps is None else steps.without_guards(step)


def _can_skip() -> bool:
    """Return whether PyTorch has the stance and reports lookups, and the user has changed neither."""
    if "skip_guard_eval_unsafe" not in inspect.signature(torch.compiler.set_stance).parameters:
        return False
    try:
        from torch._C._dynamo.eval_frame import get_eval_frame_callback, set_guard_complete_hook
        from torch._dynamo.eval_frame import DynamoStance, _stance
    except ImportError:
        return False
    hook = set_guard_complete_hook(None)
    set_guard_complete_hook(hook)
    is_inside_compiled_code = get_eval_frame_callback() not in (None, False)
    return hook is None and _stance == DynamoStance() and not is_inside_compiled_code


def _is_fixed(model: nn.Module) -> bool:
    """Return whether a forward pass changes nothing of the model that guards could depend on."""
    if not type(model).__module__.startswith("transformers.models."):
        return False
    return not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def _runs_code_of_user(arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Return whether `generate` calls something between two steps that might run compiled code or change the model."""
    if len(arguments) > _PLAIN_ARGUMENTS or any(options.get(name) for name in _CODE_BETWEEN_STEPS):
        return True
    streamer = options.get("streamer")
    return streamer is not None and type(streamer) is not TextStreamer


def _kind_of(value: Any) -> Any:
    """Return what guards see of an input; equal to nothing where that is not known."""
    if isinstance(value, torch.Tensor):
        return type(value), value.shape, value.stride(), value.dtype, value.device
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {key: _kind_of(part) for key, part in value.items()}
    if type(value) is StaticCache and all(type(layer) is StaticLayer for layer in value.layers):
        return id(value)
    return object()


def _other_threads_wait() -> bool:
    """Return whether no other thread can run compiled code."""
    if any(isinstance(thread, threading.Timer) for thread in threading.enumerate()):
        return False
    for thread, frame in sys._current_frames().items():
        while frame is not None and thread != threading.get_ident():
            if frame.f_globals.get("__name__") not in _WAITING:
                return False
            frame = frame.f_back
    return True


@contextlib.contextmanager
def _guards_seen() -> Iterator[list[bool]]:
    """Yield a list of whether compiled code was found, for each frame that has some. A frame that is compiled now is
    `False`, and so is one that runs uncompiled since it was compiled too often."""
    from torch._C._dynamo.eval_frame import set_guard_complete_hook
    from torch._dynamo.utils import counters

    hits: list[bool] = []
    n_compiled = counters["frames"]["total"]

    def record(is_hit: bool) -> bool:
        hits.append(is_hit)
        return is_hit

    set_guard_complete_hook(record)
    try:
        yield hits
    finally:
        set_guard_complete_hook(None)
        if counters["frames"]["total"] != n_compiled:
            hits.append(False)
