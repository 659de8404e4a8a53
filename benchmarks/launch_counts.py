# SPDX-License-Identifier: Apache-2.0
"""Count what both passes of a training layer launch on a GPU, and how often they wait for it.

    python -m benchmarks.launch_counts

No GPU is needed: tensors have no data, and kernels do not run. A launch is a Triton kernel, or an operator of PyTorch
that computes or copies; PyTorch may launch more than one kernel for it. The layer has bfloat16 weights and is counted
in its second step, once with a weight that was written since the first, as in a plain `Trainer`, and once in the second
micro-batch of an optimizer step, in which a cache keeps the weight.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig, cached_weights
from hf_mxfp4.ops import self_check
from tests.stub_gpu import DEVICE, stub_gpu

from .records import made, option_parser, recorded, write


PRESETS = ("w4a8", "w4a8g8")
#: Tokens, outputs and inputs, all multiples of 16.
SHAPE = (64, 48, 96)
#: Operators of PyTorch that return views or memory.
_NO_LAUNCH = ("aten::empty", "aten::new_empty", "aten::_unsafe_view", "aten::detach")


class Launches(TorchDispatchMode):
    """Counts operators that launch something on the GPU of [`stub_gpu`], by name, while it is entered.

    Attributes:
        counts: the operators.
        waits: how often the host asked for a value of the GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.name().partition(".")[0]
        if name == "aten::_local_scalar_dense" and args[0].is_cuda:
            self.waits += 1
            return 0
        if name == "aten::_scaled_mm_v2":  # which has no function for tensors without data
            self.counts[name] += 1
            return args[0].new_empty(args[0].shape[0], args[1].shape[1], dtype=torch.bfloat16)
        if name == "aten::copy_" and args[1].is_cuda and not args[0].is_cuda:
            self.counts["copy to the host"] += 1
            return args[0]
        result = func(*args, **(kwargs or {}))
        is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)
        tensors = [value for value in (result, *args) if isinstance(value, torch.Tensor)]
        is_on_gpu = any(tensor.is_cuda for tensor in tensors)
        if is_on_gpu and not is_view and not name.startswith(_NO_LAUNCH):
            self.counts[name] += 1
        return result


@contextlib.contextmanager
def trained_layer(preset: str) -> Iterator[Any]:
    """Yield a layer on a GPU that is not there, its input, its output gradient, and the list of Triton launches."""
    tokens, outputs, inputs = SHAPE
    with contextlib.ExitStack() as stack:
        kernels = stack.enter_context(stub_gpu())
        verified = {(family, DEVICE): None for family in self_check.FAMILIES}
        stack.enter_context(mock.patch.dict(self_check._found, verified))
        stack.enter_context(mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False))
        options = {"dtype": torch.bfloat16, "device": "meta"}
        layer = MXFP4Linear(inputs, outputs, bias=False, config=MXFP4RLConfig(preset=preset), **options)
        x = torch.empty(tokens, inputs, requires_grad=True, **options)
        yield layer, x, torch.empty(tokens, outputs, **options), kernels


def both_passes(preset: str, is_cached: bool) -> Launches:
    """Count a forward and a backward pass after another one, in an optimizer step of its own or in the same one."""
    with trained_layer(preset) as (layer, x, grad, kernels):
        with cached_weights(layer) if is_cached else contextlib.nullcontext():
            for _ in range(2):
                kernels.clear()
                with Launches() as launches:
                    torch.autograd.grad(layer(x), [x, layer.weight], grad)
        launches.counts["Triton"] = len(kernels)
    return launches


def main() -> None:
    """Count all presets, print the counts, and write records."""
    options = option_parser(__doc__, "launch_counts").parse_args()
    common = made("python -m benchmarks.launch_counts", ("torch", "triton"), "none: launches are counted")
    records = [record for record in recorded(options.out) if record["commit"] != common["commit"]]
    for preset in PRESETS:
        for is_cached in (False, True):
            found = both_passes(preset, is_cached)
            name = f"launches / {preset}, {'weight kept' if is_cached else 'weight written'}"
            values = {"value": found.counts.total(), "unit": "launches", "baseline": None, "ratio": None}
            details = {"ceiling_fraction": None, "waits": found.waits, "launches": dict(sorted(found.counts.items()))}
            records.append({"name": name, "shape": list(SHAPE), **values, **details, **common})
            print(f"{name}: {found.counts.total()}, {found.waits} waits, {dict(found.counts)}", flush=True)
    write(records, options.out)


if __name__ == "__main__":
    main()
