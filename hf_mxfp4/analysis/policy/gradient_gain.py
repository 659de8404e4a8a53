# SPDX-License-Identifier: Apache-2.0
"""How quantization changes gradients on their way back through the layers, measured on the real stack.

**The prediction.** arXiv 2605.20402 has scale bias accumulate multiplicatively in the backward pass: a power-of-two
scale is ``gamma = 2**delta`` times the ideal one, ``delta`` uniform in [0, 1), with standard deviation ``1/sqrt(12)``.
If every layer multiplied the gradient by one independent gamma, the log2 of the product over L layers would be a random
walk: standard deviation ``sqrt(L/12)`` around its drift (L/2, unless something divides it out again).

**Why it need not come true.** Gamma is the step of a grid, not a factor on the tensor: dequantizing multiplies by the
scale that quantizing divided by. And a layer has thousands of blocks, each with its own gamma. What does multiply is
the gain ``<Q(x), x> / <x, x>``, about 0.99 for MXFP4 ([`hf_mxfp4.numerics.ErrorDecomposition`]).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ...config import MXFP4RLConfig
from ...layers import TRAINABLE, cached_weights, full_precision
from ...numerics import QuantScheme
from .injection import inject_component, injectable_linears
from .predictions import IGNORED, evaluation_mode, forward_logits, next_tokens


#: Rows of logits that the loss is computed of at a time.
_ROWS = 128


@dataclass(frozen=True)
class GradientAtDepth:
    """The gradient of the loss for one hidden state, quantized against full precision.

    Attributes:
        name: the decoder layer whose input it is; ``"output"`` for the output of the last one.
        depth: L, the number of layers that the gradient passed through; 0 for the output, where it differs only because
            the forward pass did.
        log2_gain: log2 of the ratio of the two gradients' norms.
        log2_gain_spread: standard deviation of the same over the sequences that have a gradient; NaN for fewer than 2.
        cosine: of the angle between the two gradients.
        relative_error: ``|g_q - g| / |g|``.
    """

    name: str
    depth: int
    log2_gain: float
    log2_gain_spread: float
    cosine: float
    relative_error: float

    @property
    def predicted_sd(self) -> float:
        """``sqrt(L/12)``: the standard deviation of the log2 gain if every scale ratio were a gain."""
        return math.sqrt(self.depth / 12)


@dataclass(frozen=True)
class GradientGain:
    """Gradients from the top of the stack down.

    Attributes:
        depths: one entry per depth, 0 (output of the last layer) to the number of layers (input of the first).
        loss, loss_quantized: mean negative log-likelihood of the tokens that count, in nats.
        n_layers: linear layers that were quantized.
    """

    depths: tuple[GradientAtDepth, ...]
    loss: float
    loss_quantized: float
    n_layers: int

    @property
    def log2_growth_per_layer(self) -> float:
        """Change of the log2 gain from the top to the bottom of the stack, per layer."""
        return (self.depths[-1].log2_gain - self.depths[0].log2_gain) / self.depths[-1].depth


def gradient_gain(
    model: nn.Module,
    input_ids: torch.Tensor,
    scheme: QuantScheme | MXFP4RLConfig,
    labels: torch.Tensor | None = None,
    *,
    attention_mask: torch.Tensor | None = None,
    component: str = "all",
    operands: str = "both",
    modules_to_not_convert: Iterable[str] = (),
    backward_only: bool = False,
) -> GradientGain:
    """Ratio, angle and error of the gradients for every decoder layer's input, quantized against full precision.

    The loss is the mean next-token cross-entropy in float32. Both passes run on the same sequences in evaluation mode;
    no `grad` of a parameter is touched, and frozen parameters do not matter.

    Args:
        input_ids, labels, attention_mask: the sequences, as of [`next_tokens`].
        component, operands, scheme, modules_to_not_convert: the error put in; see [`inject_component`]. With ``"all"``
            the gradients are those of the quantized model's training.
        backward_only: leave the forward pass in full precision, so that what is measured is the way back alone. The
            gradient is then exact at depth 0, and what each layer adds is its ``Q(W)`` in ``dx = dy Q(W)``.

    Raises as these two do, and `ValueError` when no stack of decoder layers is found.
    """
    targets = next_tokens(input_ids, labels, attention_mask).to(next(model.parameters()).device)
    skips = tuple(modules_to_not_convert)
    layers = decoder_layers(model, skips)

    def gradients(what: str) -> tuple[float, list[torch.Tensor], int]:
        back = backward_only and what != "none"
        with (
            cached_weights(),  # substitutes of weights are made once
            inject_component(
                model, what, scheme, operands=operands, modules_to_not_convert=skips, backward_only=back
            ) as injection,
        ):
            return *_hidden_gradients(model, layers, input_ids, attention_mask, targets), injection.n_layers

    loss, reference, _ = gradients("none")
    loss_quantized, quantized, n_layers = gradients(component)
    return GradientGain(_compare_all(layers, reference, quantized), loss, loss_quantized, n_layers)


def training_gradient_gain(
    model: nn.Module,
    input_ids: torch.Tensor,
    labels: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
) -> GradientGain:
    """[`gradient_gain`] of a quantized model as it trains, whatever its scheme is: the three products of every layer as
    they are computed, against the same model in full precision. Experts and rotations are supported here.

    Arguments, and errors, as there; `ValueError` too when the model has packed layers or none that is quantized.
    """
    targets = next_tokens(input_ids, labels, attention_mask).to(next(model.parameters()).device)
    quantized_layers = [name for name, module in model.named_modules() if isinstance(module, TRAINABLE)]
    layers = _largest_stack(model, quantized_layers)
    with full_precision(model):
        loss, reference = _hidden_gradients(model, layers, input_ids, attention_mask, targets)
    loss_quantized, quantized = _hidden_gradients(model, layers, input_ids, attention_mask, targets)
    return GradientGain(_compare_all(layers, reference, quantized), loss, loss_quantized, len(quantized_layers))


def decoder_layers(model: nn.Module, modules_to_not_convert: Iterable[str] = ()) -> dict[str, nn.Module]:
    """The layers of the decoder by name, in order: the outermost `nn.ModuleList` with most of the linear layers to
    quantize. Raises `ValueError` when there is none, or none with more than the others."""
    return _largest_stack(model, injectable_linears(model, modules_to_not_convert))


def _largest_stack(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """The modules of the outermost `nn.ModuleList` that holds most of the layers called ``names``."""
    names = list(names)
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and not inside:
            found[name] = sum(linear.startswith(f"{name}.") for linear in names)
    largest = max(found.values(), default=0)
    stacks = [name for name, count in found.items() if count == largest]
    if largest == 0 or len(stacks) > 1:
        raise ValueError(
            f"{type(model).__name__} has no single stack of decoder layers: " + (", ".join(stacks) or "no ModuleList")
        )
    return {f"{stacks[0]}.{name}": layer for name, layer in model.get_submodule(stacks[0]).named_children()}


def _hidden_gradients(
    model: nn.Module,
    layers: dict[str, nn.Module],
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    targets: torch.Tensor,
) -> tuple[float, list[torch.Tensor]]:
    """The loss, and its gradients for the hidden states from the output of the last layer to the input of the first."""
    states: list[torch.Tensor] = []
    with evaluation_mode(model), torch.enable_grad():
        handles = [layer.register_forward_pre_hook(_recorder(states), with_kwargs=True) for layer in layers.values()]
        last = list(layers.values())[-1]
        handles.append(
            last.register_forward_hook(
                lambda module, args, output: states.append(output[0] if isinstance(output, tuple) else output)
            )
        )
        try:
            logits = forward_logits(model, input_ids, attention_mask, targets != IGNORED)
        finally:
            for handle in handles:
                handle.remove()
        if len(states) != len(layers) + 1:
            raise ValueError(f"{len(layers)} decoder layers were called {len(states) - 1} times in one pass")
        loss, gradient = _loss_and_gradient(logits.detach(), targets[targets != IGNORED].to(logits.device))
        grads = torch.autograd.grad(logits, states, gradient)
    return loss, list(reversed(grads))


def _loss_and_gradient(logits: torch.Tensor, targets: torch.Tensor) -> tuple[float, torch.Tensor]:
    """The mean cross-entropy in float32 of logits ``[tokens, vocabulary]``, and its gradient for them in their dtype.
    Some rows at a time: what is computed on the way is several times as large."""
    gradient, loss = torch.empty_like(logits), 0.0
    for start in range(0, len(logits), _ROWS):
        rows = slice(start, start + _ROWS)
        part = logits[rows].float().requires_grad_(True)
        share = F.cross_entropy(part, targets[rows], reduction="sum") / len(logits)
        gradient[rows] = torch.autograd.grad(share, part)[0].to(logits.dtype)
        loss += share.item()
    return loss, gradient


def _recorder(states: list[torch.Tensor]):
    """A forward-pre-hook that keeps the layer's hidden state; the first is cut off, so that frozen weights below it
    leave no gap in the graph."""

    def record(module: nn.Module, args: tuple, kwargs: dict):
        hidden = args[0] if args else kwargs["hidden_states"]
        if not states:
            hidden = hidden.detach().requires_grad_(True)
            args, kwargs = ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})
        states.append(hidden)
        return args, kwargs

    return record


def _compare_all(
    layers: Iterable[str], reference: list[torch.Tensor], quantized: list[torch.Tensor]
) -> tuple[GradientAtDepth, ...]:
    names = ["output", *reversed(list(layers))]
    return tuple(_compare(name, depth, reference[depth], quantized[depth]) for depth, name in enumerate(names))


def _compare(name: str, depth: int, reference: torch.Tensor, quantized: torch.Tensor) -> GradientAtDepth:
    reference, quantized = reference.double(), quantized.double()
    norm, norm_quantized = float(reference.norm()), float(quantized.norm())
    product = float((reference * quantized).sum())
    rows = torch.stack([quantized.flatten(1).norm(dim=1), reference.flatten(1).norm(dim=1)])
    gains = (rows[0] / rows[1])[(rows > 0).all(dim=0)].log2()
    return GradientAtDepth(
        name=name,
        depth=depth,
        log2_gain=math.log2(norm_quantized / norm) if norm and norm_quantized else math.nan,
        log2_gain_spread=float(gains.std()) if len(gains) > 1 else math.nan,
        cosine=product / (norm * norm_quantized) if norm and norm_quantized else math.nan,
        relative_error=float((quantized - reference).norm()) / norm if norm else math.nan,
    )
