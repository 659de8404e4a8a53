# SPDX-License-Identifier: Apache-2.0
"""The trainable linear layer: full-precision master weights, MXFP4 operands."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ..config import MXFP4RLConfig
from ..gemm import (
    BackwardProducts,
    Draws,
    FastProducts,
    SavedInput,
    autocast_dtype,
    computes_on_codes,
    packed_product,
    quantized_linear,
    rotate_back,
)
from ..gemm.custom_ops import LinearForm, PackedForm, new_handle, trainable_linear
from ..gemm.packed_weight import PACKED_FIELDS, PackedWeight, dequantize, packed_tensor, quantize_weight
from ..gemm_options import packing_obstacle
from ..numerics import PLAIN, FallbackThreshold, LinearScheme, MXFP4Tensor, QuantScheme
from .operands import input_operand, nearest_input, packed_operand, weight_operand
from .weight_cache import WeightCache, copies_are_shared, form_in_force, kept_for_backward


#: Up to this many rows dequantization is a notable part of a product, and a copy of the weight worth its memory.
_ROWS_WORTH_A_COPY = 4096


class MXFP4Linear(nn.Linear):
    """`nn.Linear` that computes ``Q(x) Q(W)^T + b`` and trains the master weight ``W`` straight through, its gradients
    by quantized products too where the scheme says so.

    The parameters are those of the linear layer it stands for (same names, shapes and dtypes), so optimizers,
    DDP, FSDP2, ZeRO, PEFT and checkpoints see an ordinary layer. Nothing ever writes them but the optimizer.

    Attributes:
        config: the scheme; see [`MXFP4RLConfig`].
        name: the layer's place in the model, for messages, the options of single layers, and random numbers.
        gemms: what the scheme means for the three products of this layer; see [`set_gemms`].
        draws: the layer's random numbers; see [`set_quantization_step`].
        dithered: by parameter, the dtype whose numbers it held before it was dithered, and what tells whether it has
            been trained since; see [`dither_masters`].
        form, packed_form, handle: of the layer's operators in compiled code; see [`hf_mxfp4.gemm.custom_ops`].
        fallback_threshold: which blocks of its input get outlier fallback, where the scheme selects some; `None` where
            it does not. Moved by [`update_fallback_thresholds`] alone.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        config: MXFP4RLConfig | None = None,
        name: str = "",
    ):
        super().__init__(in_features, out_features, bias, device, dtype)
        self.config = config or MXFP4RLConfig()
        self.name = name
        self.handle = new_handle(self)
        self.dithered: dict[str, tuple[torch.dtype, int]] = {}
        self.draws = Draws(self.config.stochastic_seed, name)
        self.set_gemms(self.config.gemms(name))
        self._cache, self._folded = WeightCache(), WeightCache()
        # Beside a packed copy, for prompts: one call reads one.
        self._values = WeightCache(unasked="nowhere")
        rate = None if self._activation_scheme is None else self._activation_scheme.fallback_rate
        self.fallback_threshold = None if rate is None else FallbackThreshold(rate)

    def set_gemms(self, gemms: LinearScheme) -> None:
        """Compute the three products as ``gemms`` says, whose forward one must be the config's."""
        if gemms.fprop != self.config.gemms(self.name).fprop:
            raise ValueError(f"{self._label()}: single layers can differ from the config in dgrad and wgrad alone")
        self.gemms = gemms
        left, right = gemms.fprop.left, gemms.fprop.right
        self._activation_scheme = left if isinstance(left, QuantScheme) else None
        self._weight_scheme = right if isinstance(right, QuantScheme) else None
        plain = gemms.dgrad == gemms.wgrad == PLAIN and gemms.fprop.rotation is None and not gemms.is_random
        self._products = None if plain else BackwardProducts(gemms, self.draws, self.config.backend)
        self.form = LinearForm.of(gemms, self._products, self.config.saved_activations, self.in_features)
        self.packed_form = PackedForm.of(self._weight_scheme, self._activation_scheme, self.config.backend)

    @property
    def is_random(self) -> bool:
        """Whether the layer draws random numbers."""
        return self.gemms.is_random

    def set_step(self, step: int) -> None:
        """Draw the random numbers of optimizer step ``step`` from now on."""
        self.draws.set_step(step)
        if self.gemms.fprop.is_random:
            self._cache.clear()
            self._folded.clear()

    @classmethod
    def from_linear(cls, linear: nn.Linear, config: MXFP4RLConfig, name: str = "") -> "MXFP4Linear":
        """A quantized layer around the very parameters of ``linear``."""
        layer = cls(
            linear.in_features, linear.out_features, linear.bias is not None, device="meta", config=config, name=name
        )
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer.train(linear.training)

    def to_linear(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """A plain layer whose weight holds the quantized values (in ``dtype``, default the master's)."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        with torch.no_grad():
            weight = self.effective_weight(self.weight)
            linear.weight = nn.Parameter(weight.to(dtype or weight.dtype), self.weight.requires_grad)
            if self.bias is not None:
                bias = self.bias.detach().to(dtype or self.bias.dtype, copy=True)
                linear.bias = nn.Parameter(bias, self.bias.requires_grad)
        return linear.train(self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` to ``[..., out_features]``.

        Raises:
            ValueError: the last axis of ``x`` is not ``in_features``.
            TypeError: ``x`` and the weight differ in dtype outside of autocast, or are not floating-point.
        """
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"{self._label()}: input {tuple(x.shape)} does not end in in_features={self.in_features}")
        if not x.is_floating_point() or x.dtype != self.weight.dtype and autocast_dtype(x) is None:
            raise TypeError(
                f"{self._label()}: input is {x.dtype} but the weight is {self.weight.dtype}; "
                "convert one of them, or run under torch.autocast"
            )
        if torch.compiler.is_compiling():
            return trainable_linear(self, x)
        product = None if torch.is_grad_enabled() else self.rollout_product(x, autocast_dtype(x) or x.dtype)
        if product is not None:
            self._share_copy()
            return product
        return quantized_linear(x, self.weight, self.bias, **self.parts())

    def parts(self) -> dict[str, Any]:
        """The arguments of [`hf_mxfp4.gemm.quantized_linear`] that say how, by name, for one pass."""
        engine = self.config.engine
        return {
            "quantize_input": self.forward_input,
            "quantize_weight": kept_for_backward(self.quantized_weight),
            "products": self._products,
            "saved": SavedInput(self.config.saved_activations, self.packed_input),
            "fast": None if engine == "dense" else FastProducts(self.gemms, engine, self.draws, self._keep_folded),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.handle = new_handle(self)  # a copied or unpickled layer is another one

    def rollout_form(self, x: torch.Tensor, asked: str | None) -> str:
        """In which form a [`cached_weights`] context keeps the weight for products without gradients with tensors like
        ``x``: ``"packed"`` or ``"dense"``.

        Args:
            asked: one of `WEIGHT_FORMS`; `None` outside of such a context, where weights are dense.

        Schemes whose weights cannot be packed (rotated, stochastic, in full precision) stay dense whatever is asked.
        """
        if asked in (None, "dense") or packing_obstacle(self.gemms.fprop) is not None:
            return "dense"
        if asked == "packed":
            return "packed"
        operand = x.new_empty(0, dtype=autocast_dtype(x) or x.dtype)
        return "packed" if computes_on_codes(operand, self._weight_scheme, self.config.backend) else "dense"

    def rollout_product(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """The product in ``dtype`` with the packed copy of the weight; `None` where no context keeps one."""
        if self.rollout_form(x.new_empty(0, dtype=dtype), form_in_force()) != "packed":
            return None
        packed = self._packed_copy()
        bias = None if self.bias is None else self.bias.to(dtype)
        values = partial(dequantize, packed, dtype, self.config.backend)
        if form_in_force() == "auto" and x.shape[:-1].numel() <= _ROWS_WORTH_A_COPY:
            values = partial(self._values.get, self.weight, dtype, values)
        return packed_product(self.forward_input(x, dtype), packed, bias, values, self.config.backend)

    @property
    def shared_weight(self) -> PackedWeight | None:
        """The packed copy of the weight, for compiled code; see [`WeightCache`]."""
        return self._cache.shared

    def _share_copy(self) -> None:
        # Of a prompt, which runs in eager mode before compiled code takes single tokens.
        if self._cache.shared is not None or not copies_are_shared():
            return
        if self.fallback_threshold is None and not self.gemms.fprop.is_random:
            packed = self._packed_copy()
            self._cache.share(tuple(getattr(packed, field) for field in PACKED_FIELDS.values()))

    def _packed_copy(self) -> MXFP4Tensor:
        return self._cache.get(self.weight, torch.uint8, self._packed_weight)

    def _packed_weight(self) -> MXFP4Tensor:
        tensors = quantize_weight(self.weight, self._weight_scheme, self.config.backend)
        return packed_tensor(tensors, self.in_features, self._weight_scheme, self.weight.dtype)

    def full_precision_forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the plain layer computes on the master weight; see [`full_precision`]."""
        return super().forward(x)

    def forward_input(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The input as the forward product takes it, in ``dtype``: rotated and quantized as the scheme says."""
        return input_operand(x, dtype, self.gemms.fprop, self.draws, self.fallback_threshold, self.config.backend)

    def packed_input(self, x: torch.Tensor) -> MXFP4Tensor:
        """[`forward_input`] as codes and scale bytes. Only under a scheme that quantizes activations."""
        return packed_operand(x, self.gemms.fprop, self.draws, self.fallback_threshold, self.config.backend)

    def quantized_input(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``Q(x)`` in ``dtype``; ``x`` itself under a weight-only preset."""
        return nearest_input(x, dtype, self._activation_scheme, self.fallback_threshold, self.config.backend)

    def quantized_weight(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The weight as the forward product takes it, in ``dtype``: ``Q(W)``, of the rotated and padded weight where
        the scheme rotates. Kept as [`WeightCache`] says."""
        if self._weight_scheme is None and self.gemms.fprop.rotation is None:
            return weight.detach().to(dtype)
        return self._cache.get(weight, dtype, lambda: self.weight_operand(weight).to(dtype))

    def _keep_folded(self, weight: torch.Tensor, compute: Callable[[], Any]) -> Any:
        """The weight as a fast engine takes it, kept as [`WeightCache`] says."""
        return self._folded.get(weight, weight.dtype, compute)

    def effective_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """The values ``[n, K]`` that the forward product takes for rows of a weight, rotated back, in its dtype."""
        values = rotate_back(
            self.weight_operand(weight), self.gemms.fprop.rotation, "fprop", weight.shape[-1], self.draws
        )
        return values.to(weight.dtype)

    def weight_operand(self, weight: torch.Tensor) -> torch.Tensor:
        """[`quantized_weight`] in the dtype that it is computed in, not kept."""
        return weight_operand(weight, self.gemms.fprop, self.draws, self.config.backend)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.config.describe()}"

    def _label(self) -> str:
        return f"{type(self).__name__} {self.name}".rstrip()
