# SPDX-License-Identifier: Apache-2.0
"""Adaptive quantization noise on the weights of linear layers and experts while the policy samples.

Noise on a weight matrix is relative: its standard deviation is sigma times the root mean square of the quantized
matrix (matrices differ in size, and absolute noise that one does not notice destroys another). It is added after
quantization to the values that the layer multiplies with, so that a noisy layer computes ``Q(x) (Q(W) + Z)^T + b``; a
weight is never written, and adapters, routers and heads are not touched.
"""

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from ...backends.devices import widest_float
from ...gemm import Groups, autocast_dtype, grouped, quantized_linear
from ...gemm.weight_cache import WeightCache, form_in_force
from ...layers import QUANTIZED, MXFP4Linear, MXFP4PackedExperts, MXFP4PackedLinear, matrix_names
from ...numerics.rng import counted_uniform
from .norms import NoiseReport, replaced_method, router_names
from .targets import chosen_names, plain_name


#: Elements that are drawn at once, which bounds what lies between a clean and a noisy copy of a weight.
_CHUNK = 1 << 22


@dataclass(frozen=True)
class WeightTarget:
    """A parameter that holds one weight matrix, or those of all experts of one projection.

    Attributes:
        layer: what it is a part of.
        projection: of experts; else `None`.
        names: plain names of its matrices.
        chosen: for each, whether it gets noise.
    """

    layer: nn.Module
    projection: str | None
    names: tuple[str, ...]
    chosen: tuple[bool, ...]

    @property
    def columns(self) -> int:
        """The length of the contraction axis, without padding."""
        return self.layer.in_features if self.projection is None else self.layer.weight_size(self.projection)[2]

    @property
    def is_packed(self) -> bool:
        """Whether the weight exists in 4 bits only."""
        return isinstance(self.layer, (MXFP4PackedLinear, MXFP4PackedExperts))

    def weight(self) -> torch.Tensor:
        """The parameter as it is now: what a copy made from it belongs to."""
        return getattr(self.layer, self.projection or "weight")

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """``Q(W)``, the matrices ``[n, N, K]`` in ``dtype`` as the forward product takes them; not kept."""
        layer = self.layer
        if self.projection is None:
            if self.is_packed:
                return layer.forward_weight(dtype)[None]
            return layer.weight_operand(layer.weight, dtype)[None]
        if not self.is_packed:
            return layer.weight_operand(self.projection, self.weight(), dtype)
        return layer.forward_weight(self.projection, dtype)

    def rows_first(self, values: torch.Tensor) -> torch.Tensor:
        """Values in the layout of the model as ``[n, N, K]``, the same memory."""
        if self.projection is None:
            return values[None]
        return values.transpose(1, 2) if self.layer.is_transposed else values


class LinearNoise:
    """Puts noise on the weights of a model's quantized linear layers and experts.

    Args:
        model: the policy, possibly wrapped by PEFT, whose adapters get none.
        seed: base seed. Noise is a function of seed, step, the plain name of a matrix, and its size, by counted numbers
            that are the same on every device, hence on all ranks; global random state is not touched.
        scale: sigma of weights for each unit of sigma that [`active`] is given.
        layers: the layers to choose, see [`chosen_names`]; by default all quantized ones.

    Attributes:
        parameters: by plain name, the parameters with a matrix that gets noise.
        n_matrices: how many matrices do; each projection of each expert is one.
        last_report: what noise did in the last rollout.
        n_dense: how many matrices were multiplied with as noisy dense copies in the last rollout, while without noise
            their 4-bit codes would have been kept or read.

    Raises `ValueError` when the model has no quantized layer, none is chosen, or the scale is not positive.
    """

    def __init__(self, model: nn.Module, seed: int, scale: float = 1.0, layers: Sequence[str] | None = None):
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"aqn_linear_sigma_scale={scale} must be a positive number")
        found = linear_targets(model)
        if not found:
            raise ValueError(
                f"{type(model).__name__} has no quantized linear layer for aqn_targets='linears' or 'both'; set "
                "aqn_targets='norms'"
            )
        chosen = set(chosen_names([name for target in found.values() for name in target.names], layers))
        if not chosen:
            raise ValueError(
                f"aqn_layers={list(layers)} chooses none of the quantized linear layers; set aqn_targets='norms' if "
                "norms were meant"
            )
        self.seed, self.scale = seed, scale
        self.n_matrices = len(chosen)
        which = {
            parameter: replace(target, chosen=tuple(name in chosen for name in target.names))
            for parameter, target in found.items()
        }
        self.parameters = {parameter: target for parameter, target in which.items() if any(target.chosen)}
        self.last_report: NoiseReport | None = None
        self.n_dense = 0
        self._measured: dict[str, tuple[torch.Tensor, torch.Tensor, int]] = {}
        self._dense: set[str] = set()

    def noise(self, name: str, count: int, step: int, device: torch.device | str = "cpu") -> Iterator[torch.Tensor]:
        """Standard normal float32 numbers for the ``count`` elements of a matrix, row by row, in chunks."""
        for chunk, start in enumerate(range(0, count, _CHUNK)):
            size = min(_CHUNK, count - start)
            key = repr((self.seed, step, name, chunk)).encode()
            seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
            uniform = counted_uniform((2, -(-size // 2)), seed, 0, device)
            # Box and Muller (1958); a uniform number is below 1, so that there is a logarithm.
            radius = (1 - uniform[0]).log_().mul_(-2).sqrt_()
            angle = uniform[1] * (2 * math.pi)
            yield torch.cat([radius * angle.cos(), radius * angle.sin()])[:size]

    @contextlib.contextmanager
    def active(self, step: int, sigma: float) -> Iterator[None]:
        """Noise at this step for as long as the context lasts, gone after it even when it ends by an exception.

        Within [`cached_weights`] a noisy dense copy of each weight is kept, in the place of the clean one; otherwise it
        is made again, with the same noise, each time that the layer computes. Passes with gradients are refused by
        `RuntimeError`: noise belongs to rollouts.

        Raises `RuntimeError` at the end when ``sigma > 0`` and no layer ran with noise.
        """
        self.begin()
        if sigma == 0:
            yield
            self.last_report = NoiseReport(0.0, 0.0, 0)
            return
        sigma *= self.scale
        with contextlib.ExitStack() as stack:
            for layer, own in self._by_layer().items():
                draws = {part: _Copy(_cache_of(target), target) for part, target in own.items()}
                if isinstance(layer, (MXFP4Linear, MXFP4PackedLinear)):
                    forward = partial(self._forward, draws[None], step, sigma)
                    stack.enter_context(replaced_method(layer, "forward", forward))
                else:
                    forward = partial(self._project, draws, layer.project, step, sigma)
                    stack.enter_context(replaced_method(layer, "project", forward))
            yield
        self.finish(sigma)

    def begin(self) -> None:
        """Forget what the last rollout did."""
        self.last_report, self.n_dense = None, 0
        self._measured, self._dense = {}, set()

    def finish(self, sigma: float) -> None:
        """Report what noise of relative standard deviation ``sigma`` did since [`begin`]; `RuntimeError` for none."""
        if not self._measured:
            raise RuntimeError(
                f"adaptive quantization noise (relative sigma={sigma:g}) reached none of {self.n_matrices} weights: "
                "generation did not run through the policy's own layers"
            )
        energy = count = 0.0
        for deviation, square, elements in self._measured.values():
            mean_square = float(square)
            if mean_square > 0:  # a matrix of zeros has none
                energy, count = energy + float(deviation) / mean_square, count + elements
        measured = math.sqrt(energy / count) if count else 0.0
        self.last_report, self.n_dense = NoiseReport(sigma, measured, len(self._measured), int(count)), len(self._dense)

    def noisy_values(
        self,
        parameter: str,
        values: torch.Tensor,
        step: int,
        sigma: float,
        quantized: torch.Tensor | None = None,
        kept: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Values of a parameter on their way to another engine, with the noise of [`active`]: same layout and dtype.

        Args:
            parameter: its plain name, one of `parameters`.
            values: quantized, those of adapters included.
            quantized: of a trainable layer with adapters, the values without theirs.
            kept: the dtype that the engine keeps them in, after whose rounding noise is measured; by default theirs.
        """
        target = self.parameters[parameter]
        if not values.is_floating_point():
            raise ValueError(
                f"{parameter} is pushed as 4-bit codes, which cannot carry noise; set aqn_targets='norms', or train "
                "adapters, with which a packed policy is pushed as plain weights"
            )
        rows = target.rows_first(values.detach())
        # Noise is that of the quantized weight, whatever adapters add.
        clean = rows if quantized is None else target.rows_first(quantized.detach())
        sizes = _mean_squares(target.values(values.dtype) if target.is_packed else clean, target.columns)
        noisy = self._noisy(target, rows, sizes, step, sigma * self.scale, kept)
        return noisy[0] if target.projection is None else target.rows_first(noisy)

    def _noisy(
        self,
        target: WeightTarget,
        clean: torch.Tensor,
        sizes: list[torch.Tensor],
        step: int,
        sigma: float,
        kept: torch.dtype | None = None,
    ) -> torch.Tensor:
        """``clean [n, N, K]`` with noise on the chosen matrices, whose mean squares are ``sizes``."""
        out = torch.empty(clean.shape, dtype=clean.dtype, device=clean.device)
        exact, kept = widest_float(clean.device), kept or clean.dtype
        for matrix, noisy, size, name, chosen in zip(clean, out, sizes, target.names, target.chosen, strict=True):
            if not chosen:
                noisy.copy_(matrix)
                continue
            flat, place, energy = matrix.contiguous().view(-1), noisy.view(-1), 0.0
            for chunk, z in enumerate(self.noise(name, flat.numel(), step, flat.device)):
                own = slice(chunk * _CHUNK, chunk * _CHUNK + z.numel())
                place[own] = (flat[own].float() + z * (sigma * size.sqrt())).to(clean.dtype)
                energy = energy + (place[own].to(kept).to(exact) - flat[own].to(kept).to(exact)).square().sum()
            self._measured[name] = energy, size, flat.numel()
        return out

    def _values(self, target: WeightTarget, dtype: torch.dtype, step: int, sigma: float) -> torch.Tensor:
        clean = target.values(dtype)
        return self._noisy(target, clean, _mean_squares(clean, target.columns), step, sigma)

    def _by_layer(self) -> dict[nn.Module, dict[str | None, WeightTarget]]:
        layers: dict[nn.Module, dict[str | None, WeightTarget]] = {}
        for target in self.parameters.values():
            layers.setdefault(target.layer, {})[target.projection] = target
        return layers

    def _count_dense(self, target: WeightTarget, dtype: torch.dtype) -> None:
        layer, packs = target.layer, target.is_packed
        if not packs:
            form = partial(layer.rollout_form, *([] if target.projection is None else [target.projection]))
            packs = form(target.weight().new_empty(0, dtype=dtype), form_in_force()) == "packed"
        if packs:
            self._dense.update(name for name, chosen in zip(target.names, target.chosen, strict=True) if chosen)

    def _kept(self, copy: "_Copy", dtype: torch.dtype, step: int, sigma: float) -> torch.Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError("noise on linear weights belongs to rollouts, without gradients: use torch.no_grad()")
        self._count_dense(copy.target, dtype)
        noisy = partial(self._values, copy.target, dtype, step, sigma)
        return copy.cache.get(copy.target.weight(), dtype, noisy, of_step=False)

    def _forward(self, copy: "_Copy", step: int, sigma: float, x: torch.Tensor) -> torch.Tensor:
        layer, dtype = copy.target.layer, autocast_dtype(x) or x.dtype
        noisy = self._kept(copy, dtype, step, sigma)[0]
        if copy.target.is_packed:
            bias = None if layer.bias is None else layer.bias.to(dtype)
            return F.linear(layer.quantized_input(x, dtype), noisy, bias)
        return quantized_linear(x, layer.weight, layer.bias, layer.state, weight_operand=noisy)

    def _project(
        self,
        copies: "dict[str | None, _Copy]",
        clean: Callable[[str, torch.Tensor, Groups], torch.Tensor],
        step: int,
        sigma: float,
        projection: str,
        x: torch.Tensor,
        groups: Groups,
    ) -> torch.Tensor:
        if projection not in copies:
            return clean(projection, x, groups)
        copy = copies[projection]
        layer, dtype = copy.target.layer, autocast_dtype(x) or x.dtype
        noisy = self._kept(copy, dtype, step, sigma)
        bias = layer.bias_of(projection)
        if copy.target.is_packed:
            bias = None if bias is None else bias.to(dtype)
            quantized = layer.quantized_input(projection, x, dtype)
            return grouped.forward(quantized, noisy, bias, groups, layer.config.backend)
        state = layer.states[projection]
        return quantized_linear(x, copy.target.weight(), bias, state, groups, weight_operand=noisy)


def linear_targets(model: nn.Module) -> dict[str, WeightTarget]:
    """The weights that noise can be put on, by the plain names of their parameters, all chosen: those of quantized
    layers, of which none is a router or a head."""
    routers = router_names(model)
    found = {}
    for name, layer in model.named_modules():
        plain = plain_name(name)
        if not isinstance(layer, QUANTIZED) or plain in routers:
            continue
        if isinstance(layer, (MXFP4Linear, MXFP4PackedLinear)):
            found[f"{plain}.weight"] = WeightTarget(layer, None, (plain,), (True,))
            continue
        for projection in layer.projections:
            names = tuple(each for each in matrix_names(plain, layer) if each.endswith(f".{projection}"))
            found[f"{plain}.{projection}"] = WeightTarget(layer, projection, names, (True,) * len(names))
    return found


@dataclass(frozen=True)
class _Copy:
    """A weight and what keeps its noisy copy during a rollout."""

    cache: WeightCache
    target: WeightTarget


def _cache_of(target: WeightTarget) -> WeightCache:
    return WeightCache(unasked="nowhere" if target.is_packed else "cpu")


def _mean_squares(values: torch.Tensor, columns: int) -> list[torch.Tensor]:
    """Of each matrix of ``[n, N, K]``, over ``columns`` of its ``K`` columns, which padding may have made more."""
    return [matrix.float().square().sum() / (matrix.shape[0] * columns) for matrix in values]
