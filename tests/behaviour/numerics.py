# SPDX-License-Identifier: Apache-2.0
"""Section ``numerics``: the bits of a tensor under many schemes, and the decomposition of their errors."""

import itertools

import torch

from hf_mxfp4 import decompose, fake_quantize, numerics, quantize

from .inputs import hard_matrix
from .record import Record


RULES = ("rceil", "floor", "even", "mse")
MACROS = ({}, *({"macro_block": size} for size in (32, 128, 256, "row")))
MACROS += tuple({"macro_block": size, "macro_search": "dynamic"} for size in (64, 128))
MACROS += ({"macro_block": 128, "macro_search": "block_mantissas"},)
FALLBACKS = ({}, {"outlier_fallback": 0.5})
ROWS = ({}, {"block_rows": 32})
_PARTS = ("codes", "scale", "macro", "residual_codes", "residual_scale")


def schemes() -> dict[str, dict]:
    """Options by name: every rule with every macro block, fallback and shape of blocks."""
    found = {}
    for rule, macro, fallback, rows in itertools.product(RULES, MACROS, FALLBACKS, ROWS):
        options = {"scale_rule": rule, **macro, **fallback, **rows}
        found["+".join(str(value) for value in options.values())] = options
    return found


def record_scheme(record: Record, name: str, x: torch.Tensor, options: dict, **call: object) -> None:
    """Record the parts of ``x`` under a scheme, and its values."""
    with record.errors(name):
        packed = quantize(x, **options, **call)
        for part in _PARTS:
            record.tensor(f"{name}/{part}", getattr(packed, part))
        record.tensor(f"{name}/dequantized", packed.dequantize())
        record.tensor(f"{name}/values", fake_quantize(x, **options, **call))


def record(record: Record) -> None:
    """Record everything of this section."""
    small = hard_matrix(32, 304)
    for name, options in schemes().items():
        record_scheme(record, f"eager/{name}", small, options, backend="eager")
        if "block_rows" not in options:
            record_scheme(record, f"cpu/{name}", small, options, backend="cpu")
    for dtype in (torch.bfloat16, torch.float16):
        x = hard_matrix(dtype=dtype)
        for backend, rule in itertools.product(("eager", "cpu"), RULES):
            name = f"{backend}/{dtype}/{rule}"
            options = {"scale_rule": rule, "macro_block": 128, "outlier_fallback": 0.5}
            record_scheme(record, name, x, options, backend=backend)
    _record_random(record, small)
    _record_formats(record, small)
    finite = small.nan_to_num(0.0, 4.0, -4.0).clamp(-1e4, 1e4)
    for rule in RULES:
        with record.errors(f"decompose/{rule}"):
            parts = decompose(finite, scale_rule=rule, macro_block=128, outlier_fallback=0.5)
            record.value(f"decompose/{rule}", vars(parts))


def _record_random(record: Record, x: torch.Tensor) -> None:
    for name, options in schemes().items():
        if "even" in name:
            options = {**options, "rounding": "stochastic"}
            record_scheme(record, f"seeded/{name}", x, options, seed=1234567)
            with record.errors(f"generator/{name}"):
                torch.manual_seed(3)
                record.tensor(f"generator/{name}", fake_quantize(x, **options))
    for size in numerics.ROTATION_SIZES:
        padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % size))
        for kind, signs in (("plain", None), ("random", numerics.random_signs(padded.shape[-1], 5))):
            rotated = numerics.rotate(padded, size, signs=signs)
            record.tensor(f"rotation/{size}/{kind}/there", rotated)
            record.tensor(f"rotation/{size}/{kind}/back", numerics.unrotate(rotated, size, signs=signs))


def _record_formats(record: Record, x: torch.Tensor) -> None:
    record.tensor("grid/codes", numerics.encode_e2m1(torch.linspace(-7, 7, 1001)))
    record.tensor("grid/values", numerics.decode_e2m1(torch.arange(16, dtype=torch.uint8)))
    record.tensor("grid/scales", numerics.decode_e8m0(torch.arange(256).to(torch.uint8)))
    for axis in (0, 1):
        record.tensor(f"axis/{axis}", fake_quantize(x, macro_block=128, outlier_fallback=0.5, axis=axis))
    record.tensor("e4m3/values", numerics.fake_quantize_e4m3(x))
    for text in ("rceil", "mxfp4+even+mbs128-dynamic", "floor+of0.5+stochastic+32x32", "mse+mbsrow-static"):
        record.text(f"scheme text/{text}", str(numerics.parse_scheme(text)))
