# SPDX-License-Identifier: Apache-2.0
"""Packed weights and rows: their tensors, and how they are made and read back, in bounded memory.

A weight ``[N, K]`` is kept as codes and scale bytes, in memory as on disk. Where the forward product rotates both
operands these are of the rotated weight, what the product multiplies with.
"""

from collections.abc import Mapping

import torch

from ..numerics import BLOCK_SIZE, PARTS, MXFP4Tensor, QuantScheme, Rotation, part_sizes
from . import quantization


#: Names of a packed weight's tensors on its layer and on disk -> the fields of [`MXFP4Tensor`] that they hold.
PACKED_FIELDS = {
    "weight": "codes",
    "weight_scale": "scale",
    "weight_macro": "macro",
    "weight_residual": "residual_codes",
    "weight_residual_scale": "residual_scale",
}

#: What those names have after that of the weight.
PACKED_SUFFIXES = tuple(name.removeprefix("weight") for name in PACKED_FIELDS)

#: What no fused function covers is packed and read back in portions of about this many elements, to bound what lies
#: between input and output.
PORTION = 1 << 22

PackedWeight = tuple[torch.Tensor | None, ...]


def packed_shapes(out_features: int, in_features: int, scheme: QuantScheme) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a weight's uint8 tensors under ``scheme``, by name, in the order of [`PACKED_FIELDS`]."""
    sizes = zip(PACKED_FIELDS, part_sizes(scheme, in_features), strict=True)
    return {name: (out_features, size) for name, size in sizes if size is not None}


def check_packed(
    owner: str, tensors: Mapping[str, torch.Tensor | None], shapes: Mapping[str, tuple[int, ...]], scheme: QuantScheme
) -> None:
    """Raise `ValueError` unless every tensor of ``shapes``, and no other, is there, uint8, and of its shape."""
    for name, tensor in tensors.items():
        shape = shapes.get(name)
        found = None if tensor is None else tuple(tensor.shape)
        if found != shape or tensor is not None and tensor.dtype != torch.uint8:
            what = "is missing" if found is None else f"is {tensor.dtype} {list(found)}"
            expected = f"uint8 {list(shape)}" if shape else f"no such tensor for {scheme}"
            raise ValueError(f"{owner}.{name} {what}; expected {expected}")


def check_rotation(owner: str, in_features: int, rotation: Rotation | None) -> None:
    """Raise `ValueError` for a weight that is stored as it was rotated and would need padding for it."""
    if rotation is not None and in_features % rotation.size:
        raise ValueError(
            f"{owner} has {in_features} inputs, no multiple of {rotation.size}, and is not packed with the rotation "
            f"{rotation} of fprop; choose a smaller one, or name the layer in modules_to_not_convert"
        )


def check_finite(name: str, weight: torch.Tensor) -> None:
    """Raise `ValueError` for a weight with NaN or infinity, of which packing would make whole blocks."""
    if weight.numel() and not weight.is_meta and not torch.stack(weight.aminmax()).isfinite().all():
        raise not_finite(name)


def not_finite(name: str) -> ValueError:
    """Return the error of [`check_finite`]."""
    return ValueError(f"{name} holds NaN or infinity, which cannot be packed; restore the checkpoint")


@torch.no_grad()
def quantize_weight(
    weight: torch.Tensor, scheme: QuantScheme, backend: str = "auto", rotation: Rotation | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of [`packed_shapes`] for a weight ``[N, K]``, rotated in float32 (float64 stays) before it is
    quantized where there is a ``rotation``, a deterministic one; without memory when it is a meta tensor."""
    if weight.is_meta:
        shapes = packed_shapes(weight.shape[0], weight.shape[1], scheme)
        return {name: torch.empty(shape, dtype=torch.uint8, device="meta") for name, shape in shapes.items()}
    rows = weight.shape[0]
    eager = quantization.choose_backend(weight, scheme, backend) == "eager"
    if eager or rotation is not None:
        rows = max(1, PORTION // max(1, weight.shape[1]) // BLOCK_SIZE) * BLOCK_SIZE
    portions = [
        quantization.quantize(_rotated(portion, rotation, backend), scheme, backend)
        for portion in weight.detach().split(rows)
    ]
    packed = {}
    for name, field in PACKED_FIELDS.items():
        parts = [getattr(portion, field) for portion in portions]
        if parts[0] is not None:
            packed[name] = (torch.cat(parts) if len(parts) > 1 else parts[0]).contiguous()
    return packed


def quantize_experts(
    weights: torch.Tensor, scheme: QuantScheme, backend: str = "auto", rotation: Rotation | None = None
) -> dict[str, torch.Tensor]:
    """[`quantize_weight`] of ``[E, N, K]``, one expert at a time: tensors ``[E, N, ...]``."""
    packed: dict[str, torch.Tensor] = {}
    for expert, weight in enumerate(weights):
        for name, part in quantize_weight(weight, scheme, backend, rotation).items():
            if expert == 0:
                packed[name] = part.new_empty(len(weights), *part.shape)
            packed[name][expert] = part
    return packed


def packed_tensor(
    packed: Mapping[str, torch.Tensor | None] | PackedWeight, length: int, scheme: QuantScheme, dtype: torch.dtype
) -> MXFP4Tensor:
    """Return the tensors of [`packed_shapes`], by name or in the order of `PACKED_FIELDS`, as a [`MXFP4Tensor`] of
    ``length`` columns that shares their memory."""
    found = packed if isinstance(packed, tuple) else (packed.get(name) for name in PACKED_FIELDS)
    parts = (None if tensor is None else tensor.detach() for tensor in found)
    return MXFP4Tensor(**dict(zip(PARTS, parts, strict=True)), length=length, axis=1, scheme=scheme, dtype=dtype)


@torch.no_grad()
def weight_values(
    packed: Mapping[str, torch.Tensor | None] | PackedWeight,
    length: int,
    scheme: QuantScheme,
    dtype: torch.dtype,
    backend: str = "auto",
    rotation: Rotation | None = None,
) -> torch.Tensor:
    """Return the weight ``[n, length]`` in ``dtype`` that rows of [`quantize_weight`] with the same ``rotation`` stand
    for, rotated back in float32 and then rounded, by which the values are no longer those that products take."""
    if rotation is None:
        return quantization.dequantize(packed_tensor(packed, length, scheme, dtype), dtype, backend)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = quantization.dequantize(packed_tensor(packed, length, scheme, wide), wide, backend)
    return _rotated(values, rotation, backend).to(dtype)  # its own inverse


def _rotated(weight: torch.Tensor, rotation: Rotation | None, backend: str) -> torch.Tensor:
    return weight if rotation is None else quantization.rotate_rows(weight, rotation.size, backend)


def of_expert(packed: MXFP4Tensor, expert: int) -> MXFP4Tensor:
    """Return the weight ``[N, K]`` of one expert, the same memory."""
    return packed.map(lambda part: part[expert])
