# SPDX-License-Identifier: Apache-2.0
"""Compares kernels with their definitions as the scripts in `tests/kernels` do, but compiled for a GPU that is not
there, and their PTX executed on the memory of CPU tensors; prints what is wrong as JSON.

    python run_executed.py 80 few               a few cases of every kernel
    python run_executed.py 80 schemes           a mode of run_quantize.py
    python run_executed.py 80 decode            the cases of run_decode.py
"""

import contextlib
import functools
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock


HERE = Path(__file__).resolve().parent
ARCH, MODE = sys.argv[1:]
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "kernels")]
# The scripts read their own arguments when they are imported.
sys.argv[1:] = ["few"]

import numpy as np  # noqa: E402
import run_decode  # noqa: E402
import run_quantize  # noqa: E402
import torch  # noqa: E402

from hf_mxfp4.numerics import parse_scheme  # noqa: E402
from mxfp4_kernels import dequantization, fp4, fp8  # noqa: E402
from mxfp4_kernels.common import scheme  # noqa: E402
from mxfp4_kernels.decode import config, product  # noqa: E402
from ptx.device import GPUS, compiled_for  # noqa: E402
from ptx.machine import execute  # noqa: E402
from ptx.memory import GlobalMemory  # noqa: E402
from ptx.parser import parse  # noqa: E402


@contextlib.contextmanager
def executed(arch: int) -> Iterator[list[str]]:
    """Within, launches on CPU tensors are compiled for ``sm_<arch>`` and executed; the list grows by their names."""
    launched: list[str] = []

    def launch(kernel, grid: tuple[int, ...], arguments: list) -> None:
        launched.append(kernel.metadata.name)
        values = [value for _, value in arguments]
        memory = GlobalMemory([_buffer(value) for value in values if isinstance(value, torch.Tensor)])
        numbers = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values]
        # Two pointers follow to scratch memory, which our kernels do not have.
        execute(_parsed(kernel.asm["ptx"]), grid, [*numbers, 0, 0], memory, kernel.metadata.shared)

    with contextlib.ExitStack() as stack:
        stack.enter_context(compiled_for(arch, launch))
        for place, name, stand_in in (
            (product, "gpu_of", lambda device: config.Gpu(str(arch), *GPUS[arch])),
            (product, "weight_constants", lambda *most, **_: _weight_constants(*most[:-1], True)),
            *((module, "check_device", lambda x: None) for module in (scheme, dequantization, fp4, fp8, product)),
        ):
            stack.enter_context(mock.patch.object(place, name, stand_in))
        yield launched


_weight_constants = product.weight_constants
_parsed = functools.lru_cache(parse)


def _buffer(tensor: torch.Tensor) -> tuple[int, np.ndarray]:
    """Address and bytes of a tensor, from its first element to its last."""
    count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.detach().as_strided((count if tensor.numel() else 0,), (1,)).view(torch.uint8)
    return tensor.data_ptr(), flat.numpy()


def few_quantized() -> Iterator[tuple[str, object]]:
    rng = torch.Generator().manual_seed(1)
    x = run_quantize.adversarial_rows((20, 160), torch.float32, 0, rng)
    # Blocks at the least scales, with codes other than zero.
    x[15] = x[0] * 2.0 ** (torch.arange(160) // 32 - 127)
    for text, dtype in (("rceil", torch.bfloat16), ("even+mbs128-blockwise+of1", torch.bfloat16)):
        yield text, run_quantize.wrong(x.to(dtype), parse_scheme(text), {}, dtype)
    # Several tiles, strips and blocks, cut short.
    odd = torch.cat((x[11:16], x[1:6, :110]), dim=1)
    yield "odd", run_quantize.wrong(odd, parse_scheme("rceil+mbs32-static+of0.3"), {}, torch.float32)
    yield "both", run_quantize.wrong_both(x[:, :70], parse_scheme("rceil"), ({"seed": 5}, {"rotation": 32}), x.dtype)


def few_converted() -> Iterator[tuple[str, object]]:
    rng = torch.Generator().manual_seed(2)
    odd = run_quantize.adversarial_rows((5, 70), torch.float16, 2, rng)
    # A maximum between the largest E4M3 number and that of its binade.
    odd[0] = torch.linspace(-1.85, 1.85, 70)
    yield "FP8", run_quantize.wrong_fp8(odd)
    yield from itertools.islice(run_quantize.nvfp4(rng), 2)


def few_decoded() -> Iterator[tuple[str, object]]:
    yield from itertools.islice(run_decode.linear(), 3)
    yield from itertools.islice(run_decode.experts(), 5)


def few() -> Iterator[tuple[str, object]]:
    return itertools.chain(few_quantized(), few_converted(), few_decoded())


def decode() -> Iterator[tuple[str, object]]:
    return itertools.chain(run_decode.linear(), run_decode.experts(), run_decode.special())


if __name__ == "__main__":
    cases = getattr(run_quantize, MODE, None) or globals()[MODE]
    with executed(int(ARCH)) as launched:
        found = list(cases())
    wrong = {name: bad for name, bad in found if bad}
    print(json.dumps({"cases": len(found), "wrong": wrong, "kernels": sorted(set(launched))}))
