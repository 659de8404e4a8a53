# SPDX-License-Identifier: Apache-2.0
"""A quantized policy computed in full precision, to see what quantization changes."""

import contextlib
from collections.abc import Collection, Iterator

from torch import nn

from ..suggestions import nearest_names
from .matrices import PACKED


@contextlib.contextmanager
def full_precision(model: nn.Module, only: Collection[str] | None = None) -> Iterator[int]:
    """Within this context the quantized layers of ``model`` compute as the plain layers that they stand for, on their
    master weights; afterwards, even after an exception, they quantize again. Gives the number of layers switched.

    Args:
        only: names of the quantized layers that do; by default all. None of them is as if the context were not there.

    Nothing is copied or written. The pass belongs to no rollout and to no gradient of a parameter: call it under
    `torch.no_grad`, or ask for gradients of hidden states alone.

    Raises `ValueError` when ``model`` has packed layers, whose full-precision weights are gone, or no quantized layer,
    and for a name in ``only`` that is none of these.
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
    if only is not None:
        places = dict(model.named_modules(remove_duplicate=False))
        for name in only:
            if not hasattr(places.get(name), "full_precision_forward"):
                known = nearest_names(name, [other for other, module in places.items() if module in layers])
                raise ValueError(f"{name} is no quantized layer of {type(model).__name__}; such are {', '.join(known)}")
        layers = list({id(places[name]): places[name] for name in only}.values())
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
