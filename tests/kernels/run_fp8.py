# SPDX-License-Identifier: Apache-2.0
"""Compares the kernels that make both operands of FP8 products with NumPy and torch, bit for bit; prints a JSON report.

    TRITON_INTERPRET=1 python run_fp8.py columns         interpreted: elements by rows and transposed, transposes
    TRITON_INTERPRET=1 python run_fp8.py gradients       interpreted: operands of the backward pass
    TRITON_INTERPRET=1 python run_fp8.py property        interpreted: gradients of any shape and range
    python run_fp8.py gradients cuda                     compiled, on a GPU

A process of its own, because Triton decides when it is imported whether kernels are interpreted.
"""

import json
import sys
import warnings
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from run_quantize import DEVICE, DTYPES, Case, adversarial_rows, compare, same

import mxfp4_kernels


# Of NumPy, which computes with infinity and NaN here as it should.
warnings.filterwarnings("ignore", category=RuntimeWarning)
SHAPES = ((3, 33), (70, 130), (129, 300), (1, 1), (40, 1), (0, 8), (4, 0))


def e4m3(x: torch.Tensor, nan_rows: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements and float32 scales of rows ``[R, C]``, in float64 until each element is rounded once."""
    values = x.double().numpy()
    finite = np.isfinite(values)
    top = np.where(finite, np.abs(values), 0).max(axis=1, keepdims=True, initial=0)
    # The smallest power of two with top / scale <= 448, from 2**-126 on.
    mantissa, exponent = np.frexp(top)
    exponent = np.where(top == 0, -126, exponent - 9 + (mantissa > 448 / 512))
    scale = np.exp2(np.maximum(exponent, -126))
    elements = np.where(finite, values / scale, np.nan)
    if nan_rows:
        is_nan = ~finite.all(axis=1, keepdims=True)
        elements = np.where(is_nan, np.nan, elements)
        scale = np.where(is_nan, np.nan, scale)
    bytes_of = elements.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return torch.from_numpy(bytes_of).view(torch.float8_e4m3fn), torch.from_numpy(scale.astype(np.float32))


def folded(x: torch.Tensor, scales: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A gradient ``[R, C]`` times the scales of C, in its own dtype, over the largest one, which comes with it."""
    if scales is None:
        return x, None
    top = torch.where(scales.isnan(), 0, scales).max()
    factors = (scales / top).to(torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32)
    return (x.float() * factors.float()).to(x.dtype), top


def layouts(x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield "plain", x
    yield "transposed", x.mT
    yield "every second column", x[..., ::2]


def columns() -> Iterator[Case]:
    rng = torch.Generator().manual_seed(31)
    for number, shape in enumerate(SHAPES):
        x = adversarial_rows(shape, DTYPES[number % 3], number, rng)
        for label, rows in layouts(x):
            for nan_rows in (False, True):
                if rows.numel():
                    elements, scale = e4m3(rows, nan_rows)
                    name = f"{shape} {rows.dtype} {label} {nan_rows}"
                    yield name, wrong_columns(rows, elements, scale, nan_rows=nan_rows)
    for dtype in DTYPES:
        x = (
            torch.randn(3, 37, 150, generator=rng).to(dtype)
            * torch.tensor([1.0, 2.0**-9, 3.0], dtype=dtype)[:, None, None]
        )
        tops = x.float().abs().amax(dim=(1, 2))
        for label, matrices, top in (
            ("matrices", x, tops),
            ("transposed matrices", x.mT, tops),
            ("a matrix", x[0], tops[:1]),
        ):
            flat = [e4m3(matrix.reshape(1, -1), False) for matrix in matrices.view(-1, *matrices.shape[-2:])]
            elements = torch.stack([part.view(torch.uint8) for part, _ in flat]).view(torch.float8_e4m3fn)
            scale = torch.cat([part for _, part in flat]).repeat_interleave(matrices.shape[-2], dim=0)
            expected = elements.view(matrices.shape), scale.view(*matrices.shape[:-1], 1)
            yield f"{label} {dtype}", wrong_columns(matrices, *expected, top=top.to(DEVICE))
    every = torch.arange(256, dtype=torch.uint8).repeat(85, 2)[:, :-3].contiguous()
    for stack in (every, every[:, :90].contiguous(), every.view(5, 17, 509), every[:1], every[:, :0]):
        found = mxfp4_kernels.transpose_fp8(stack.view(torch.float8_e4m3fn).to(DEVICE))
        right = same(found.view(torch.uint8), stack.mT.contiguous()) and found.is_contiguous()
        yield f"transposes {list(stack.shape)}", [] if right else ["elements"]


def wrong_columns(x: torch.Tensor, elements: torch.Tensor, scale: torch.Tensor, **options: object) -> list[str]:
    """What of elements by rows and transposed, of scales and of the counter is not as expected."""
    counter = torch.zeros((), dtype=torch.int32, device=DEVICE)
    found = mxfp4_kernels.to_fp8_rows_and_columns(x.to(DEVICE), inexact=counter, **options)
    wanted = elements, elements.view(torch.uint8).mT.contiguous().view(torch.float8_e4m3fn), scale
    names = ("elements", "columns", "scale")
    bad = [name for name, *pair in zip(names, found, wanted, strict=True) if not same(*pair)]
    bad += [] if all(part.is_contiguous() for part in found) else ["layout"]
    rounded = (elements.float() * scale - x.float()).abs() > 0
    return bad if int(counter) == int(rounded.sum()) else [*bad, "count"]


def gradients() -> Iterator[Case]:
    rng = torch.Generator().manual_seed(32)
    for number, shape in enumerate(SHAPES):
        x = adversarial_rows(shape, DTYPES[number % 3], number, rng)
        for label, grad in layouts(x):
            if grad.numel():
                yield f"{shape} {x.dtype} {label}", wrong_gradient(grad, *scales_for(grad, rng))
    for dtype in DTYPES:
        # Products that are subnormal where factors are the smallest, in tiles that are cut short.
        x = adversarial_rows((67, 140), dtype, 5, rng)
        tokens = torch.exp2(torch.linspace(-126, 100, 67).floor())
        weight = torch.exp2(torch.linspace(-10, -126, 140).floor())
        yield f"one kind of scales {dtype}", wrong_gradient(x, tokens, None)
        yield f"the other kind {dtype}", wrong_gradient(x, None, weight[:, None])
        yield f"all scales NaN {dtype}", wrong_gradient(x, tokens * torch.nan, None)
        yield f"no scales {dtype}", wrong_gradient(x, None, None)


def scales_for(grad: torch.Tensor, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, weight = (torch.exp2(torch.randint(-126, 30, (size, 1), generator=rng).float()) for size in grad.shape)
    if len(tokens) > 4:
        tokens[3] = torch.nan
    return tokens, weight


def wrong_gradient(grad: torch.Tensor, tokens: torch.Tensor | None, weight: torch.Tensor | None) -> list[str]:
    """What of operands of the backward pass is not what folding and then rounding gives."""
    there = [None if part is None else part.to(DEVICE) for part in (grad, tokens, weight)]
    found = mxfp4_kernels.gradient_to_fp8(*there, n_columns=3)
    by_columns, token_top = folded(grad.mT, None if tokens is None else tokens.flatten())
    by_rows, weight_top = folded(grad, None if weight is None else weight.flatten())
    wanted = (*e4m3(by_rows, False), *e4m3(by_columns, False))
    tops = (None if top is None else top.expand(3) for top in (token_top, weight_top))
    names = mxfp4_kernels.FP8Gradient._fields
    return [name for name, *pair in zip(names, found, (*wanted, *tops), strict=True) if not same(*pair)]


@settings(max_examples=15 if DEVICE == "cpu" else 100, deadline=None, database=None, derandomize=True)
@given(
    shape=st.tuples(st.integers(1, 140), st.integers(1, 280)),
    dtype=st.sampled_from(DTYPES),
    start=st.integers(0, 9),
    seed=st.integers(0, 2**31),
    is_folded=st.tuples(st.booleans(), st.booleans()),
)
def any_gradient(shape, dtype, start, seed, is_folded):
    rng = torch.Generator().manual_seed(seed)
    grad = adversarial_rows(shape, dtype, start, rng)
    scales = [part if is_wanted else None for part, is_wanted in zip(scales_for(grad, rng), is_folded, strict=True)]
    assert wrong_gradient(grad, *scales) == []


if __name__ == "__main__":
    if sys.argv[1] == "property":
        any_gradient()
        print("{}")
    else:
        print(json.dumps(compare({"columns": columns, "gradients": gradients}[sys.argv[1]]())))
