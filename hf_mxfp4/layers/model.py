# SPDX-License-Identifier: Apache-2.0
"""What is done with the quantized layers of a model: their weight matrices one by one (a linear layer has one, experts
have many), full precision for a while, the optimizer step of their random numbers, parameters that are gathered."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ..model import structure
from ..numerics import GemmScheme
from ..ops import (
    GemmState,
    LayerRng,
    effective_rows,
    gemm_states,
    quantize_experts,
    quantize_weight,
    rows_first,
    weight_operand,
)
from .experts import ExpertsBase, MXFP4Experts
from .linear import MXFP4Linear
from .packed_experts import MXFP4PackedExperts
from .packed_linear import MXFP4PackedLinear


TRAINABLE = (MXFP4Linear, MXFP4Experts)
PACKED = (MXFP4PackedLinear, MXFP4PackedExperts)
QUANTIZED = (*TRAINABLE, *PACKED)


@dataclass(frozen=True)
class WeightMatrix:
    """A matrix ``[N, K]`` that is quantized on its own, of a layer of trainable weights.

    Attributes:
        name: of the linear map: that of a linear layer, or ``...experts.3.gate_up_proj``.
        layer: what it is a part of.
        parameter: the parameter of ``layer`` that holds it.
        expert: its index in that parameter, `None` when it is all of it.
    """

    name: str
    layer: MXFP4Linear | MXFP4Experts
    parameter: str
    expert: int | None = None

    @property
    def full_name(self) -> str:
        """The parameter's name in the model."""
        owner = self.name
        if self.expert is not None:
            owner = owner.removesuffix(f".{self.expert}.{self.parameter}")
        return f"{owner}.{self.parameter}"

    @property
    def master(self) -> torch.Tensor:
        """The parameter, also where this is one expert of it."""
        return getattr(self.layer, self.parameter)

    @property
    def state(self) -> GemmState:
        """The products of the parameter."""
        if self.expert is None:
            return self.layer.state
        return self.layer.states[self.parameter]

    @property
    def fprop(self) -> GemmScheme:
        """How the forward product takes the matrix, as its right operand."""
        return self.state.spec.scheme.fprop

    @property
    def rng(self) -> LayerRng:
        """The random numbers of the linear map."""
        return self.state.rngs[self.expert or 0]  # a linear layer has one

    @property
    def siblings(self) -> int:
        """Return how many matrices the parameter holds."""
        return 1 if self.expert is None else self.layer.n_experts

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """Return this matrix of a value of the parameter, the same memory."""
        matrices = rows_first(value, self.state.spec)
        if self.expert is None:
            return matrices
        return matrices[self.expert]

    def weight(self) -> torch.Tensor:
        """Return the master weight as it is now, detached."""
        return self.of(self.master.detach())

    def layer_values(self, value: torch.Tensor) -> torch.Tensor:
        """Return the values that the forward product takes for a value of the whole parameter, in its shape and dtype,
        where the scheme does not rotate."""
        return rows_first(weight_operand(value, value.dtype, self.state), self.state.spec)

    def packed_values(self, value: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return codes and scales of [`layer_values`], uint8 ``[N, ...]`` or of experts ``[E, N, ...]``, where the
        scheme can be packed; by what their names in a packed checkpoint have after that of the parameter."""
        config = self.layer.config
        rows = rows_first(value.detach(), self.state.spec)
        if self.expert is None:
            packed = quantize_weight(rows, config.weight_scheme, config.backend)
        else:
            packed = quantize_experts(rows, config.weight_scheme, config.backend)
        return {field.removeprefix("weight"): part for field, part in packed.items()}

    def effective_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the values that the forward product takes for rows of the matrix, rotated back, in its dtype."""
        return effective_rows(rows, self.state, self.expert or 0)


def matrix_names(name: str, layer: nn.Module) -> list[str]:
    """Return the names of the linear maps in a quantized layer called ``name``, as they are counted and reported."""
    if isinstance(layer, ExpertsBase):
        return structure.matrix_names(name, layer)
    return [name]


def joined_layers(model: nn.Module) -> list[list[str]]:
    """Return the names of the packed layers of each joined product of a model; see [`hf_mxfp4.ops.joined`]."""
    products: dict[int, list[str]] = {}
    for name, layer in model.named_modules():
        joined = layer.joined if isinstance(layer, MXFP4PackedLinear) else None
        if joined is not None and joined.product.weights is not None:
            products.setdefault(id(joined.product), []).append(name)
    return list(products.values())


def trainable_matrices(model: nn.Module) -> Iterator[WeightMatrix]:
    """Yield all matrices of the trainable quantized layers of ``model``, in its order."""
    for name, layer in model.named_modules():
        if isinstance(layer, MXFP4Linear):
            yield WeightMatrix(name, layer, "weight")
        elif isinstance(layer, MXFP4Experts):
            for expert in range(layer.n_experts):
                for projection in layer.projections:
                    yield WeightMatrix(f"{name}.{expert}.{projection}", layer, projection, expert)


@contextlib.contextmanager
def full_precision(model: nn.Module) -> Iterator[int]:
    """Let the quantized layers of ``model`` compute as the plain layers that they stand for, on their master weights,
    within this context. Afterwards, even after an exception, they quantize again. Yields the number of these layers.

    Nothing is copied or written. The pass belongs to no rollout and to no gradient of a parameter: call it under
    `torch.no_grad`, or ask for gradients of hidden states alone.

    Raises `ValueError` when ``model`` has packed layers, whose full-precision weights are gone, or no quantized layer.
    """
    modules = list(model.modules())
    if any(isinstance(module, PACKED) for module in modules):
        raise ValueError(
            f"{type(model).__name__} has packed layers, whose weights exist in 4 bits only: it cannot be computed in "
            "full precision; a policy with mode='qat' can"
        )
    layers = [module for module in modules if isinstance(module, TRAINABLE)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no quantized layer: it is in full precision as it is")
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(_plain(layer))
        yield len(layers)


def is_full_precision(layer: nn.Module) -> bool:
    """Return whether a quantized layer computes in full precision now, within [`full_precision`]."""
    forward = layer.__dict__.get("forward")
    return forward is not None and forward == getattr(layer, "full_precision_forward", None)


@contextlib.contextmanager
def _plain(layer: nn.Module) -> Iterator[None]:
    """Let one layer compute in full precision. An attribute hides the method, so that the class stays as it is."""
    replaced = layer.__dict__.get("forward")  # accelerate replaces `forward` in the same way
    layer.forward = layer.full_precision_forward
    try:
        yield
    finally:
        del layer.forward
        if replaced is not None:
            layer.forward = replaced


def random_layers(model: nn.Module) -> list[MXFP4Linear | MXFP4Experts]:
    """Return the layers of ``model`` that round stochastically or rotate with random signs."""
    layers = (module for module in model.modules() if isinstance(module, TRAINABLE))
    return [layer for layer in layers if any(state.spec.scheme.is_random for state in gemm_states(layer))]


def set_quantization_step(model: nn.Module, step: int) -> int:
    """Let every layer draw the random numbers of optimizer step ``step``, the number of steps taken before.

    To be called before the first forward pass of each step; the trainers' callback does it. A run that never calls it
    stays at step 0: backward products still draw anew in every pass, the forward one does not.

    Returns:
        The number of layers that draw any.

    Raises `ValueError` when no layer of ``model`` does.
    """
    layers = random_layers(model)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layer that draws random numbers; ask for stochastic rounding or a random "
            "rotation in the fprop, dgrad or wgrad of MXFP4RLConfig"
        )
    for layer in layers:
        layer.set_step(step)
    return len(layers)


def n_elements(parameter: torch.Tensor) -> int:
    """Return how many numbers a parameter has. Under ZeRO-3 the shape of one that is sharded away is empty."""
    return getattr(parameter, "ds_numel", parameter.numel())


@contextlib.contextmanager
def gathered(parameter: nn.Parameter, writes: bool = False) -> Iterator[torch.Tensor]:
    """Yield all of a parameter's values, detached, to be read within the context: gathered from all processes under
    FSDP2 and ZeRO-3, whose processes must all enter it; elsewhere the parameter's own memory. With ``writes`` they can
    be changed there, by all processes alike, but under FSDP2."""
    with contextlib.ExitStack() as stack:
        if hasattr(parameter, "ds_id"):  # ZeRO-3 has sharded it
            import deepspeed

            rank = 0 if writes else None
            stack.enter_context(deepspeed.zero.GatheredParameters([parameter], modifier_rank=rank))
        tensor = parameter.detach()
        if hasattr(tensor, "full_tensor"):  # FSDP2 has sharded it
            tensor = tensor.full_tensor()
        yield tensor
