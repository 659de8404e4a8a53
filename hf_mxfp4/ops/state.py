# SPDX-License-Identifier: Apache-2.0
"""What the products of a layer are (specs, plain data, made once per layer), its random numbers, and what of both
changes from step to step.

Every random draw is a function of (seed, rank, step, layer, product, operand), so a run can be repeated and resumed.
Draws of the forward product are the same in all forward passes of a step, hence also in one that gradient checkpointing
repeats. Draws of the backward products also depend on how many backward passes the layer has had in the step, so that
the micro-batches of a step round independently.
"""

import hashlib
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..numerics import (
    FP8,
    FULL,
    MXFP8,
    PLAIN,
    REUSE,
    GemmScheme,
    LinearScheme,
    OperandScheme,
    QuantScheme,
    random_signs,
)


if TYPE_CHECKING:
    from .cache import WeightCache

#: Layers by their number, for compiled code.
_layers: "weakref.WeakValueDictionary[int, GemmState]" = weakref.WeakValueDictionary()
_numbers = itertools.count()


@dataclass(frozen=True)
class GemmSpec:
    """The three products of a linear layer, or of one projection of experts; a packed layer has the forward product
    alone.

    Attributes:
        scheme: the precision of each operand of each product.
        backend: what quantizes; see [`hf_mxfp4.fake_quantize`].
        matmul_backend: what multiplies; see [`hf_mxfp4.ops.select_matmul`].
        transposed: whether the weights of experts are ``[E, K, N]`` and not ``[E, N, K]``.
        is_plain: whether gradients are products of output gradients as they are with the operands of the forward
            product, that is without random numbers, rotations and quantization of their own.
        draws_forward: whether the forward product draws random numbers.
        saves_raw_input: whether Wgrad takes the input itself and not what the forward product used of it.
        saves_fp8: whether the input is saved for Wgrad as E4M3 elements and scales, which hold that operand exactly.
        reuses_weight: whether Dgrad takes what the forward product used of the weight.
        rotation_size: of the forward product; 1 without a rotation.
        folds_scales: see [`hf_mxfp4.numerics.LinearScheme`].
        input_scheme, weight_scheme: how the forward product quantizes its operands; `None` where it does not.
        packs_weight: whether stored 4-bit weights can stand for the forward operand.
    """

    scheme: LinearScheme
    backend: str = "auto"
    matmul_backend: str = "dense"
    transposed: bool = False
    is_plain: bool = field(init=False)
    draws_forward: bool = field(init=False)
    saves_raw_input: bool = field(init=False)
    saves_fp8: bool = field(init=False)
    reuses_weight: bool = field(init=False)
    rotation_size: int = field(init=False)
    folds_scales: bool = field(init=False)
    input_scheme: OperandScheme | None = field(init=False)
    weight_scheme: QuantScheme | None = field(init=False)
    packs_weight: bool = field(init=False)

    def __post_init__(self):
        scheme, fprop = self.scheme, self.scheme.fprop
        quantized_weight, rotates = isinstance(fprop.right, QuantScheme), fprop.rotation is not None
        derived: dict[str, Any] = {
            "is_plain": scheme.dgrad == scheme.wgrad == PLAIN and not rotates and not scheme.is_random,
            "draws_forward": fprop.is_random,
            "saves_raw_input": scheme.wgrad.right is not REUSE,
            "saves_fp8": fprop.left in (FP8, MXFP8) and scheme.wgrad.right is REUSE,
            "reuses_weight": scheme.dgrad.right is REUSE,
            "rotation_size": fprop.rotation.size if rotates else 1,
            "folds_scales": scheme.folds_scales,
            "input_scheme": None if fprop.left is FULL else fprop.left,
            "weight_scheme": fprop.right if quantized_weight else None,
            "packs_weight": quantized_weight and not rotates and not fprop.is_random,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)


class LayerRng:
    """Source of the random numbers of one layer.

    Args:
        seed: of the run.
        layer: name of the layer in its model.

    Attributes:
        step: the optimizer step, see [`set_step`].
        n_backward: backward passes of this layer since the step was set.
    """

    def __init__(self, seed: int, layer: str):
        self.seed, self.layer = seed, layer
        self.step = self.n_backward = 0

    def set_step(self, step: int) -> None:
        """Begin an optimizer step. Not between a forward pass and its backward pass."""
        self.step, self.n_backward = step, 0

    def seed_of(self, gemm: str, operand: str) -> int:
        """Seed of the stochastic rounding of one operand, whose random numbers are the same on every device. The weight
        in the forward product is rounded alike on all ranks: there is one policy; everything else independently."""
        rank = 0 if (gemm, operand) == ("fprop", "weight") else _rank()
        return self._seed(gemm, operand, rank)

    @property
    def dither_seed(self) -> int:
        """Seed of the dither of the layer's master weight, equal on all ranks and at every step."""
        return _hash((self.seed, self.layer, "dither"))

    def signs(self, gemm: str, length: int, device: torch.device) -> torch.Tensor:
        """Signs for both operands of a product, equal on all ranks."""
        return random_signs(length, self._seed(gemm, "signs", 0), device)

    def _seed(self, gemm: str, operand: str, rank: int) -> int:
        count = 0 if gemm == "fprop" else self.n_backward
        return _hash((self.seed, rank, self.step, count, self.layer, gemm, operand))


def _hash(key: tuple) -> int:
    """63 bits that depend on every part of the key."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big") >> 1


def _rank() -> int:
    dist = torch.distributed
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class GemmState:
    """The changing part of a linear layer, or of one projection of experts.

    Args:
        spec: of the products; exchanged by layers whose backward products change.
        rngs: the random numbers of each weight matrix: one of a linear layer, one per expert of experts.

    Attributes:
        cache: the [`WeightCache`] that is open for this layer, or `None`.
        layer_id: int64 without axes, the number by which compiled code finds this object when it runs. As a tensor, an
            input of the graph, it lets layers of equal shapes share one graph.
    """

    def __init__(self, spec: GemmSpec, rngs: Sequence[LayerRng] = ()):
        self.spec, self.rngs = spec, tuple(rngs)
        self.cache: WeightCache | None = None
        self._register()

    def rng_of(self, group: int = 0) -> LayerRng | None:
        """Return the random numbers of one weight matrix; `None` of a layer that draws none and has no name."""
        return self.rngs[group] if self.rngs else None

    def set_step(self, step: int) -> None:
        """Draw the random numbers of optimizer step ``step`` from now on."""
        for rng in self.rngs:
            rng.set_step(step)

    def _register(self) -> None:
        number = next(_numbers)
        _layers[number] = self
        with torch.inference_mode(False):
            self.layer_id = torch.tensor(number, dtype=torch.int64, device="cpu")

    def __getstate__(self) -> dict[str, Any]:
        return {"spec": self.spec, "rngs": self.rngs, "cache": None}

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes)
        self._register()  # a copied or unpickled layer is another one


def state_of(layer_id: torch.Tensor) -> GemmState:
    """Return the state that has this number. Raises `RuntimeError` for one of a layer that is gone."""
    state = _layers.get(int(layer_id))
    if state is None:
        raise RuntimeError(f"layer {int(layer_id)} of this compiled code is gone; keep its model, or compile again")
    return state


#: Of products whose operands are as they are, as those of adapters.
PLAIN_STATE = GemmState(GemmSpec(LinearScheme(GemmScheme(FULL, FULL))))
