# SPDX-License-Identifier: Apache-2.0
"""A quantized policy computed in full precision, to see what quantization changes."""

import contextlib
from collections.abc import Iterator

from torch import nn

from .matrices import PACKED


@contextlib.contextmanager
def full_precision(model: nn.Module) -> Iterator[int]:
    """Within this context the quantized layers of ``model`` compute as the plain layers that they stand for, on their
    master weights; afterwards, even after an exception, they quantize again. Gives the number of layers switched.

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
    layers = [module for module in modules if hasattr(module, "full_precision_forward")]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no quantized layer: it is in full precision as it is")
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(_plain(layer))
        yield len(layers)


def is_full_precision(layer: nn.Module) -> bool:
    """Whether a quantized layer computes in full precision now, within [`full_precision`]."""
    own = layer.__dict__.get("forward")
    return own is not None and own == getattr(layer, "full_precision_forward", None)


@contextlib.contextmanager
def _plain(layer: nn.Module) -> Iterator[None]:
    own = layer.__dict__.get("forward")
    layer.forward = layer.full_precision_forward
    try:
        yield
    finally:
        del layer.forward
        if own is not None:
            layer.forward = own
