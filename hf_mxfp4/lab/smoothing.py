# SPDX-License-Identifier: Apache-2.0
"""Scales by powers of two from activations into weights (SmoothQuant, arXiv 2211.10438, section 4, but with powers of
two, and root mean squares in place of maxima).

One channel of large magnitudes takes the others of its block of 32 into the deadzone. Divided by a power of two, and
the weights that read it multiplied, products and sums keep their bits, in any floating-point format.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..utils import progress_bar
from .gptq import hooked_inputs


#: Exponents of scales beyond which they are cut.
_LARGEST_EXPONENT = 12
_LEAST = 2.0**-40


@dataclass(frozen=True)
class Place:
    """Activations between the tensors that write their channels, along the first axis, and the layers that read them.

    ``heads`` are, for values of attention, how many there are and how often one of the writer is repeated.
    """

    name: str
    writers: tuple[nn.Parameter, ...]
    readers: tuple[nn.Linear, ...]
    heads: tuple[int, int] = (1, 1)

    def written(self, per_reader: torch.Tensor) -> torch.Tensor:
        """Return positive numbers of the readers' channels ``[K]`` as geometric means for the writers' channels."""
        heads, repeats = self.heads
        return per_reader.log().view(heads // repeats, repeats, -1).mean(1).exp().flatten()

    def read(self, per_writer: torch.Tensor) -> torch.Tensor:
        """Return numbers of the writers' channels for each channel of the readers."""
        heads, repeats = self.heads
        return per_writer.view(heads // repeats, 1, -1).expand(-1, repeats, -1).flatten()


@dataclass(frozen=True)
class Smoothing:
    """What [`smooth_model`] did.

    Attributes:
        places: names of the first layers that read scaled activations.
        n_channels: channels whose scale is not 1, of all channels.
        n_all: all of them.
        exponents: the smallest and the largest logarithm to base 2 of a scale.
        left: places that were left alone, because their dtype could not hold the scaled weights exactly.
    """

    places: tuple[str, ...]
    n_channels: int
    n_all: int
    exponents: tuple[int, int]
    left: tuple[str, ...]


@torch.no_grad()
def smooth_model(model: nn.Module, batches: Sequence[torch.Tensor], strength: float = 0.5) -> Smoothing:
    """Scale the activations of a decoder in full precision by channel, in place; what it computes stays the same, bit
    for bit.

    A scale is ``a**strength / w**(1 - strength)``, of the root mean squares ``a`` of a channel's activations over
    ``batches`` and ``w`` of the weights that read it, over their geometric mean, rounded to a power of two.

    Args:
        model: a causal language model of transformers, not quantized; left in evaluation mode.
        batches: token ids ``[1, tokens]`` of texts like those it is for.
        strength: 0 makes weights alike, 1 activations.

    Raises:
        ValueError: no texts; another strength; nothing in the model can be scaled; activations that are not finite; or
            its logits on the first text changed, in which case it is as it was.
    """
    if not batches:
        raise ValueError("smoothing needs texts to measure activations on, got none")
    if not 0 <= strength <= 1:
        raise ValueError(f"strength={strength} must be between 0 and 1")
    model.eval()
    places = list(find_places(model))
    if not places:
        raise ValueError(
            f"{type(model).__name__} has no layer in the layout of Llama (input_layernorm, self_attn.{{q,k,v,o}}_proj, "
            "mlp.{gate,up,down}_proj), whose activations can be scaled"
        )
    before = _logits(model, batches[0])
    squares = _mean_squares(model, places, batches)
    done, left, exponents = [], [], []
    for place in places:
        scale = _scale(place, squares[place.name], strength)
        if not _apply(place, scale):
            left.append(place.name)
            continue
        done.append((place, scale))
        exponents.append(scale.log2().round().int())
    if not torch.equal(_logits(model, batches[0]), before):
        for place, scale in done:
            _apply(place, 1 / scale)
        raise ValueError(
            f"{type(model).__name__} computes something else with scaled channels, so it was left as it was: its "
            "layers have the names, but not the arithmetic, of Llama's"
        )
    if not done:
        raise ValueError(
            f"{left[0]} and all others: {model.dtype} cannot hold the scaled weights exactly; use bfloat16"
        )
    found = torch.cat(exponents)
    return Smoothing(
        tuple(place.name for place, _ in done),
        int((found != 0).sum()),
        found.numel(),
        (int(found.min()), int(found.max())),
        tuple(left),
    )


def _logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(ids.to(model.device), use_cache=False).logits


def _mean_squares(
    model: nn.Module, places: Sequence[Place], batches: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Of each place, the mean square of each channel ``[K]``, float64 on the CPU."""
    sums = {place.name: torch.zeros(place.readers[0].in_features, dtype=torch.float64) for place in places}

    def hook(name: str):
        def add(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            sums[name] += arguments[0].flatten(0, -2).float().square().sum(0).double().cpu()

        return add

    with hooked_inputs((place.readers[0], hook(place.name)) for place in places):
        for ids in progress_bar(batches, what="Measuring activations"):
            model(ids.to(model.device), use_cache=False, logits_to_keep=1)
    for name, total in sums.items():
        if not total.isfinite().all():
            raise ValueError(f"the inputs of {name} are not finite on these texts")
    n_tokens = sum(ids.numel() for ids in batches)
    return {name: total / n_tokens for name, total in sums.items()}


def _scale(place: Place, mean_squares: torch.Tensor, strength: float) -> torch.Tensor:
    """Return the scales of a place, powers of two for each channel that is written, float64 on the CPU."""
    weights = sum(layer.weight.double().square().mean(0).cpu() for layer in place.readers) / len(place.readers)
    activations, weights = (x.sqrt().clamp(min=_LEAST) for x in (mean_squares, weights))
    exponents = place.written(activations**strength / weights ** (1 - strength)).log2()
    exponents = (exponents - exponents.mean()).round().clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    return torch.exp2(exponents)


def _apply(place: Place, scale: torch.Tensor) -> bool:
    """Scale a place, if its dtypes hold all scaled tensors without rounding; whether they do."""
    scaled = []
    for tensor, factor in _factors(place, scale):
        exact = tensor.double() * factor
        new = exact.to(tensor.dtype)
        if not torch.equal(new.double(), exact):
            return False
        scaled.append((tensor, new))
    for tensor, new in scaled:
        tensor.copy_(new)
    return True


def _factors(place: Place, scale: torch.Tensor) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Each tensor of a place, and what it is multiplied by."""
    for tensor in place.writers:
        yield tensor, (1 / scale).view(-1, *[1] * (tensor.dim() - 1)).to(tensor.device)
    for layer in place.readers:
        yield layer.weight, place.read(scale).to(layer.weight.device)


def find_places(model: nn.Module) -> Iterator[Place]:
    """Return the places of a decoder in the layout of Llama (Qwen2, Qwen3, Mistral, SmolLM and others): inputs of
    attention and of dense MLPs behind their norms, values of attention before the output projection, and inputs of the
    down projection. Layers of another layout are passed over."""
    for name, layer in model.named_modules():
        attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
        if isinstance(attention, nn.Module):
            yield from _of_attention(f"{name}.self_attn", layer, attention)
        if isinstance(mlp, nn.Module):
            yield from _of_mlp(f"{name}.mlp", layer, mlp)


def _of_attention(name: str, layer: nn.Module, attention: nn.Module) -> Iterator[Place]:
    inputs, norm = _linears(attention, "q_proj", "k_proj", "v_proj"), _weight(layer, "input_layernorm")
    if inputs is None:
        return
    if norm is not None:
        yield Place(f"{name}.q_proj", norm, inputs)
    output, width = _linears(attention, "o_proj"), getattr(attention, "head_dim", None)
    if output is None or not isinstance(width, int):
        return
    (output,), values = output, inputs[2]
    heads, kept = output.in_features // width, values.out_features // width
    if kept and heads * width == output.in_features and kept * width == values.out_features and heads % kept == 0:
        yield Place(f"{name}.o_proj", _writers(values), (output,), (heads, heads // kept))


def _of_mlp(name: str, layer: nn.Module, mlp: nn.Module) -> Iterator[Place]:
    inputs, norm = _linears(mlp, "gate_proj", "up_proj"), _weight(layer, "post_attention_layernorm")
    if inputs is None:
        return
    # Where another norm lies behind attention, this one writes nothing that the MLP reads.
    if norm is not None and _weight(layer, "pre_feedforward_layernorm") is None:
        yield Place(f"{name}.gate_proj", norm, inputs)
    down = _linears(mlp, "down_proj")
    if down is not None and down[0].in_features == inputs[1].out_features:
        yield Place(f"{name}.down_proj", _writers(inputs[1]), down)


def _linears(module: nn.Module, *names: str) -> tuple[nn.Linear, ...] | None:
    found = [getattr(module, name, None) for name in names]
    return tuple(found) if all(type(layer) is nn.Linear for layer in found) else None


def _weight(layer: nn.Module, name: str) -> tuple[nn.Parameter] | None:
    """Return the weight of a norm, where that is what its output is multiplied by: Gemma adds 1 to it first."""
    norm = getattr(layer, name, None)
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, nn.Parameter):
        return None
    x = torch.linspace(-1, 2, len(weight), dtype=weight.dtype, device=weight.device)
    with torch.no_grad():
        once = norm(x)
        weight.mul_(2)
        twice = norm(x)
        weight.div_(2)
    return (weight,) if torch.equal(twice, 2 * once) else None


def _writers(layer: nn.Linear) -> tuple[nn.Parameter, ...]:
    return (layer.weight,) if layer.bias is None else (layer.weight, layer.bias)
