# SPDX-License-Identifier: Apache-2.0
"""A GPU that is not there: tensors without data that pass for its own, and a note of every launch on it.

Within [`stub_gpu`] tensors of torch's meta device say that they are on a CUDA device, so that layers and kernels take
the very way that they take on that GPU, in both passes. A Triton kernel is noted with the arguments of its launch, an
operator of torch that computes with its name and shapes; none of them runs. Self-checks of kernels, which look at
numbers, count as passed; FP4 and FP8 operands are exact, and all experts have as many rows.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .gpus import GPU


@dataclass(frozen=True)
class Launch:
    """A launch of a Triton kernel.

    Attributes:
        kernel: the jitted function.
        grid: numbers of programs.
        arguments, constants: those by position, and those by name with the options of the compiler.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple
    constants: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    @property
    def programs(self) -> int:
        count = 1
        for size in self.grid:
            count *= size
        return count


@dataclass(frozen=True)
class Operator:
    """An operator of torch that launches something.

    Attributes:
        name: as ``"mm"``.
        inputs: shape and dtype of each tensor that goes in.
        n_bytes: read and written.
    """

    name: str
    inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    n_bytes: int


Step = Launch | Operator

#: Not empty while torch itself computes, some of it in Python, which is to see the meta device.
_in_torch: list[bool] = []

#: Operators that only look at a tensor otherwise, or reserve memory.
_FREE = (
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "view", "_unsafe_view", "reshape", "t",
    "transpose", "permute", "expand", "detach", "alias", "slice", "select", "unbind", "split", "unsqueeze", "squeeze",
    "as_strided", "unflatten", "is_same_size", "lift_fresh", "resize_", "set_",
)  # fmt: skip


def cuda_of(gpu: GPU) -> torch.device:
    """Return the device that stands for a GPU. No machine has one of such a number, so that nothing that is kept by
    device can be taken for a real one's."""
    return torch.device("cuda", gpu.number)


@contextlib.contextmanager
def stub_gpu(gpu: GPU) -> Iterator[list[Step]]:
    """Stand for one GPU; what would be launched on it is in the list, in order.

    Raises `RuntimeError` under TRITON_INTERPRET=1, whose kernels go other ways.
    """
    from hf_mxfp4.ops import self_check
    from mxfp4_kernels.common.scheme import INTERPRETED
    from mxfp4_kernels.decode import counters

    if INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET=1 is set: kernels go other ways then; unset it")
    steps: list[Step] = []
    device = cuda_of(gpu)
    with contextlib.ExitStack() as stack:
        for target, name, value in _stand_ins(gpu, device, steps):
            stack.enter_context(mock.patch.object(target, name, value))
        zeros = lambda count, device: torch.zeros(count, dtype=torch.int32, device=device)  # noqa: E731
        stack.enter_context(mock.patch.object(counters, "_kept_zeros", zeros))
        streams = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda _: 0))
        stack.enter_context(mock.patch.object(counters, "driver", streams))
        verified = {(family, device): None for family in self_check.FAMILIES}
        stack.enter_context(mock.patch.dict(self_check._found, verified))
        counted = {device: torch.zeros((), dtype=torch.int64, device="meta")}
        stack.enter_context(mock.patch.dict(import_module("hf_mxfp4.ops.fp8").inexact, counted))
        stack.enter_context(_Operators(steps))
        yield steps


def _stand_ins(gpu: GPU, device: torch.device, steps: list[Step]) -> Iterator[tuple[Any, str, Any]]:
    """Return what is replaced: object, attribute, and by what."""
    properties = SimpleNamespace(
        name=gpu.name,
        major=gpu.capability[0],
        minor=gpu.capability[1],
        multi_processor_count=gpu.multiprocessors,
        shared_memory_per_block_optin=gpu.shared_of_program,
        total_memory=80 << 30,
        L2_cache_size=50 << 20,
        warp_size=gpu.warp,
    )
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    is_on = torch.Tensor.device.__get__

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        grid = grid(constants) if callable(grid) else grid
        steps.append(Launch(kernel, tuple(grid), arguments, constants))

    def device_of(x: torch.Tensor) -> torch.device:
        real = is_on(x)
        return device if real.type == "meta" and not _in_torch else real

    yield torch.Tensor, "device", property(device_of)
    yield torch.Tensor, "is_cuda", property(lambda x: is_on(x).type == "meta")
    yield torch.Tensor, "is_meta", property(lambda x: is_on(x).type == "meta" and bool(_in_torch))
    yield triton.JITFunction, "run", run
    fp4, groups = map(import_module, ("hf_mxfp4.ops.fp4", "hf_mxfp4.ops.groups"))
    yield fp4, "fit", lambda *operands: True
    yield torch.Tensor, "item", lambda _: 0  # an FP8 weight is exact
    yield groups.Groups, "counts", property(lambda self: (self.n_rows // self.n_experts,) * self.n_experts)
    # The function of torch 2.13 that gives the shape of MXFP4 products asks for half of their scales.
    no_mxfp4 = lambda recipe, _: "torch gives it no shape" if recipe == "mxfp4" else None  # noqa: E731
    yield fp4, "problem", no_mxfp4
    # The operator behind this function has no shapes for meta tensors, the one before it has.
    grouped = lambda a, b, scale_a, _, scale_b, *rest, offs, **options: torch._scaled_grouped_mm(  # noqa: E731
        a, b, scale_a, scale_b, offs, out_dtype=options["output_dtype"]
    )
    yield torch.nn.functional, "scaled_grouped_mm", grouped
    yield torch.version, "cuda", "13.0"
    yield torch.cuda, "_lazy_init", lambda: None
    yield torch.cuda, "device", lambda _: contextlib.nullcontext()
    yield torch.cuda, "get_device_properties", lambda *_: properties
    yield torch.cuda, "get_device_capability", lambda *_: gpu.capability
    yield torch.cuda, "get_device_name", lambda *_: gpu.name
    yield torch.cuda, "current_device", lambda: device.index
    yield torch.cuda, "current_stream", lambda *_: stream
    yield torch.cuda, "is_current_stream_capturing", lambda: False


class _Operators(TorchDispatchMode):
    """Tensors for the stub are made on the meta device, and operators that compute are noted."""

    def __init__(self, steps: list[Step]):
        super().__init__()
        self.steps = steps

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(kwargs.get("device"), "type", None) == "cuda":
            kwargs["device"] = torch.device("meta")
        _in_torch.append(True)
        try:
            out = func(*args, **kwargs)
        finally:
            _in_torch.pop()
        name = func.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        results = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        computes = name not in _FREE and any(type(x).device.__get__(x).type == "cuda" for x in (*tensors, *results))
        if computes and any(x.numel() for x in results):
            inputs = tuple((tuple(x.shape), x.dtype) for x in tensors)
            n_bytes = sum(x.numel() * x.element_size() for x in (*tensors, *results))
            self.steps.append(Operator(name, inputs, n_bytes))
        return out
