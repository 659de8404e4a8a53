# SPDX-License-Identifier: Apache-2.0
"""Compares RMSNorm and SwiGLU that quantize with torch and the eager definition; prints a JSON report.

    TRITON_INTERPRET=1 python run_producers.py every     interpreted: a scheme and a shape each
    python run_producers.py MODE cuda                    compiled, on a GPU: 15 times as many

A mode is norm, swiglu, layouts, models (transformers' modules, on the CPU), or every. Bit for bit is compared
what follows a row's statistic or the exponential; those two have bounds.
A process of its own, because Triton decides when it is imported whether kernels are interpreted.
"""

import json
import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from run_interpreted import adversarial_rows
from run_quantize import DEVICE, DTYPES, PARTS, same
from run_variants import SCHEMES, SEEDS, Side, combinations, eager, on_device, options_of
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP, Qwen2RMSNorm

import mxfp4_kernels
from hf_mxfp4 import numerics
from hf_mxfp4.numerics import QuantScheme
from hf_mxfp4.rl.noise.norms import NormNoise


NORM = ("packed", "values", "normed")
SWIGLU = ("packed", "values", "product")
BY_ROW = [scheme for scheme in SCHEMES if scheme.block_rows == 1] + [QuantScheme("even", "row", "static", 0.5)]
#: Rows in one tile and in several, cut short and not; lengths of every width of tile.
SHAPES = ((3, 45), (5, 256), (1, 1), (2, 1536), (9, 130), (2, 4500), (40, 33))
#: Rows of which one is compared with itself alone.
ROWS = 10 if DEVICE == "cpu" else 1000
#: Relative bounds: of the statistic, whose sum has another order, and of a float32 silu, whose exponential differs.
RSTD_BOUND, SILU_BOUND = 2.0**-20, 2.0**-16


def steps_apart(a: torch.Tensor, b: torch.Tensor) -> int:
    """The largest number of steps between 16-bit numbers; NaN and NaN are equal."""

    def position(x: torch.Tensor) -> torch.Tensor:
        bits = x.contiguous().view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    if not torch.equal(a.isnan(), b.isnan()):
        return 2**16
    distance = (position(a) - position(b)).abs().masked_fill(a.isnan(), 0)
    return int(distance.max()) if distance.numel() else 0


def wrong_outputs(result, computed: torch.Tensor, scheme: QuantScheme, side: Side, dtype: torch.dtype) -> list[str]:
    """What of values and parts is not that of the definition for what was computed."""
    values, parts = eager(computed, scheme, side, dtype)
    bad = [] if same(result.values, values) and result.values.is_contiguous() else ["values"]
    return bad + [name for name, part, e in zip(PARTS, result.packed, parts, strict=True) if not same(part, e)]


def wrong_norm(x, weight, scheme, side: Side, eps: float, residual=None, noise=None, dtype=None) -> list[str]:
    """What of a quantized RMSNorm is not that of torch and the definition."""
    tensors = on_device({"x": x, "weight": weight, "residual": residual, "noise": noise})
    options = options_of(scheme) | on_device(side) | {"outputs": NORM, "dtype": dtype}
    options.pop("block_rows")
    result = mxfp4_kernels.rms_norm_quantize(**tensors, eps=eps, **options)
    hidden = x if residual is None else x + residual
    bad = [] if same(result.hidden, None if residual is None else hidden) else ["hidden"]
    rstd = result.rstd.cpu()
    squares = hidden.double().square().mean(-1)
    usual = (squares * x.shape[-1] < 1e38) & (squares + eps > 1e-30)
    error = (rstd.double() * (squares + eps).sqrt() - 1).abs()[usual]
    if rstd.shape != x.shape[:-1] or (error.numel() and not error.max() <= RSTD_BOUND):
        bad.append(f"rstd by {float(error.max())}")
    unit = hidden.float() * rstd[..., None]
    if noise is None:
        normed = weight * unit.to(x.dtype)
    else:
        normed = ((weight.float() + noise) * unit).to(torch.promote_types(x.dtype, weight.dtype))
    bad += [] if same(result.normed, normed) else ["normed"]
    return bad + wrong_outputs(result, normed, scheme, side, dtype or normed.dtype)


def wrong_swiglu(gate, up, scheme, side: Side, dtype=None) -> list[str]:
    """Likewise; ``up`` is `None` where ``gate`` holds both."""
    options = options_of(scheme) | on_device(side) | {"outputs": SWIGLU, "dtype": dtype}
    options.pop("block_rows")
    result = mxfp4_kernels.swiglu_quantize(gate.to(DEVICE), None if up is None else up.to(DEVICE), **options)
    gate, up = gate.chunk(2, -1) if up is None else (gate, up)
    # Times one: silu as the kernel computes it.
    one = mxfp4_kernels.swiglu_quantize(gate.to(DEVICE), torch.ones_like(gate, device=DEVICE), outputs=("product",))
    silu, expected = one.product.cpu(), F.silu(gate)
    if gate.dtype == torch.float32:
        close = (silu - expected).abs() <= SILU_BOUND * expected.abs() + 2.0**-120
        bad = [] if (close | (silu == expected) | (silu.isnan() & expected.isnan())).all() else ["silu"]
    else:
        bad = [] if steps_apart(silu, expected) <= 1 else ["silu"]
    product = silu * up
    bad += [] if same(result.product, product) else ["product"]
    return bad + wrong_outputs(result, product, scheme, side, dtype or gate.dtype)


def sides() -> tuple[Side, ...]:
    return ({}, {"rotation": 32}, {"rounding": "stochastic", "seed": SEEDS[2]}, {})


def norm() -> Iterator[tuple[str, list[str]]]:
    rng = torch.Generator().manual_seed(31)
    weights = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)
    choices = (BY_ROW, SHAPES, DTYPES, weights, sides(), (False, True, True), (False, False, True), (1e-6, 1e-5, 0.0))
    for number, (scheme, shape, dtype, of_weight, side, added, noisy, eps) in enumerate(combinations(*choices)):
        x = adversarial_rows(shape, dtype, number, rng)
        weight = (1 + torch.randn(shape[1], generator=rng) / 2).to(of_weight)
        residual = torch.randn(shape, generator=rng).to(dtype) if added else None
        noise = torch.randn(shape[1], generator=rng) / 100 if noisy else None
        label = f"{scheme} {shape} {dtype} {of_weight} {side} {added} {noisy} {eps}"
        yield label, wrong_norm(x, weight, scheme, side, eps, residual, noise)


def swiglu() -> Iterator[tuple[str, list[str]]]:
    rng = torch.Generator().manual_seed(32)
    shapes = (*SHAPES, (4, 2080))
    for number, (scheme, shape, dtype, side, joint) in enumerate(
        combinations(BY_ROW, shapes, DTYPES, sides(), (False, True, True, False, False))
    ):
        gate = adversarial_rows(shape, dtype, number, rng)
        up = adversarial_rows(shape, dtype, number + 4, rng)
        label = f"{scheme} {shape} {dtype} {side} {joint}"
        yield label, wrong_swiglu(*((torch.cat((gate, up), -1), None) if joint else (gate, up)), scheme, side)


def layouts() -> Iterator[tuple[str, list[str]]]:
    rng = torch.Generator().manual_seed(33)
    x, y = torch.randn(2, 12, 200, generator=rng).bfloat16() * 3
    w, plain, fallback = torch.randn(200, generator=rng), QuantScheme("rceil"), QuantScheme("rceil", 128, "static", 0.5)
    views = {
        "vector": lambda t: t[0],
        "three axes": lambda t: t[:, :96].reshape(3, 4, 96),
        "three axes, permuted": lambda t: t[:, :96].reshape(3, 4, 96).transpose(0, 1),
        "row stride": lambda t: t[::2, 64:160],
        "transposed": lambda t: t.t(),
        "every second column": lambda t: t[:, ::2],
        "expanded": lambda t: t[:1].expand(5, 200),
        "no rows": lambda t: t[:0],
        "no columns": lambda t: t[:, :0],
        "of a graph": lambda t: torch.nn.Parameter(t[:3].clone()),
    }
    for name, view in views.items():
        a, b = view(x), view(y)
        with torch.no_grad():
            yield f"norm, {name}", wrong_norm(a, w[: a.shape[-1]], fallback, {}, 1e-6, b, dtype=torch.float32)
            yield f"swiglu, {name}", wrong_swiglu(a, b, fallback, {}, torch.float16)
    yield "half a weight", wrong_norm(x[:, :100], w[::2], plain, {}, 1e-6, y[:, ::2], w[100:])
    both = torch.cat((x, y), -1).reshape(3, 4, 400)
    yield "gate and up in one", wrong_swiglu(both, None, plain, {})
    yield "two parts of one", wrong_swiglu(*both.chunk(2, -1), plain, {})
    yield "one by whole blocks", wrong_swiglu(both[..., :384], None, plain, {})
    signs = {"rotation": 128, "signs": numerics.random_signs(256, 1)}
    yield "signs", wrong_norm(x, w, fallback, signs, 1e-6) + wrong_swiglu(x, y, fallback, signs)
    # A row does not know how many others there are.
    for length in (200, 1536):
        x = torch.randn(ROWS, length, generator=rng).bfloat16().to(DEVICE)
        w = torch.randn(length, generator=rng).to(DEVICE)
        every, few = (mxfp4_kernels.rms_norm_quantize(rows, w, outputs=NORM) for rows in (x, x[7:9]))
        pairs = (every.rstd, few.rstd), (every.normed, few.normed), (every.packed.codes, few.packed.codes)
        yield f"rows apart, {length}", [] if all(torch.equal(a[7:9], b) for a, b in pairs) else ["rows"]
    one = mxfp4_kernels.rms_norm_quantize(x, w, outputs=("normed",))
    absent = one.values is one.packed is one.hidden is None
    normed = w * (x.float() * one.rstd[:, None]).bfloat16()
    yield "nothing but normed", [] if absent and torch.equal(one.normed, normed) else ["normed"]
    yield "nothing but codes", [] if mxfp4_kernels.swiglu_quantize(x)[::2] == (None, None) else ["values or product"]


def models() -> Iterator[tuple[str, list[str]]]:
    rng = torch.Generator().manual_seed(34)
    for dtype in DTYPES:
        module = Qwen2RMSNorm(320, eps=1e-5).to(dtype)
        with torch.no_grad():
            module.weight.copy_(1 + torch.randn(320, generator=rng) / 4)
        x = (torch.randn(64, 320, generator=rng) * 5).to(dtype)
        wrapper = torch.nn.ModuleDict({"norm": module})
        aqn = NormNoise(wrapper, seed=3)
        noise = aqn.noise(0, module.weight, 7, 0.01)
        for label, given, context in (("clean", None, aqn.active(7, 0.0)), ("noisy", noise, aqn.active(7, 0.01))):
            with torch.no_grad(), context:
                expected = module(x)
            found = mxfp4_kernels.rms_norm_quantize(
                x.to(DEVICE), module.weight.to(DEVICE), 1e-5, noise=on_device({"": given})[""], outputs=("normed",)
            ).normed.cpu()
            if dtype == torch.float32:
                close = (found / expected - 1).abs().max() <= 2.0**-19
            else:
                # A normed value that moves by one step moves its product with the weight by up to two.
                close = steps_apart(found, expected) <= 2 and (found != expected).float().mean() < 0.01
            yield f"{label} norm {dtype}", [] if found.dtype == expected.dtype and close else ["normed"]
        mlp = Qwen2MLP(Qwen2Config(hidden_size=32, intermediate_size=64)).to(dtype)
        captured = []
        mlp.down_proj.register_forward_pre_hook(lambda module, args, into=captured: into.append(args[0]))
        with torch.no_grad():
            mlp(x[:, :32])
            gate, up = mlp.gate_proj(x[:, :32]), mlp.up_proj(x[:, :32])
        product = mxfp4_kernels.swiglu_quantize(gate.to(DEVICE), up.to(DEVICE), outputs=("product",)).product.cpu()
        if dtype == torch.float32:
            close = ((product - captured[0]).abs() <= SILU_BOUND * captured[0].abs()).all()
        else:
            close = steps_apart(product, captured[0]) <= 2 and (product != captured[0]).float().mean() < 0.01
        yield f"mlp {dtype}", [] if close else ["product"]


MODES = {"norm": norm, "swiglu": swiglu, "layouts": layouts, "models": models}

if __name__ == "__main__":
    report = {"cases": {}, "mismatches": []}
    for name in MODES if sys.argv[1] == "every" else sys.argv[1:2]:
        found = list(MODES[name]())
        report["cases"][name] = len(found)
        report["mismatches"] += [f"{label}: {', '.join(bad)}" for label, bad in found if bad]
    print(json.dumps(report))
