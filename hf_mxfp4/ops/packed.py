# SPDX-License-Identifier: Apache-2.0
"""Products with frozen packed weights, of one linear layer or of all experts.

A layer has a [`PackedState`], which keeps a plan for each dtype of products: what multiplies few rows (codes, by the
Triton kernel or by C++), and what multiplies many (dequantized values, FP8 or FP4 cores). Plans hold no weights. A call
passes the tensors that the layer has at that moment, so a plan is never stale. Eager and compiled code, with gradients
and without, call the same plans.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from ..numerics import MXFP4Tensor, QuantScheme
from . import cpu, quantization
from . import triton as triton_kernels
from .autograd import as_dtype, autocast_dtype, needs_gradient, not_a_view
from .cache import WeightCache
from .fp4 import to_fp4
from .groups import Groups, sum_rows
from .operands import quantize_input
from .packed_weight import PACKED_FIELDS, PackedWeight, check_packed, of_expert, packed_shapes, packed_tensor
from .products import fp4_products, multiply_values
from .spec import GemmSpec
from .state import GemmState


class PackedPlan:
    """How inputs of one dtype are multiplied with packed weights ``[N, K]`` of one shape on one device.

    Whatever does not change from call to call is decided here, once.

    Args:
        spec: of the layer.
        x: an input, ``[..., K]``.
        packed: the packed tensors, in the order of [`PACKED_FIELDS`]; `None` for those that the scheme has not.
        dtype: of the product; that of autocast where it is on.

    Attributes:
        reader: the backend that multiplies rows with the codes; ``"eager"`` where none does.
        is_used: whether the layer has been called again since the plan was made.
    """

    #: Whether there are products on FP8 cores.
    has_fp8 = True
    is_used = False

    def __init__(self, spec: GemmSpec, x: torch.Tensor, packed: PackedWeight, dtype: torch.dtype):
        weights = spec.weight_scheme
        codes = cast(torch.Tensor, packed[0])
        self.spec = spec
        self.dtype = dtype
        self.device = x.device
        self.n = codes.shape[-2]
        self.k = x.shape[-1]
        self.rotation = spec.scheme.fprop.rotation
        self.quantizes_input = spec.input_scheme is not None or self.rotation is not None
        self.on_fp4_cores = fp4_products(spec, x.device, dtype, (self.n, self.k))
        shapes = packed_shapes(self.n, self.k, weights)
        self.shapes = [shapes.get(name) for name in PACKED_FIELDS]
        like = x if quantization.has_plain_memory(codes) else codes  # whose memory no kernel may read
        self.reader = quantization.choose_backend(like, weights, spec.backend, family="decode", dtype=dtype)
        most_rows, self.multiply_codes = self._reads_codes(weights)
        self.most_on_codes = most_rows * self.k
        self.bias_shape: tuple[int, ...] = (self.n,)
        self.has_autocast = torch.amp.is_autocast_available(x.device.type)

    def _reads_codes(self, weights: QuantScheme) -> tuple[float, Any]:
        """Return up to how many rows the codes are multiplied, and what does it."""
        needs_values = self.has_fp8 and self.spec.matmul_backend == "fp8"
        if self.reader == "cpu" and not needs_values:
            return float("inf"), cpu.PackedProduct(self.n, self.k, weights, self.dtype)  # panels of many rows, too
        if self.reader == "triton" and triton_kernels.unsupported_product(1, self.k, self.dtype) is None:
            product = triton_kernels.packed_product(self.n, self.k, weights, self.device)
            return triton_kernels.MOST_DECODED_ROWS, product
        return -1, None

    def __call__(self, x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the product ``[..., N]``, without a gradient.

        Args:
            x: ``[..., K]``.
            packed: tensors that [`checked`] returned, or with which the plan [`takes`] the input.
            bias: ``[N]`` in the dtype of the product, or `None`.
        """
        if self.on_fp4_cores is not None:
            out = self.multiply_on_fp4_cores(x, packed, bias)
            if out is not None:
                return out
        if self.quantizes_input or x.dtype is not self.dtype:
            x = self.operand(x)
        if x.numel() <= self.most_on_codes:
            return self.multiply_codes(x, packed, bias)
        return self.multiply_values(x, packed, bias)

    def operand(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input as the product takes it: rotated and quantized where the spec says so."""
        return quantize_input(x, self.dtype, self.spec.input_scheme, self.spec.backend, self.rotation)

    def multiply_values(self, x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply an [`operand`] with the dequantized weight, on FP8 cores where the spec and the values allow it."""
        return multiply_values(x, self.values(packed), bias, self.spec)

    def values(self, packed: PackedWeight) -> torch.Tensor:
        """Return the dequantized weight ``[N, K]``."""
        return quantization.dequantize(self.tensor(packed), self.dtype, self.spec.backend)

    def tensor(self, packed: PackedWeight) -> MXFP4Tensor:
        return packed_tensor(packed, self.k, self.spec.weight_scheme, self.dtype)

    def multiply_on_fp4_cores(
        self, x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return the product of the codes of both operands; `None` where FP4 tensor cores do not multiply these."""
        way = self.on_fp4_cores
        spec = self.spec
        assert way is not None
        recipe = way.recipe_for(x)
        if recipe is None:
            return None
        if recipe == "mxfp8":
            codes: Any = quantization.quantize_mxfp8(x.detach(), spec.backend)
        else:
            codes = quantization.quantize(x.detach(), cast(QuantScheme, spec.input_scheme), spec.backend)
        return way.multiply(codes, to_fp4(self.tensor(packed), recipe), recipe, bias, self.dtype)

    def takes(self, x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None, state: GemmState) -> bool:
        """Return whether a layer may call this plan at once: without a gradient, in the dtype of autocast if that is
        on, without values in the cache that is open, and with a spec, an input and tensors as the plan was made for."""
        if state.spec is not self.spec or state.cache is not None and self.uses_values_of(state.cache):
            return False
        if torch.is_grad_enabled() and (x.requires_grad or bias is not None and bias.requires_grad):
            return False
        if self.is_cast():
            return False
        if type(x) is not torch.Tensor or x.dtype is not self.dtype or x.device != self.device:
            return False
        if not x.dim() or x.shape[-1] != self.k:
            return False
        if is_functorch_wrapped_tensor(x) or x.is_neg() or x._is_zerotensor() or forward_ad._current_level >= 0:
            return False
        for part, shape in zip(packed, self.shapes, strict=True):
            if part is None or shape is None:
                if part is not shape:
                    return False
            elif type(part) not in quantization.OWN_TYPES or part.dtype is not torch.uint8:
                return False
            elif part.shape != shape or part.device != self.device:
                return False
            elif not part.is_contiguous() or not part.data_ptr():  # FSDP frees parameters between passes
                return False
        if bias is None:
            return True
        if bias.dtype is not self.dtype or bias.device != self.device:
            return False
        return bias.shape == self.bias_shape and bias.is_contiguous()

    def is_cast(self) -> bool:
        """Return whether autocast is on with another dtype than that of the plan."""
        device = self.device.type
        if not self.has_autocast or not torch.is_autocast_enabled(device):
            return False
        return torch.get_autocast_dtype(device) is not self.dtype

    def uses_values_of(self, cache: WeightCache) -> bool:
        """Return whether products use dequantized values that a cache keeps."""
        return cache.form == "dense" and self.reader != "cpu"

    def checked(self, packed: PackedWeight, bias: torch.Tensor | None) -> tuple[PackedWeight, torch.Tensor | None]:
        """Return the tensors of a layer as products read them, copied where they are not contiguous.

        Raises:
            ValueError: one of them is missing, or has another shape or dtype.
            RuntimeError: one of them is on another device, or its memory was freed.
        """
        if self.multiply_codes is None:
            return packed, bias
        shapes = {name: shape for name, shape in zip(PACKED_FIELDS, self.shapes, strict=True) if shape is not None}
        scheme = self.spec.weight_scheme
        check_packed("the packed layer", dict(zip(PACKED_FIELDS, packed, strict=True)), shapes, scheme)
        if bias is not None and bias.shape != self.bias_shape:
            raise ValueError(f"the bias has the shape {list(bias.shape)}; expected {list(self.bias_shape)}")
        for tensor in (*packed, bias):
            if tensor is not None and tensor.device != self.device:
                raise RuntimeError(
                    f"the packed layer is on {tensor.device}, its input on {self.device}; move one of them"
                )
        in_memory = [None if tensor is None else cpu.library.in_memory(tensor) for tensor in (*packed, bias)]
        return tuple(in_memory[:-1]), in_memory[-1]


class PackedExpertsPlan(PackedPlan):
    """[`PackedPlan`] for weights ``[E, N, K]`` of experts and rows ``[S, K]`` sorted by expert."""

    has_fp8 = False

    def __init__(self, spec: GemmSpec, x: torch.Tensor, packed: PackedWeight, dtype: torch.dtype):
        super().__init__(spec, x, packed, dtype)
        self.n_experts = n_experts = len(cast(torch.Tensor, packed[0]))
        self.shapes = [None if shape is None else (n_experts, *shape) for shape in self.shapes]
        self.bias_shape = (n_experts, self.n)
        self.multiply_experts: Any = None
        weights = spec.weight_scheme
        if self.multiply_codes is not None and self.reader == "cpu":
            self.multiply_experts = cpu.PackedProduct(self.n, self.k, weights, dtype, n_experts)
        elif self.multiply_codes is not None:
            self.multiply_experts = triton_kernels.packed_product(self.n, self.k, weights, self.device, n_experts)

    def multiply_groups(
        self, x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None, groups: Groups
    ) -> torch.Tensor:
        """Return ``[S, N]``: of all experts at once where few rows are multiplied with the codes, otherwise of one
        expert after the other."""
        x = self.operand(x)
        if self._multiplies_at_once(x, groups):
            return self.multiply_experts(x, packed, bias, groups.offsets(x.device))
        out = x.new_empty(x.shape[0], self.n)
        for expert, rows in groups:
            own = tuple(None if part is None else part[expert] for part in packed)
            own_bias = None if bias is None else bias[expert]
            if x[rows].numel() <= self.most_on_codes:
                out[rows] = self.multiply_codes(x[rows], own, own_bias)
            else:
                out[rows] = F.linear(x[rows], self.values(own), own_bias)
        return out

    def _multiplies_at_once(self, x: torch.Tensor, groups: Groups) -> bool:
        if self.multiply_experts is None:
            return False
        if self.reader == "cpu":
            return max(groups.counts, default=0) <= cpu.most_rows()
        return triton_kernels.unsupported_product(x.shape[0], self.k, self.dtype, self.n_experts) is None


class PackedState(GemmState):
    """What of a packed layer, or of one projection of packed experts, changes: its cache, and its plans.

    Attributes:
        plans: by the dtype of products, the plan that was used last.
        is_captured: whether a CUDA graph was captured before there was a plan, and may refer to the layer's memory.
    """

    is_captured = False

    def plan_for(self, x: torch.Tensor, packed: PackedWeight, dtype: torch.dtype, has_groups: bool) -> PackedPlan:
        """Return the plan for an input and the tensors of the layer, made when there is none for them."""
        codes = cast(torch.Tensor, packed[0])
        is_own = quantization.has_plain_memory(x) and quantization.has_plain_memory(codes)
        plan = self.plans.get(dtype)
        if is_own and plan is not None and plan.spec is self.spec and plan.device == x.device:
            if plan.k == x.shape[-1] and plan.shapes[0] == codes.shape:
                return plan
        plan = (PackedExpertsPlan if has_groups else PackedPlan)(self.spec, x, packed, dtype)
        # A plan that is made while a CUDA graph is captured cannot check whether the kernels work.
        if is_own and quantization.is_captured(x):
            self.is_captured = True
        elif is_own:
            self.plans[dtype] = plan
        return plan


def packed_linear(
    x: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None,
    state: PackedState,
    groups: Groups | None = None,
) -> torch.Tensor:
    """``Q(x) Q(W)^T + b`` on frozen packed weights, with the straight-through gradient to ``x`` and ``b``. Where the
    spec rotates, ``x`` is rotated as the stored weight was, and the gradient is rotated back.

    Only the packed tensors are kept for the backward pass, which dequantizes them again; of experts, those of one at
    a time, and only of experts that have rows.

    Args:
        x: ``[..., K]``; with groups ``[S, K]``, rows sorted by expert.
        packed: the tensors of [`PACKED_FIELDS`], of experts each ``[E, ...]``, `None` for those that the scheme has
            not.
        bias: ``[N]``, ``[E, N]`` or `None`.
        state: of the layer.
        groups: the rows of each expert; `None` for one weight.

    Returns:
        ``[..., N]`` in the autocast dtype when autocast is on, otherwise in the dtype of ``x``.
    """
    dtype = autocast_dtype(x) or x.dtype
    if needs_gradient(x, bias):
        return _PackedLinear.apply(x, bias, state, groups, dtype, *packed)
    return _forward(x, packed, bias, state, groups, dtype)


def packed_forward(
    x: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None,
    state: PackedState,
    groups: Groups | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the forward pass of [`packed_linear`] in ``dtype``, without a gradient."""
    plan = state.plan_for(x, packed, dtype, groups is not None)
    packed, bias = plan.checked(packed, as_dtype(bias, dtype))
    if groups is None:
        return plan(x, packed, bias)
    return cast(PackedExpertsPlan, plan).multiply_groups(x, packed, bias, groups)


def packed_grad_x(
    grad: torch.Tensor, packed: PackedWeight, in_features: int, spec: GemmSpec, groups: Groups | None
) -> torch.Tensor:
    """Return the input gradient ``[..., K]`` of [`packed_linear`], in float32 or wider where the spec rotates."""
    weight = packed_tensor(packed, in_features, spec.weight_scheme, grad.dtype)
    if groups is None:
        grad_x = grad @ quantization.dequantize(weight, grad.dtype, spec.backend)
    else:
        grad_x = grad.new_empty(grad.shape[0], in_features)
        for expert, rows in groups:
            grad_x[rows] = grad[rows] @ quantization.dequantize(of_expert(weight, expert), grad.dtype, spec.backend)
    rotation = spec.scheme.fprop.rotation
    if rotation is None:
        return grad_x
    # The inverse of a deterministic rotation is its transpose, and itself.
    return quantization.rotate_rows(grad_x, rotation.size, spec.backend)


def _forward(
    x: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None,
    state: PackedState,
    groups: Groups | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return [`packed_forward`], with the dequantized values where a cache keeps those."""
    cache = state.cache
    if cache is not None and groups is None:
        plan = state.plan_for(x, packed, dtype, has_groups=False)
        if plan.uses_values_of(cache):
            values = cache.get(packed[0], (state, dtype), lambda _: plan.values(packed))
            return F.linear(plan.operand(x), values, as_dtype(bias, dtype))
    return packed_forward(x, packed, bias, state, groups, dtype)


class _PackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, state, groups, dtype, *packed):
        ctx.save_for_backward(*packed)
        ctx.spec = state.spec
        ctx.groups = groups
        ctx.in_features = x.shape[-1]
        ctx.input_dtype = x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return not_a_view(_forward(x, packed, bias, state, groups, dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            packed = ctx.saved_tensors  # once: under gradient checkpointing they can be unpacked only once
            grad_x = packed_grad_x(grad, packed, ctx.in_features, ctx.spec, ctx.groups).to(ctx.input_dtype)
        if ctx.needs_input_grad[1]:
            grad_bias = sum_rows(grad.reshape(-1, grad.shape[-1]), ctx.groups).to(ctx.bias_dtype)
        return (grad_x, grad_bias) + (None,) * (3 + len(PACKED_FIELDS))
