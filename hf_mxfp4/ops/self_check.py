# SPDX-License-Identifier: Apache-2.0
"""One comparison of each family of Triton kernels with the eager functions, at its first use on a device.

A family that gives other results is not used there; a warning says so. Kernels that are asked for by name
(``backend="triton"``) are not checked.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch

import mxfp4_kernels

from .. import numerics
from ..numerics import PARTS, MXFP4Tensor, QuantScheme, ScaleRule
from . import triton as kernels


#: What is compared, what a kernel gives and what it should.
Check = tuple[str, torch.Tensor | None, torch.Tensor | None]
_SCHEMES = [QuantScheme(), QuantScheme(ScaleRule.RCEIL, 128, "static", 0.5)]
_SCHEMES += [QuantScheme(ScaleRule.EVEN, 128, "block_mantissas", 1.0)]
#: Family and device -> what is wrong, `None` where nothing is.
_found: dict[tuple[str, torch.device], str | None] = {}


def is_verified(family: str, device: torch.device) -> bool:
    """Return whether a family of `FAMILIES` gives the results of the eager functions on a device.

    It is checked at the first call. While a CUDA graph is captured or code is traced nothing can be checked, and the
    answer is `False` until the next call outside of these.
    """
    if (family, device) not in _found:
        if torch.compiler.is_compiling() or _is_capturing(device):
            return False
        _found[family, device] = problem = compare(FAMILIES[family], device)
        if problem is not None:
            warnings.warn(
                f"the {family!r} Triton kernels do not work on {device}: {problem}. Slower functions replace them. "
                "Please report this with the output of `hf-mxfp4 doctor --json`",
                stacklevel=3,
            )
    return _found[family, device] is None


def _is_capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def compare(check: Callable[[torch.device], Iterator[Check]], device: torch.device) -> str | None:
    """Return what is wrong on a device, the first pair that differs or an error; `None` where nothing is wrong."""
    # Without the modes of the calling code.
    modes = (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.device("cpu"),
        torch.autocast(device.type, enabled=False),
    )
    try:
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            for name, found, expected in check(device):
                found = found if found is None else found.cpu()
                torch.testing.assert_close(
                    found, expected, rtol=0, atol=0, equal_nan=True, msg=f"{name} differ from the eager ones"
                )
    except Exception as error:  # compilers and drivers fail in every way, and the eager functions do not
        return f"{type(error).__name__}: {error}"
    return None


def example(n_cols: int) -> torch.Tensor:
    """Return a matrix whose blocks have magnitudes from 2**-18 to 2**12, with NaN, infinity, zeros and ties."""
    rng = torch.Generator().manual_seed(n_cols)
    exponents = torch.randint(-18, 13, (33, n_cols // 32), generator=rng).repeat_interleave(32, dim=1)
    x = torch.randn(33, n_cols, generator=rng) * torch.exp2(exponents.float())
    x[0, 3], x[32, 5], x[1] = torch.nan, torch.inf, 0
    x[2] = torch.tensor([0.25, -0.75, 1.25, 1.75, -2.5, 3.5, 5.0, 6.0]).repeat(n_cols // 8)
    return x.bfloat16()


def _quantized(device: torch.device) -> Iterator[Check]:
    for scheme in _SCHEMES:
        x = example(640)
        there = x.to(device)
        values = numerics.apply_scheme(x, scheme)
        yield f"values ({scheme})", kernels.fake_quantize(there, scheme), values
        yield f"values of a transpose ({scheme})", kernels.fake_quantize(there.t().contiguous().t(), scheme), values
        found = kernels.quantize(there, scheme, 1)
        expected = numerics.quantize(x, **vars(scheme), axis=1)
        for part in PARTS:
            yield f"{part} ({scheme})", getattr(found, part), getattr(expected, part)


def _fp8_operands(device: torch.device) -> Iterator[Check]:
    x = example(640)
    for rows in (x, x.t()):
        yield from _compared("E4M3", kernels.quantize_e4m3(rows.to(device)), numerics.quantize_e4m3(rows))
        found, columns, scale = mxfp4_kernels.to_fp8_rows_and_columns(rows.to(device), torch.uint8)
        elements, byte = numerics.quantize_e4m3(rows)
        yield from _compared("E4M3 by rows", (found, scale), (elements, byte))
        yield "columns of E4M3", columns, elements.t()
    yield "transposes of E4M3", mxfp4_kernels.transpose_fp8(elements.contiguous().to(device)), elements.t()
    x = x.nan_to_num(1, 1, 1)
    top = x.abs().amax().float()
    found, columns, scale = mxfp4_kernels.to_fp8_rows_and_columns(x.to(device), top=top.to(device))
    elements, byte = numerics.quantize_e4m3(x.view(1, -1))
    expected = elements.view(33, 640), numerics.decode_e8m0(byte).expand(33, 1)
    yield from _compared("E4M3 of a matrix", (found, scale), expected)
    yield "columns of E4M3 of a matrix", columns, expected[0].t()
    scales = torch.exp2(-(torch.arange(33) % 5).float())
    gradient = mxfp4_kernels.gradient_to_fp8(x.to(device), scales.to(device))
    for name, found, scale, rows in (
        ("rows of gradients", gradient.rows, gradient.row_scale, x),
        ("columns of gradients", gradient.columns, gradient.column_scale, (x * scales[:, None].bfloat16()).t()),
    ):
        elements, byte = numerics.quantize_e4m3(rows)
        yield from _compared(name, (found, scale), (elements, numerics.decode_e8m0(byte)))


def _dequantized(device: torch.device) -> Iterator[Check]:
    for scheme in _SCHEMES:
        tensor = numerics.quantize(example(640), **vars(scheme), axis=1)
        values = kernels.dequantize(_moved(tensor, device), torch.bfloat16)
        yield f"values ({scheme})", values, tensor.dequantize(torch.bfloat16)
    elements, byte = numerics.quantize_e4m3(example(640))
    found = kernels.dequantize_e4m3(elements.to(device), byte.to(device), torch.bfloat16)
    yield "values of E4M3", found, numerics.dequantize_e4m3(elements, byte, torch.bfloat16)


def _multiplied(device: torch.device) -> Iterator[Check]:
    """Products of whole numbers, which are exact in every order, with the first of two weights and with both."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (5, 640), generator=rng).bfloat16()
    ends = torch.tensor([3, 5], dtype=torch.int32)
    for scheme in _SCHEMES[::2]:
        weight = numerics.quantize(torch.randint(-4, 5, (2, 72, 640), generator=rng).float(), **vars(scheme), axis=2)
        first, second = weight.dequantize(torch.float32).double()
        expected = torch.cat([x[:3].double() @ first.t(), x[3:].double() @ second.t()]).bfloat16()
        weight = _moved(weight, device)
        found = kernels.linear(x.to(device), weight, None, ends.to(device))
        yield f"products of experts ({scheme})", found, expected
        one = weight.map(lambda part: part[0], axis=1)
        yield f"products ({scheme})", kernels.linear(x[:3].to(device), one, None), expected[:3]


def _compared(name: str, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> Iterator[Check]:
    """Yield the comparisons of elements and of scales."""
    yield f"{name}: elements", found[0], expected[0]
    yield f"{name}: scales", found[1], expected[1]


def _moved(tensor: MXFP4Tensor, device: torch.device) -> MXFP4Tensor:
    return tensor.map(lambda part: part.to(device))


#: What the kernels do, and the comparison.
FAMILIES = {"quantize": _quantized, "fp8": _fp8_operands, "dequantize": _dequantized, "decode": _multiplied}
