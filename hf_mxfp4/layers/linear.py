# SPDX-License-Identifier: Apache-2.0
"""The trainable linear layer: full-precision master weights, MXFP4 operands."""

import torch
from torch import nn

from ..config import MXFP4RLConfig
from ..model.plain_layers import is_plain_linear, linear_adapter, linear_size, linear_weight
from ..numerics import LinearScheme
from ..ops import (
    GemmSpec,
    GemmState,
    LayerRng,
    autocast_dtype,
    compiled_linear,
    effective_rows,
    quantized_linear,
    weight_operand,
)


class QuantizedLayer(nn.Module):
    """Mixin of all quantized layers: what messages call them, and what inputs they take."""

    name: str
    #: The class that this layer stands for.
    plain_class: type[nn.Module] = nn.Linear

    def _check_dtype(self, x: torch.Tensor, needed: torch.dtype) -> None:
        """Raise `TypeError` for an input of another dtype than the layer's, unless autocast converts it."""
        dtype = x.dtype
        is_converted = dtype == needed or autocast_dtype(x) is not None
        if not is_converted or not dtype.is_floating_point:
            raise TypeError(
                f"{self._label()}: input is {dtype} but the layer's dtype is {needed}; "
                "convert one of them, or run under torch.autocast"
            )

    def _check_features(self, x: torch.Tensor) -> None:
        """Raise `ValueError` for an input whose last axis is not `in_features`."""
        shape = x.shape
        if not shape or shape[-1] != self.in_features:
            raise ValueError(f"{self._label()}: input {tuple(shape)} does not end in in_features={self.in_features}")

    def _to_linear(self, weight: torch.Tensor, dtype: torch.dtype | None, requires_grad: bool) -> nn.Linear:
        """Return a plain layer around a weight, with a copy of the bias in ``dtype``, by default its own."""
        size = (self.out_features, self.in_features)
        adapter = linear_adapter(self)
        linear = adapter.make_empty(self.plain_class, size, self.bias is not None)
        stored = weight.mT.contiguous() if adapter.is_transposed else weight
        setattr(linear, adapter.weight_name, nn.Parameter(stored, requires_grad))
        if self.bias is not None:
            bias = self.bias.detach().to(dtype or self.bias.dtype, copy=True)
            linear.bias = nn.Parameter(bias, self.bias.requires_grad)
        return linear.train(self.training)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.config.describe()}"

    def _label(self) -> str:
        """Return what messages call the layer."""
        return f"{type(self).__name__} {self.name}".rstrip()


class MXFP4Linear(QuantizedLayer, nn.Linear):
    """`nn.Linear` that computes ``Q(x) Q(W)^T + b`` and trains the master weight ``W`` straight through, its gradients
    by quantized products too where the scheme says so.

    The parameters are those of the linear layer it stands for (same names, shapes and dtypes), so optimizers,
    DDP, FSDP2, ZeRO, PEFT and checkpoints see an ordinary layer. Nothing ever writes them but the optimizer.

    Attributes:
        config: the scheme; see [`MXFP4RLConfig`].
        name: the layer's place in the model, for messages, the options of single layers, and random numbers.
        state: the products of this layer and what of them changes: random numbers, and the cache that is open.
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
        spec = spec_of(self.config, self.config.gemms())
        self.state = GemmState(spec, [LayerRng(self.config.stochastic_seed, name)])

    @property
    def gemms(self) -> LinearScheme:
        """Return what the scheme means for the three products of this layer."""
        return self.state.spec.scheme

    @property
    def rng(self) -> LayerRng:
        """The layer's random numbers; see [`set_quantization_step`]."""
        return self.state.rngs[0]

    def set_step(self, step: int) -> None:
        """Draw the random numbers of optimizer step ``step`` from now on."""
        self.state.set_step(step)

    @classmethod
    def from_linear(cls, linear: nn.Linear, config: MXFP4RLConfig, name: str = "") -> "MXFP4Linear":
        """Return a quantized layer around the very parameters of ``linear``."""
        rows, columns = linear_size(linear)
        # Made without memory, since its parameters are replaced.
        layer = cls(columns, rows, linear.bias is not None, device="meta", config=config, name=name)
        layer.plain_class = plain_class_of(linear)
        layer.weight = linear_weight(linear)
        layer.bias = linear.bias
        return layer.train(linear.training)

    def to_linear(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """Return a plain layer whose weight holds the quantized values (in ``dtype``, default the master's)."""
        weight = self.effective_weight(self.weight)  # the master's own memory, where it is in full precision
        return self._to_linear(weight.to(dtype or weight.dtype, copy=True), dtype, self.weight.requires_grad)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``.

        Raises:
            ValueError: the last axis of ``x`` is not ``in_features``.
            TypeError: ``x`` and the weight differ in dtype outside of autocast, or are not floating-point.
        """
        parameters = self._parameters  # `nn.Module.__getattr__` takes longer
        weight = parameters["weight"] if "weight" in parameters else self.weight
        bias = parameters["bias"] if "bias" in parameters else self.bias
        if not x.dim() or x.shape[-1] != self.in_features:
            self._check_features(x)
        if x.dtype is not weight.dtype:
            self._check_dtype(x, weight.dtype)
        product = compiled_linear if torch.compiler.is_compiling() else quantized_linear
        return product(x, weight, bias, self.state)

    def full_precision_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute what the plain layer does on the master weight; see [`full_precision`]."""
        return linear_adapter(self).forward(self, x)

    def quantized_weight(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight as the forward product takes it, in ``dtype``: ``Q(W)``, of the rotated and padded weight
        where the scheme rotates. Kept by the [`WeightCache`] that is open, if any."""
        return weight_operand(weight, dtype, self.state)

    def effective_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the values ``[n, K]`` that the forward product takes for rows of a weight, rotated back."""
        return effective_rows(weight, self.state)


def plain_class_of(layer: nn.Module) -> type[nn.Module]:
    """Return the class of a plain linear layer, or that which a quantized one stands for."""
    if isinstance(layer, QuantizedLayer):
        return layer.plain_class
    if is_plain_linear(layer):
        return type(layer)
    return nn.Linear


def spec_of(config: MXFP4RLConfig, gemms: LinearScheme, transposed: bool = False) -> GemmSpec:
    """Return the products of a layer under a config."""
    return GemmSpec(gemms, config.backend, config.matmul_backend, transposed)
