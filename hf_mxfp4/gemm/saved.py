# SPDX-License-Identifier: Apache-2.0
"""What a layer keeps of its input for the gradient of its weight, and how that comes back in the backward pass.

An autograd function calls [`keep_input`] in its forward pass, puts the tensors into `save_for_backward` and the record
into its context, and calls [`restore_input`] with both in its backward pass. Rows are tokens, in any number and order,
so the inputs of grouped experts are kept in the same way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..backends.functional import quantize
from ..backends.select import choose_backend, dequantize
from ..numerics import MXFP4Tensor, QuantScheme, dequantize_e4m3, quantize_e4m3


#: The tensors of an [`MXFP4Tensor`].
_PARTS = ("codes", "scale", "macro", "residual_codes", "residual_scale")

#: Where nothing fused covers a scheme, rows are packed and read back in portions of about this many elements, to bound
#: what lies between input and output.
_PORTION = 1 << 22

SavedTensors = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class SavedInput:
    """How one layer keeps its input.

    Attributes:
        form: one of [`hf_mxfp4.numerics.SAVED_FORMS`].
        pack: for ``"mxfp4"``, maps the input to the codes of the forward product's operand.
    """

    form: str = "full"
    pack: Callable[[torch.Tensor], MXFP4Tensor] | None = None


@dataclass(frozen=True)
class SavedRecord:
    """What the saved tensors are.

    Attributes:
        form: one of [`hf_mxfp4.numerics.SAVED_FORMS`].
        dtype: that the values come back in.
        layout: of codes, the [`MXFP4Tensor`] without its tensors.
    """

    form: str
    dtype: torch.dtype
    layout: MXFP4Tensor | None = None


def keep_input(
    x: torch.Tensor,
    dtype: torch.dtype,
    quantize_input: Callable[[torch.Tensor, torch.dtype], torch.Tensor],
    saved: SavedInput,
    *,
    needed: bool,
    itself: bool,
) -> tuple[torch.Tensor, SavedTensors, SavedRecord]:
    """The operand of the forward product, and what is kept for Wgrad.

    Args:
        x: ``[..., K]``.
        dtype: of the product.
        quantize_input: maps ``x`` and ``dtype`` to the operand.
        needed: whether anything is; not so for a frozen weight, as under LoRA, or without gradients.
        itself: whether Wgrad takes ``x`` itself and not what the forward product takes of it; not with ``"mxfp4"``.

    Returns:
        The operand, the tensors to save, and the record that [`restore_input`] reads them by.
    """
    if not needed:
        return quantize_input(x, dtype), (), SavedRecord("full", dtype)
    if saved.form == "mxfp4":
        if itself or saved.pack is None:
            raise ValueError("saved in MXFP4 is what the forward product takes, and a function to pack it is needed")
        packed = saved.pack(x)
        tensors = tuple(getattr(packed, part) for part in _PARTS)
        record = SavedRecord("mxfp4", dtype, replace(packed, **dict.fromkeys(_PARTS)))
        return restore_input(tensors, record), tensors, record
    values = quantize_input(x, dtype)
    kept = x if itself else values
    if saved.form == "fp8":
        return values, quantize_e4m3(kept), SavedRecord("fp8", kept.dtype)
    return values, (kept,), SavedRecord("full", kept.dtype)


def pack_rows(x: torch.Tensor, scheme: QuantScheme, backend: str = "auto") -> MXFP4Tensor:
    """``x [..., K]`` quantized along its last axis, rows by themselves: [`hf_mxfp4.quantize`] in bounded memory.

    Raises `ValueError` for a scheme under which rows are not independent, or a backend that cannot do it.
    """
    if scheme.rounding != "nearest" or scheme.block_rows != 1 or scheme.fallback_rate is not None:
        raise ValueError(f"{scheme} quantizes rows that depend on each other")
    portions = _split(x.detach())
    if len(portions) == 1 or choose_backend(x, scheme, backend) != "eager":
        return quantize(x, **vars(scheme), backend=backend)
    packed = cat_rows([quantize(portion, **vars(scheme), backend=backend) for portion in portions])
    parts = {name: _shaped(getattr(packed, name), x.shape[:-1]) for name in _PARTS}
    return replace(packed, **parts, axis=x.dim() - 1)


def cat_rows(tensors: Sequence[MXFP4Tensor]) -> MXFP4Tensor:
    """Matrices quantized along their last axis by one scheme, below each other."""
    if len(tensors) == 1:
        return tensors[0]
    parts = {}
    for name in _PARTS:
        found = [getattr(tensor, name) for tensor in tensors]
        parts[name] = None if found[0] is None else torch.cat(found)
    return replace(tensors[0], **parts)


def _shaped(tensor: torch.Tensor | None, leading: Sequence[int]) -> torch.Tensor | None:
    return None if tensor is None else tensor.view(*leading, tensor.shape[-1])


def _unpack(tensors: SavedTensors, record: SavedRecord) -> torch.Tensor:
    leading = tensors[0].shape[:-1]
    rows = [None if tensor is None else tensor.view(-1, tensor.shape[-1]) for tensor in tensors]
    step = _rows_per_portion(record.layout.length)
    layout, values = replace(record.layout, axis=1), []
    for start in range(0, max(1, rows[0].shape[0]), step):
        some = [None if tensor is None else tensor[start : start + step] for tensor in rows]
        portion = replace(layout, **dict(zip(_PARTS, some, strict=True)))
        # By way of the input's dtype, as the operand is made everywhere: that of autocast may saturate elsewhere.
        values.append(dequantize(portion, portion.dtype).to(record.dtype))
    return (torch.cat(values) if len(values) > 1 else values[0]).view(*leading, record.layout.length)


def _split(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if x.dim() < 2 or x.numel() <= _PORTION:
        return (x,)
    return x.reshape(-1, x.shape[-1]).split(_rows_per_portion(x.shape[-1]))


def _rows_per_portion(length: int) -> int:
    return max(1, _PORTION // max(1, length))


def restore_input(tensors: SavedTensors, record: SavedRecord) -> torch.Tensor:
    """The values ``[..., K]`` that [`keep_input`] kept; of a rotated operand with the columns of its padding."""
    if record.form == "mxfp4":
        return _unpack(tensors, record)
    if record.form == "fp8":
        return dequantize_e4m3(*tensors, record.dtype)
    return tensors[0]
