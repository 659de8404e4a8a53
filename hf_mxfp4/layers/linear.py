# SPDX-License-Identifier: Apache-2.0
"""The trainable linear layer: full-precision master weights, MXFP4 operands."""

import torch
from torch import nn

from ..config import MXFP4RLConfig
from ..numerics import FallbackThreshold
from ..ops import autocast_dtype, fake_quantize, quantized_linear
from .fallback import quantize_delayed
from .weight_cache import WeightCache


class MXFP4Linear(nn.Linear):
    """`nn.Linear` that computes ``Q(x) Q(W)^T + b`` and trains the master weight ``W`` straight through.

    The parameters are those of the linear layer it stands for (same names, shapes and dtypes), so optimizers,
    DDP, FSDP2, ZeRO, PEFT and checkpoints see an ordinary layer. Nothing ever writes them but the optimizer.

    Attributes:
        config: the scheme; see [`MXFP4RLConfig`].
        name: the layer's place in the model, for messages.
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
        self._weight_scheme = self.config.weight_scheme
        self._activation_scheme = self.config.activation_scheme
        self._cache = WeightCache()
        rate = None if self._activation_scheme is None else self._activation_scheme.fallback_rate
        self.fallback_threshold = None if rate is None else FallbackThreshold(rate)

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
            weight = fake_quantize(self.weight, self._weight_scheme, self.config.backend)
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
        return quantized_linear(x, self.weight, self.bias, self.quantized_input, self.quantized_weight)

    def quantized_input(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``Q(x)`` in ``dtype``; ``x`` itself under a weight-only preset."""
        if self._activation_scheme is None:
            return x.to(dtype)
        if self.fallback_threshold is not None:
            scheme = self._activation_scheme
            return quantize_delayed(x, scheme, self.fallback_threshold, self.config.backend).to(dtype)
        return fake_quantize(x, self._activation_scheme, self.config.backend).to(dtype)

    def quantized_weight(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``Q(W)`` in ``dtype``, kept until the weight changes."""

        def compute() -> torch.Tensor:
            with torch.no_grad():
                return fake_quantize(weight.detach(), self._weight_scheme, self.config.backend).to(dtype)

        return self._cache.get(weight, dtype, compute)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.config.describe()}"

    def _label(self) -> str:
        return f"{type(self).__name__} {self.name}".rstrip()
