# SPDX-License-Identifier: Apache-2.0
"""Run a model with one component of its quantization error alone, to see what that component breaks by itself.

The components are those of arXiv 2605.20402, section 3 ([`hf_mxfp4.numerics.decompose`]). They are put in while the
model computes: no parameter is written, so there is nothing to restore but the layers' own forward functions.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from ...backends import fake_quantize
from ...config import MXFP4RLConfig
from ...gemm import autocast_dtype, quantized_linear
from ...gemm.weight_cache import WeightCache
from ...layers import MXFP4Experts, MXFP4Linear
from ...module_names import fused_experts, name_matches, split_linears
from ...numerics import COMPONENTS, QuantScheme, apply_component
from ...numerics.schemes import one_of
from ...presets import OPERANDS


#: What can be injected: one component, the whole error, or nothing (full precision).
INJECTABLE = (*COMPONENTS, "all", "none")


@dataclass
class InjectedEnergy:
    """Energy of the original tensors and of what was added to them, summed over tensors and calls."""

    original: float = 0.0
    added: float = 0.0

    @property
    def ratio(self) -> float:
        """``|x' - x|**2 / |x|**2``; NaN before anything was measured."""
        return self.added / self.original if self.original else math.nan

    def count(self, original: torch.Tensor, changed: torch.Tensor) -> None:
        """Add one tensor and its substitute."""
        original = original.detach().double()
        self.original += float(original.square().sum())
        self.added += float((changed.double() - original).square().sum())


@dataclass(frozen=True)
class Injection:
    """What [`inject_component`] did.

    Attributes:
        component: what was injected.
        layers: names of the layers that compute with it.
        weights: energy added to the weights when the context was entered, over all layers.
        activations: energy added to layer inputs in all forward passes so far.
            Both are `None` for an operand that is left alone.
    """

    component: str
    layers: tuple[str, ...]
    weights: InjectedEnergy | None
    activations: InjectedEnergy | None

    @property
    def n_layers(self) -> int:
        return len(self.layers)


@contextlib.contextmanager
def inject_component(
    model: nn.Module,
    component: str,
    scheme: QuantScheme | MXFP4RLConfig,
    *,
    operands: str = "weights",
    modules_to_not_convert: Iterable[str] = (),
    backward_only: bool = False,
) -> Iterator[Injection]:
    """Within this context the linear layers compute with ``W`` plus one component of its quantization error.

    The layers are those that [`MXFP4RLConfig`] would quantize, or the [`MXFP4Linear`] layers of a model that has some;
    these stop quantizing for as long as the context lasts, so ``"none"`` gives a quantized model's full precision.
    Gradients pass straight through, and the backward products run on the operands of the forward ones, as in
    [`hf_mxfp4.gemm.quantized_linear`], whatever a config says of them. Under w4a4 and w4a16 ``"all"`` gives the bits of
    the quantized model, forward and backward.
    Substitutes of weights are made in each pass, within [`hf_mxfp4.cached_weights`] once, at the cost of one more copy
    of the weights. Adapters on a plain model are linear layers like others: name them in ``modules_to_not_convert``.

    Args:
        model: with `nn.Linear` or [`MXFP4Linear`] layers, in any floating-point dtype.
        component: ``"scale_bias"``, ``"deadzone"``, ``"grid"``, ``"all"`` or ``"none"``.
        scheme: whose error it is, along the last axis of each operand; a config gives each operand its own scheme.
        operands: ``"weights"``, ``"activations"`` (the inputs of the layers) or ``"both"``.
        modules_to_not_convert: further layers to leave alone, besides those of a config, as there.
        backward_only: outputs keep the values of full precision, and gradients alone meet the component: what it does
            to the backward pass, apart from having changed the forward one. Costs a second product.

    Raises:
        ValueError: no layer matches, a pattern matches no module, a weight is not materialised, the model keeps experts
            in fused weights, a config does not quantize an operand asked for or rotates its forward product, or the
            scheme rounds stochastically.
    """
    one_of("component", component, INJECTABLE)
    one_of("operands", operands, OPERANDS)
    weight_scheme, activation_scheme = _schemes(scheme, operands)
    if component == "none":
        weight_scheme = activation_scheme = None
    skips = tuple(modules_to_not_convert)
    if isinstance(scheme, MXFP4RLConfig):
        skips += scheme.modules_to_not_convert or ()
    layers = injectable_linears(model, skips)
    injection = Injection(
        component,
        tuple(layers),
        weights=None if weight_scheme is None else InjectedEnergy(),
        activations=None if activation_scheme is None else InjectedEnergy(),
    )
    replaced: list[tuple[nn.Linear, Callable | None]] = []
    try:
        for layer in layers.values():
            forward = _forward(layer, injection, weight_scheme, activation_scheme, backward_only)
            # The instance's entry hides the class's forward, also for calls by way of PEFT.
            replaced.append((layer, layer.__dict__.get("forward")))
            layer.__dict__["forward"] = forward
        yield injection
    finally:
        for layer, forward in reversed(replaced):
            if forward is None:
                del layer.__dict__["forward"]
            else:
                layer.__dict__["forward"] = forward


def injectable_linears(model: nn.Module, modules_to_not_convert: Iterable[str] = ()) -> dict[str, nn.Linear]:
    """The layers that [`inject_component`] takes, by name, each once. Raises `ValueError` when there are none."""
    skips = tuple(modules_to_not_convert)
    plain, skipped = split_linears(model, skips)
    prefix = getattr(model, "base_model_prefix", "")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MXFP4Linear)}
    experts = fused_experts(model, skips)
    if layers:  # of a quantized model, plain experts were left alone on purpose
        experts = [name for name in experts if isinstance(model.get_submodule(name), MXFP4Experts)]
    if experts:
        raise ValueError(
            f"{type(model).__name__} keeps experts in fused 3-D weights ({experts[0]} and {len(experts) - 1} "
            "more), where no error can be injected; to leave them alone on purpose, add 'experts' to "
            "modules_to_not_convert"
        )
    if layers:  # a quantized model says itself which layers are
        names = [n for n in layers if any(name_matches(full, p) for full in (n, f"{prefix}.{n}") for p in skips)]
        layers = {name: layer for name, layer in layers.items() if name not in names}
        skipped = [*skipped, *names]
    else:
        layers = {name: module for name, module in model.named_modules() if name in plain}
    if not layers:
        raise ValueError(
            f"no layer of {type(model).__name__} to inject an error into: it has {len(skipped)} linear layers, all "
            f"left in full precision (modules_to_not_convert={list(skips)})"
        )
    for name, layer in layers.items():
        if layer.weight.is_meta or layer.weight.numel() == 0:
            raise ValueError(f"the weight of {name} is not materialised here; load the model on one device first")
    return layers


def _schemes(scheme: QuantScheme | MXFP4RLConfig, operands: str) -> tuple[QuantScheme | None, QuantScheme | None]:
    """The schemes of weights and of activations, `None` for an operand left alone."""
    weights = activations = scheme
    if isinstance(scheme, MXFP4RLConfig):
        if reason := scheme.weights_alone_unsupported_reason:
            raise ValueError(f"its operands have no error of their own to inject: {reason}")
        weights, activations = scheme.weight_scheme, scheme.activation_scheme
        if activations is None and operands != "weights":
            raise ValueError(f"operands={operands!r}: preset={scheme.preset!r} quantizes no activations")
    elif scheme.rounding != "nearest":
        raise ValueError(f"rounding={scheme.rounding!r}: the error to inject must be the same in every pass")
    else:
        activations = replace(scheme, block_rows=1)  # tiles are for weights: rows of activations are tokens
    return (
        None if operands == "activations" else weights,
        None if operands == "weights" else activations,
    )


def _forward(
    layer: nn.Linear,
    injection: Injection,
    weight_scheme: QuantScheme | None,
    activation_scheme: QuantScheme | None,
    backward_only: bool,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The forward function of a layer that computes with substitutes; weighs that of its weight at once."""
    cache = WeightCache()

    def input_of(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if activation_scheme is None:
            return x.detach().to(dtype)
        with torch.no_grad():
            changed = _with_component(x.detach(), injection.component, activation_scheme)
        injection.activations.count(x, changed)
        return changed.to(dtype)

    def weight_of(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        def compute() -> torch.Tensor:
            with torch.no_grad():
                return _with_component(weight.detach(), injection.component, weight_scheme).to(dtype)

        return weight.detach().to(dtype) if weight_scheme is None else cache.get(weight, dtype, compute)

    if weight_scheme is not None:
        injection.weights.count(layer.weight, weight_of(layer.weight, layer.weight.dtype))

    def full_precision(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return nn.functional.linear(x, layer.weight, layer.bias)

    def forward(x: torch.Tensor) -> torch.Tensor:
        dtype = autocast_dtype(x) or x.dtype
        changed = {"input_operand": input_of(x, dtype), "weight_operand": weight_of(layer.weight, dtype)}
        output = quantized_linear(x, layer.weight, layer.bias, **changed)
        return output if not backward_only else _GradientOf.apply(full_precision(x), output)

    return forward


class _GradientOf(torch.autograd.Function):
    """``value``, whose gradient goes to ``source``."""

    @staticmethod
    def forward(ctx, value, source):
        return value

    @staticmethod
    def backward(ctx, grad):
        return None, grad


def _with_component(x: torch.Tensor, component: str, scheme: QuantScheme) -> torch.Tensor:
    return fake_quantize(x, scheme) if component == "all" else apply_component(x, component, scheme)
