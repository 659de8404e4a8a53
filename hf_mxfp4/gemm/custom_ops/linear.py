# SPDX-License-Identifier: Apache-2.0
"""The trainable linear layer, of one weight or of all experts, as an operator: the very passes of
[`hf_mxfp4.gemm.linear`], opaque to compiled code.

Arguments hold the tensors and what shapes depend on; random numbers and cached weights are found through
the layer's number when the operator runs. It is tagged as unsafe in CUDA graphs: these would replay one step's numbers,
and where no kernel takes the operands of experts, the host reads where their rows end.
"""

from collections.abc import Sequence

import torch

from ...numerics import MXFP4Tensor
from ..groups import Groups
from ..linear import PLAIN_STATE, LinearRecord, autocast_dtype, linear_backward, linear_forward
from ..saved import PARTS, SavedRecord
from ..spec import GemmSpec
from ..state import GemmState, state_of
from ..storage.packed_weight import part_sizes
from ..storage.rollout import rollout_linear
from .tensors import parse


#: What an operator returns of its input for the backward pass. The others
#: are ``x``, which is at hand, ``nothing``, and ``rollout``: nothing, and no gradient either.
_RETURNED = ("values", "values_fp8", "x_fp8", "mxfp4")


def compiled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: GemmState = PLAIN_STATE,
    groups: Groups | None = None,
) -> torch.Tensor:
    """Compute [`hf_mxfp4.gemm.quantized_linear`] where Dynamo traces, and
    [`hf_mxfp4.gemm.storage.rollout.rollout_linear`] where no gradient is computed."""
    spec, dtype = state.spec, autocast_dtype(x) or x.dtype
    saved = "nothing" if torch.is_grad_enabled() else "rollout"
    if weight.requires_grad and torch.is_grad_enabled():
        saved = what_is_saved(spec, x.dtype, dtype)
    columns = x.shape[-1] + -x.shape[-1] % spec.rotation_size
    ends = None if groups is None else groups.offsets(x.device)
    options = dtype, saved, columns, spec.input_text, not spec.is_plain, spec.transposed
    return torch.ops.hf_mxfp4.quantized_linear(x, weight, bias, ends, state.layer_id, *options)[0]


def what_is_saved(spec: GemmSpec, x_dtype: torch.dtype, dtype: torch.dtype) -> str:
    """Return what is saved of an input, for a product in ``dtype``."""
    if spec.saved == "mxfp4":
        return "mxfp4"
    if spec.saved == "fp8":
        return "x_fp8" if spec.saves_raw_input else "values_fp8"
    return "x" if spec.saves_raw_input or spec.keeps_input and x_dtype == dtype else "values"


@torch.library.custom_op("hf_mxfp4::quantized_linear", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ends: torch.Tensor | None,
    layer_id: torch.Tensor,
    dtype: torch.dtype,
    saved: str,
    columns: int,
    scheme: str,
    has_step: bool,
    transposed: bool,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    state, groups = state_of(layer_id), groups_of(ends, x.shape[0])
    out = rollout_linear(x, weight, bias, dtype, state, groups) if saved == "rollout" else None
    if out is not None:
        return out.contiguous(), [torch.tensor(-1, device="cpu")] if has_step else []
    needed = saved not in ("nothing", "rollout")
    out, tensors, record, _ = linear_forward(x, weight, bias, state, groups, dtype, needed)
    found = _returned(saved, tensors)
    if has_step:
        found.append(torch.tensor(record.step, device="cpu"))
    return out.contiguous(), found


@_forward.register_fake
def _(x, weight, bias, ends, layer_id, dtype, saved, columns, scheme, has_step, transposed):
    found = _returned_shapes(x, dtype, saved, columns, scheme)
    if has_step:
        found.append(torch.empty((), dtype=torch.int64, device="cpu"))
    return x.new_empty(*x.shape[:-1], weight.shape[-1 if transposed else -2], dtype=dtype), found


def groups_of(ends: torch.Tensor | None, n_rows: int) -> Groups | None:
    """The groups whose rows end there. Raises `ValueError` for rows of an expert that does not exist; on a GPU that is
    found there, and stops it."""
    if ends is None:
        return None
    if ends.device.type != "cpu":
        torch._assert_async(ends[-1] == n_rows, "a token was sent to an expert that does not exist")
    elif int(ends[-1]) != n_rows:
        raise ValueError(
            f"a token was sent to an expert beyond the {len(ends)}; MXFP4 experts know no expert parallelism"
        )
    return Groups.of_ends(ends, n_rows)


def _returned(saved: str, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Saved tensors as an operator returns them; E4M3 elements as bytes, which more of PyTorch can handle."""
    if saved not in _RETURNED:
        return []
    found = (tensor.contiguous() for tensor in tensors if tensor is not None)
    return [tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor for tensor in found]


def _returned_shapes(x: torch.Tensor, dtype: torch.dtype, saved: str, columns: int, scheme: str) -> list[torch.Tensor]:
    """Empty tensors like those that an operator returns of its input ``x``."""
    length = x.shape[-1] if saved.startswith("x") else columns
    rows = x.shape[:-1]
    if saved == "values":
        return [x.new_empty(*rows, columns, dtype=dtype)]
    if saved.endswith("fp8"):
        return [x.new_empty(*rows, size, dtype=torch.uint8) for size in (length, 1)]
    sizes = part_sizes(parse(scheme), columns).values() if saved == "mxfp4" else ()
    return [x.new_empty(*rows, size, dtype=torch.uint8) for size in sizes if size is not None]


def _saved_input(
    saved: str,
    tensors: Sequence[torch.Tensor],
    spec: GemmSpec,
    in_features: int,
    x_dtype: torch.dtype,
    dtype: torch.dtype,
) -> tuple[tuple[torch.Tensor | None, ...], SavedRecord]:
    """What an operator returned of its input, as [`hf_mxfp4.gemm.restore_input`] takes it."""
    if saved == "mxfp4":
        columns, scheme = in_features + -in_features % spec.rotation_size, spec.scheme.fprop.left
        remaining = iter(tensors)
        found = tuple(None if size is None else next(remaining) for size in part_sizes(scheme, 1).values())
        made_of = torch.float32 if spec.rotation_size > 1 and x_dtype != torch.float64 else x_dtype
        options = {"length": columns, "axis": 1, "scheme": scheme, "dtype": made_of}
        return found, SavedRecord("mxfp4", dtype, MXFP4Tensor(**dict.fromkeys(PARTS), **options))
    values_dtype = x_dtype if saved.startswith("x") else dtype
    if saved.endswith("fp8"):
        return (tensors[0].view(torch.float8_e4m3fn), tensors[1]), SavedRecord("fp8", values_dtype)
    return tuple(tensors), SavedRecord("full", values_dtype)


@torch.library.custom_op("hf_mxfp4::quantized_linear_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _backward(
    grad: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor | None,
    tensors: list[torch.Tensor],
    layer_id: torch.Tensor,
    dtype: torch.dtype,
    saved: str,
    has_step: bool,
    transposed: bool,
    x_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    needs: list[bool],
) -> list[torch.Tensor]:
    state, groups, step = state_of(layer_id), groups_of(ends, grad.shape[0]), None
    if has_step:
        *tensors, step = tensors
        step = int(step)
    in_features = weight.shape[-2 if transposed else -1]
    values, record = _saved_input(saved, tensors, state.spec, in_features, x_dtype, dtype)
    record = LinearRecord(record, step, x_dtype, bias_dtype)
    gradients = linear_backward(grad, weight, values, record, state, groups, needs)
    return [gradient.contiguous() for gradient in gradients if gradient is not None]


@_backward.register_fake
def _(grad, weight, ends, tensors, layer_id, dtype, saved, has_step, transposed, x_dtype, bias_dtype, needs):
    x = grad.new_empty(*grad.shape[:-1], weight.shape[-2 if transposed else -1], dtype=x_dtype)
    bias = grad.new_empty(*weight.shape[:-2], grad.shape[-1], dtype=bias_dtype or grad.dtype)
    masters = weight.new_empty(weight.shape)
    return [like for like, need in zip((x, masters, bias), needs, strict=True) if need]


def _setup(ctx, inputs, output):
    x, weight, bias, ends, layer_id, dtype, saved, _, _, has_step, transposed = inputs
    ctx.mark_non_differentiable(*output[1])
    tensors = [x, *output[1]] if saved == "x" else output[1]
    ctx.save_for_backward(weight, ends, layer_id, *tensors)
    ctx.options = dtype, saved, has_step, transposed, x.dtype, None if bias is None else bias.dtype


def _gradients(ctx, grad, _):
    weight, ends, layer_id, *tensors = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    arguments = grad, weight, ends, tensors, layer_id, *ctx.options, needs
    found = iter(torch.ops.hf_mxfp4.quantized_linear_backward(*arguments))
    return *(next(found) if need else None for need in needs), *(None,) * 8


_forward.register_autograd(_gradients, setup_context=_setup)
