# SPDX-License-Identifier: Apache-2.0
"""Other libraries that do the same. Each builder checks what the library computes before anybody times it, and raises
[`Absent`] where the library is not there or cannot do it."""

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F

from hf_mxfp4 import numerics

from .bench import Absent, Bench
from .checks import expect_close, expect_equal, some_rows
from .timing import Call
from .torch_fp8 import Operand, fp8_rows, scaled_mm, values


Builder = Callable[[], Sequence[Call]]


def need(name: str) -> ModuleType:
    """An installed package, or [`Absent`]. What goes wrong in its import is a reason too: some need a GPU for it."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        reason = "is not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be imported ({error})"
        raise Absent(f"{name} {reason}") from error


# ---- the hub's Triton kernels ---------------------------------------------------------------------------------------


def triton_kernels(bench: Bench) -> ModuleType:
    """The package of kernels-community, from the folder of ``--triton-kernels`` or an import path. The one of that name
    on PyPI is another project."""
    if bench.machine.interpreted:
        raise Absent("triton_kernels needs a GPU")
    if bench.triton_kernels is not None and str(bench.triton_kernels) not in sys.path:
        sys.path.insert(0, str(bench.triton_kernels))
    for name in ("triton_kernels", "gpt_oss_triton_kernels"):
        try:
            for part in ("numerics_details.mxfp", "matmul_ogs", "routing", "tensor", "tensor_details.layout"):
                importlib.import_module(f"{name}.{part}")
            return sys.modules[name]
        except ModuleNotFoundError:
            continue
    raise Absent("the hub's triton_kernels was not found; name the folder that holds it with --triton-kernels")


# ---- quantizers -----------------------------------------------------------------------------------------------------


def quantizers(bench: Bench, inputs: Sequence[torch.Tensor]) -> dict[str, Builder]:
    """What makes codes and scale bytes of plain MXFP4, by the rule of `rceil`."""
    return {
        "torchao": functools.partial(_torchao_quantize, bench, inputs),
        "triton_kernels": functools.partial(_hub_quantize, bench, inputs),
    }


def _torchao_quantize(bench: Bench, inputs: Sequence[torch.Tensor]) -> list[Call]:
    need("torchao")
    tensor = need("torchao.prototype.mx_formats.mx_tensor")
    mode = need("torchao.prototype.mx_formats.config").ScaleCalculationMode("rceil")

    def quantize(x: torch.Tensor):
        return tensor.to_mx(x, torch.float4_e2m1fn_x2, block_size=32, scaling_mode=mode)

    # Written to be compiled; compiled kernels are no use where Triton only interprets.
    run = quantize if bench.machine.interpreted else torch.compile(quantize, dynamic=False)
    if inputs[0].shape[-1] % 32:
        raise Absent("torchao needs rows of whole blocks")
    scale, codes = run(inputs[0])
    _expect_values("torchao", inputs[0], codes.view(torch.uint8), scale.view(torch.uint8), 0.0)
    return [lambda x=x: run(x) for x in inputs]


def _hub_quantize(bench: Bench, inputs: Sequence[torch.Tensor]) -> list[Call]:
    quantize = triton_kernels(bench).numerics_details.mxfp.downcast_to_mxfp
    codes, scale = quantize(inputs[0], torch.uint8, axis=1)
    # Its ties in this copy go away from zero.
    _expect_values("triton_kernels", inputs[0], codes, scale, 5e-2)
    return [lambda x=x: quantize(x, torch.uint8, axis=1) for x in inputs]


def _expect_values(name: str, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bound: float) -> None:
    """The scale bytes of `rceil`, and values that differ by ``bound`` at most."""
    rows = some_rows(x.shape[0], 96, x.device)
    made = numerics.quantize(x[rows].cpu())
    parts = [part.reshape(x.shape[0], -1)[rows].cpu().contiguous() for part in (codes, scale)]
    expect_equal(f"{name}: scale bytes", parts[1], made.scale)
    theirs = dataclasses.replace(made, codes=parts[0], scale=parts[1])
    expect_close(f"{name}: values", theirs.dequantize(torch.float32), made.dequantize(torch.float32), bound)


# ---- products with stored weights -----------------------------------------------------------------------------------


def weight_products(
    bench: Bench,
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    packed: Sequence[numerics.MXFP4Tensor],
) -> dict[str, Builder]:
    """``x W^T`` for ``inputs [M, K]`` and weights ``[N, K]`` in bfloat16: as they are, and as libraries store them.
    ``packed`` are plain MXFP4 of the same weights; gemlite and triton_kernels read those very bytes."""
    shared = bench, inputs
    return {
        "cuBLAS BF16": functools.partial(_dense, *shared, weights),
        "gemlite": functools.partial(_gemlite, *shared, packed),
        "bitsandbytes NF4": functools.partial(_nf4, *shared, weights),
        "triton_kernels": functools.partial(_hub_product, *shared, packed),
        "torch FP8": functools.partial(_fp8, *shared, weights),
    }


def _checked(
    name: str,
    product: Callable[[torch.Tensor, object], torch.Tensor],
    inputs: Sequence[torch.Tensor],
    weights: Sequence[object],
    effective: torch.Tensor,
) -> list[Call]:
    """Calls of ``product``, right on the first pair: against ``x effective^T``."""
    expect_close(name, product(inputs[0], weights[0]), inputs[0].double() @ effective.double().T, 2e-2)
    return [lambda x=x, w=w: product(x, w) for x, w in zip(inputs, weights, strict=True)]


def _dense(bench: Bench, inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> list[Call]:
    return _checked("cuBLAS", F.linear, inputs, weights, weights[0])


def _fp8(bench: Bench, inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> list[Call]:
    machine = bench.machine
    if any(size % 16 for size in weights[0].shape):
        raise Absent("the scaled product needs multiples of 16")
    stored = [fp8_rows(machine, w) for w in weights]

    def product(x: torch.Tensor, w: Operand) -> torch.Tensor:
        return scaled_mm(fp8_rows(machine, x), w)

    # Its activations are rounded as well.
    expect_close("torch FP8", product(inputs[0], stored[0]), inputs[0].double() @ values(stored[0]).double().T, 6e-2)
    return [lambda x=x, w=w: product(x, w) for x, w in zip(inputs, stored, strict=True)]


def _nf4(bench: Bench, inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> list[Call]:
    bnb = need("bitsandbytes")
    stored = [bnb.functional.quantize_4bit(w, quant_type="nf4", blocksize=64) for w in weights]

    def product(x: torch.Tensor, w: tuple) -> torch.Tensor:
        return bnb.matmul_4bit(x, w[0].t(), quant_state=w[1])

    return _checked("bitsandbytes", product, inputs, stored, bnb.functional.dequantize_4bit(*stored[0]))


def _gemlite(bench: Bench, inputs: Sequence[torch.Tensor], packed: Sequence[numerics.MXFP4Tensor]) -> list[Call]:
    if bench.machine.interpreted:
        raise Absent("gemlite needs a GPU")
    helper = need("gemlite.helper")
    device = bench.machine.device
    layers = [
        helper.A16W4_MXFP(device=str(device), dtype=torch.bfloat16).from_packed_weights(
            w.codes, w.scale.view(torch.float8_e8m0fnu)
        )
        for w in packed
    ]
    if bench.machine.capability == (9, 0):
        # What it ships for the H100, for all Hopper GPUs: otherwise it measures for minutes.
        core = need("gemlite.core")
        core.GemLiteLinear.load_config(str(Path(core.__file__).with_name("configs") / "h100.json"))
    return _checked("gemlite", lambda x, layer: layer(x), inputs, layers, packed[0].dequantize(torch.float32))


def _hub_product(bench: Bench, inputs: Sequence[torch.Tensor], packed: Sequence[numerics.MXFP4Tensor]) -> list[Call]:
    hub = triton_kernels(bench)
    stored = [hub_weight(hub, w.codes[None], w.scale[None]) for w in packed]

    def product(x: torch.Tensor, w: tuple) -> torch.Tensor:
        return hub.matmul_ogs.matmul_ogs(x, w[0], None, precision_config=w[1]).view(x.shape[0], -1)

    return _checked("triton_kernels", product, inputs, stored, packed[0].dequantize(torch.float32))


def hub_weight(hub: ModuleType, codes: torch.Tensor, scale: torch.Tensor) -> tuple:
    """Codes ``[E, N, K/2]`` and scale bytes ``[E, N, K/32]`` in the layout that the hub's product likes best here, and
    the options that belong to it."""
    tensor, layouts = hub.tensor, hub.tensor_details.layout
    layout, options = layouts.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    scale_layout, scale_options = layouts.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1)
    weight = tensor.wrap_torch_tensor(codes.transpose(1, 2), dtype=tensor.FP4)
    weight = tensor.convert_layout(weight, layout, **options)
    scales = tensor.convert_layout(tensor.wrap_torch_tensor(scale.transpose(1, 2)), scale_layout, **scale_options)
    return weight, hub.matmul_ogs.PrecisionConfig(weight_scale=scales, out_dtype=torch.bfloat16)
