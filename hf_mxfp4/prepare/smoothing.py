# SPDX-License-Identifier: Apache-2.0
"""Scales by powers of two from activations into weights (SmoothQuant, arXiv 2211.10438, section 4, but with powers of
two, and root mean squares in place of maxima).

One channel of large magnitudes takes the others of its block of 32 into the deadzone. Divided by a power of two, and
the weights that read it multiplied, products and sums keep their bits, in any floating-point format.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from .._logging import get_logger
from ..config import MXFP4RLConfig
from ..layers import TRAINABLE, MXFP4Experts, full_precision
from ..model.structure import projections
from ..ops import Groups
from ..utils import evaluation_mode, progress_bar
from .dither import sixteen_bit_dtype
from .places import NORM, PRODUCTS, VALUES, Place, find_places


#: What lost least on SmolLM2 (docs/smoothing.md).
STRENGTH = 0.3
#: Rows and tokens of the ids that activations are measured on where no text is given.
_SHAPE = (4, 64)
#: Tokens that the outputs before and after are compared on.
_COMPARED = 16
#: In half of the comparison what norms, value and up projections give is so many times as large as usual, so that a
#: limit that the model sets to it would show.
_AMPLIFIED = 64.0
#: Exponents of scales beyond which they are cut.
_LARGEST_EXPONENT = 12
#: Smaller magnitudes of activations or weights, in comparison with those of all channels, count as so large: a channel
#: that is silent on a few tokens may speak on others.
_LEAST = 2.0**-10
#: An expert that got fewer tokens keeps its channels as they are.
_FEWEST_TOKENS = 8
#: Seconds after which progress is shown.
_PATIENCE = 5


@dataclass(frozen=True)
class Smoothing:
    """What [`smooth_model`] did; `quantization_report.smoothing`.

    Attributes:
        places: names of the first layers that read scaled activations.
        n_channels: channels whose scale is not 1, of all channels.
        n_all: all of them.
        exponents: the smallest and the largest logarithm to base 2 of a scale.
        n_inexact: channels that kept their scale, since their dtype could not hold the scaled weights exactly.
        undone: kinds of places that were left as they were, since outputs changed with them.
    """

    places: tuple[str, ...]
    n_channels: int
    n_all: int
    exponents: tuple[int, int]
    n_inexact: int
    undone: tuple[str, ...]

    def __str__(self) -> str:
        low, high = self.exponents
        text = f"smoothed {len(self.places)} places, {self.n_channels} of {self.n_all} channels by 2^{low} to 2^{high}"
        if self.n_inexact:
            text += f"; {self.n_inexact} more have no exact scale"
        if self.undone:
            text += f"; not {', '.join(self.undone)}, with which outputs change"
        return text


def smooth_loaded(model: nn.Module) -> Smoothing | None:
    """Smooth a model as `from_pretrained` has loaded it from a plain checkpoint in mode ``"qat"``, on random token ids.

    Where that is not possible, the model is as it was, and one line says why and what to do.
    """
    reason = _unsupported_reason(model)
    if reason is None:
        try:
            return smooth_model(model)
        # Whatever a model of another layout does when it gets nothing but token ids, it is to load.
        except Exception as error:
            reason = str(error)
            if not isinstance(error, ValueError):
                reason = f"{type(error).__name__}: {error}"
    get_logger().warning(
        "%s is loaded without smoothing: %s (smooth=False leaves this line out)", type(model).__name__, reason
    )
    return None


def _unsupported_reason(model: nn.Module) -> str | None:
    """Return why a model cannot be smoothed as it is loaded, and what to do; `None` where it can."""
    first = "run `hf-mxfp4 smooth` first, and load what it writes"
    for parameter in model.parameters():
        if hasattr(parameter, "ds_id") or hasattr(parameter, "full_tensor"):
            return f"its weights are spread over processes; {first}"
        if parameter.is_meta:
            return f"its weights are not all in memory; {first}, or load it without offloading"
        if parameter.dtype == torch.float16:
            return "float16 has too few exponents to scale by powers of two; load it in bfloat16 or float32"
    return None


def calibration_ids(model: nn.Module) -> torch.Tensor:
    """Return the token ids ``[4, 64]`` that activations are measured on where no text is given: random ones, always
    the same, which do as well as texts (docs/smoothing.md)."""
    n_tokens = model.get_input_embeddings().num_embeddings
    return torch.randint(n_tokens, _SHAPE, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def smooth_model(
    model: nn.Module, batches: Sequence[torch.Tensor] | None = None, strength: float = STRENGTH
) -> Smoothing:
    """Scale the activations of a decoder in full precision by channel, in place; what it computes stays the same, bit
    for bit.

    A scale is ``a**strength / w**(1 - strength)``, of the root mean squares ``a`` of a channel's activations over
    ``batches`` and ``w`` of the weights that read it, over their geometric mean, rounded to a power of two.

    Args:
        model: a causal language model of transformers, not quantized, or of mode ``"qat"``, whose master weights are
            scaled.
        batches: token ids ``[rows, tokens]`` of texts like those it is for; by default [`calibration_ids`].
        strength: 0 makes weights alike, 1 activations.

    Raises:
        ValueError: no texts; another strength; nothing in the model can be scaled; activations that are not finite; or
            its outputs changed at each kind of places, in which case it is as it was.
    """
    if not 0 <= strength <= 1:
        raise ValueError(f"strength={strength} must be between 0 and 1")
    decoder = _decoder(model)
    batches = [calibration_ids(model)] if batches is None else batches
    if not batches:
        raise ValueError("smoothing needs texts to measure activations on, got none")
    is_quantized = any(isinstance(module, TRAINABLE) for module in model.modules())
    with (
        evaluation_mode(model),
        _plain_attention(decoder),
        full_precision(model) if is_quantized else contextlib.nullcontext(),
    ):
        batches = [ids.to(model.device) for ids in batches]
        compared = batches[0][:1, :_COMPARED]
        places = find_places(model, decoder, compared[:, :2])
        if not places:
            raise ValueError(
                f"{type(model).__name__} has no layer whose activations can be scaled: none that reads a norm, and no "
                "v_proj before an o_proj or up_proj before a down_proj"
            )
        sums = _mean_squares(decoder, places, batches)
        wanted = {place: _exponents(place, sums[place], strength) for place in places}
        return _smooth_places(decoder, wanted, compared)


def _decoder(model: nn.Module) -> nn.Module:
    """Return the part of a model that turns token ids into hidden states."""
    has_encoder = getattr(getattr(model, "config", None), "is_encoder_decoder", True)
    if has_encoder or not isinstance(model.get_input_embeddings(), nn.Embedding):
        raise ValueError(f"{type(model).__name__} is no decoder that gets token ids alone; leave smoothing out")
    return model.get_decoder()


@contextlib.contextmanager
def _plain_attention(decoder: nn.Module) -> Iterator[None]:
    """Compute attention in plain torch in this context: kernels may need a GPU, which the model is not on yet, or more
    than token ids."""
    configs = {id(module.config): module.config for module in decoder.modules() if hasattr(module, "config")}
    chosen = [config for config in configs.values() if getattr(config, "_attn_implementation", None) is not None]
    names = [config._attn_implementation for config in chosen]
    try:
        for config in chosen:
            config._attn_implementation = "eager"
        yield
    finally:
        for config, name in zip(chosen, names, strict=True):
            config._attn_implementation = name


# ---- scales ---------------------------------------------------------------------------------------------------------


def _mean_squares(
    decoder: nn.Module, places: Sequence[Place], batches: Sequence[torch.Tensor]
) -> dict[Place, torch.Tensor]:
    """Return the mean square of each channel that readers get, float64 ``[G, channels]`` on the CPU; 0 for experts that
    got too few tokens."""
    measures = {place: _MeanSquare(place) for place in places}
    total = len(places) * len(batches)
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(progress_bar(total=total, what="Measuring activations", delay=_PATIENCE))

        def advance(layer: nn.Module, arguments: tuple) -> None:
            bar.update()

        for place, measure in measures.items():
            stack.callback(measure.watch().remove)
            stack.callback(place.layer.register_forward_pre_hook(advance).remove)
        for ids in batches:
            decoder(input_ids=ids, use_cache=False)
    return {place: measure.result() for place, measure in measures.items()}


class _MeanSquare:
    """Sums the squares of what the readers of a place get."""

    def __init__(self, place: Place):
        self.place = place
        self.sums = torch.zeros(place.groups, place.n_read, dtype=torch.float64)
        self.counts = torch.zeros(place.groups, 1, dtype=torch.float64)

    def watch(self) -> RemovableHandle:
        """Listen to the layer of the place until the handle is removed."""
        reads_products_of_experts = self.place.source is None
        note = self._run_experts if reads_products_of_experts else self._note_input
        return self.place.layer.register_forward_pre_hook(note)

    def _note_input(self, layer: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        self._add(0, arguments[0])

    def _add(self, group: int, x: torch.Tensor) -> None:
        """Count rows ``[..., channels]`` that the readers of a group get."""
        rows = x.flatten(0, -2)
        self.sums[group] += rows.float().square().sum(0).double().cpu()
        self.counts[group] += len(rows)

    def _run_experts(self, experts: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        """Run experts once more, one by one, to see what their down projections get."""
        layer = experts
        if not isinstance(layer, MXFP4Experts):
            layer = MXFP4Experts.from_experts(experts, MXFP4RLConfig())

        def project(projection: str, x: torch.Tensor, groups: Groups) -> torch.Tensor:
            rows = layer.rows_first(getattr(layer, projection))
            bias = layer.bias_of(projection)
            out = x.new_empty(len(x), rows.shape[1])
            for expert, tokens in groups:
                if projection == projections(layer)[1]:
                    self._add(expert, x[tokens])
                out[tokens] = functional.linear(x[tokens], rows[expert], None if bias is None else bias[expert])
            return out

        type(layer).forward(layer, *arguments, project=project)  # type: ignore[misc]

    def result(self) -> torch.Tensor:
        """Return the means. Raises `ValueError` for activations that are not finite."""
        if not self.sums.isfinite().all():
            raise ValueError(f"the inputs of {self.place.name} are not finite on these texts")
        fewest = _FEWEST_TOKENS if self.place.groups > 1 else 1
        return torch.where(self.counts >= fewest, self.sums / self.counts.clamp(min=1), 0.0)


def _exponents(place: Place, mean_squares: torch.Tensor, strength: float) -> torch.Tensor:
    """Return the logarithms to base 2 of the scales ``[G, channels]`` of a place, for each channel that is written;
    whole numbers in float64 on the CPU."""
    squares = sum(_mean_square_weights(weight, place.groups) for weight in place.weights) / len(place.weights)
    exponents = place.written(strength * _log_magnitudes(mean_squares) - (1 - strength) * _log_magnitudes(squares))
    exponents = exponents - exponents.mean(1, keepdim=True)
    exponents = exponents.round().clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    return torch.where(mean_squares.any(1, keepdim=True), exponents, 0.0)


def _log_magnitudes(squares: torch.Tensor) -> torch.Tensor:
    """Return half the logarithms to base 2 of mean squares ``[G, channels]``."""
    least = squares.mean(1, keepdim=True) * _LEAST**2
    return squares.clamp(min=least.clamp(min=torch.finfo(squares.dtype).tiny)).log2() / 2


def _mean_square_weights(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the mean square ``[G, channels]`` of weights ``[G or more, rows, channels]``, float64 on the CPU."""
    axes = (0, 1) if groups == 1 else (1,)
    norms = torch.linalg.vector_norm(weight, dim=axes, dtype=torch.promote_types(weight.dtype, torch.float32))
    n_rows = weight.shape[1] * (weight.shape[0] if groups == 1 else 1)
    return norms.double().cpu().square().view(groups, -1) / n_rows


# ---- what is scaled -------------------------------------------------------------------------------------------------


def _smooth_places(decoder: nn.Module, wanted: dict[Place, torch.Tensor], ids: torch.Tensor) -> Smoothing:
    """Scale places, all of them or, where the outputs on ``ids`` would change, those of each kind that changes none."""
    before = _outputs(decoder, wanted, ids)
    done: dict[Place, _Scaled] = {}
    undone: list[str] = []
    for kinds in ((NORM, VALUES, PRODUCTS), (NORM,), (VALUES,), (PRODUCTS,)):
        with contextlib.ExitStack() as stack:  # puts places back as they were, after an exception too
            scaled = {}
            for place, exponents in wanted.items():
                if place.kind in kinds:
                    scaled[place] = _Scaled(place, exponents)
                    stack.callback(scaled[place].undo)
            if torch.equal(_outputs(decoder, wanted, ids), before):
                stack.pop_all()
                done |= scaled
            elif len(kinds) == 1:
                undone += kinds
        if len(done) == len(wanted):
            break
    if not done:
        raise ValueError("with scaled channels its outputs are others, so they were left as they were")
    exponents = torch.cat([scaled.exponents.flatten() for scaled in done.values()])
    return Smoothing(
        places=tuple(place.name for place in done),
        n_channels=int((exponents != 0).sum()),
        n_all=exponents.numel(),
        exponents=(int(exponents.min()), int(exponents.max())),
        n_inexact=sum(scaled.n_inexact for scaled in done.values()),
        undone=tuple(undone),
    )


class _Scaled:
    """A place whose channels were divided, as far as that is exact, and the weights that read them multiplied.

    Attributes:
        exponents: those that were used, ``[G, channels]``; 0 where others are not exact.
        n_inexact: channels where they are not.
    """

    def __init__(self, place: Place, exponents: torch.Tensor):
        self.place = place
        self._first_writer = place.writers[0].clone() if place.adds_one else None
        inexact = torch.zeros_like(exponents, dtype=torch.bool)
        for tensor in place.readers:
            inexact |= place.written(_inexact(tensor, place.read(exponents)).double()) > 0
        for index, tensor in enumerate(place.writers):
            inexact |= _inexact(tensor, -exponents, adds_one=place.adds_one and index == 0)
        self.exponents = exponents.masked_fill(inexact, 0.0)
        self.n_inexact = int((inexact & (exponents != 0)).sum())
        self._multiply(self.exponents)

    def undo(self) -> None:
        """Put the place back as it was."""
        self._multiply(-self.exponents)
        if self._first_writer is not None:
            self.place.writers[0].copy_(self._first_writer)

    def _multiply(self, exponents: torch.Tensor) -> None:
        """Multiply readers by powers of two, and divide writers by them."""
        for tensor in self.place.readers:
            tensor.mul_(_factor(tensor, self.place.read(exponents)))
        for index, tensor in enumerate(self.place.writers):
            factor = _factor(tensor, -exponents)
            if self.place.adds_one and index == 0:
                scaled = (1 + tensor.float()) * factor.float() - 1
                tensor.copy_(torch.where(factor == 1, tensor, scaled.to(tensor.dtype)))  # 1 + w would lose a small w
            else:
                tensor.mul_(factor)


def _factor(tensor: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return powers of two for a tensor with the channels last, in its dtype."""
    return torch.exp2(exponents)[:, None].to(tensor.device, tensor.dtype)


def _inexact(tensor: torch.Tensor, exponents: torch.Tensor, adds_one: bool = False) -> torch.Tensor:
    """Return which channels ``[G, channels]`` of a tensor would be rounded if they were multiplied by powers of two.
    Numbers of 16 bits in a float32 tensor must stay such numbers, as checkpoints and vLLM store them."""
    factor = _factor(tensor, exponents)
    inexact = torch.zeros(exponents.shape, dtype=torch.bool)
    for index, rows in enumerate(tensor):  # one expert after the other, to bound the memory that it takes
        group = index if len(factor) > 1 else 0
        scale = factor[group]
        if adds_one:
            dtype = sixteen_bit_dtype(rows) or rows.dtype
            wanted = (1 + rows.float()) * scale.float()
            is_exact = 1 + (wanted - 1).to(dtype).float() == wanted
        else:
            is_exact = rows * scale / scale == rows
        if not is_exact.all():
            inexact[group] |= ~is_exact.all(0).cpu()
    return inexact


def _outputs(decoder: nn.Module, places: dict[Place, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Return the hidden states of a decoder behind all layers, twice: as they are, and with amplified activations."""
    sources = dict.fromkeys(place.source for place in places if place.source is not None)

    def amplify(module: nn.Module, arguments: tuple, output: torch.Tensor) -> torch.Tensor:
        plain, amplified = output.flatten().tensor_split(2)
        return torch.cat([plain, amplified * _AMPLIFIED]).view(output.shape)

    with contextlib.ExitStack() as stack:
        for source in sources:
            stack.callback(source.register_forward_hook(amplify).remove)
        return decoder(input_ids=ids.repeat(2, 1), use_cache=False)[0]
