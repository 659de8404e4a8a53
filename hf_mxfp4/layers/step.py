# SPDX-License-Identifier: Apache-2.0
"""The optimizer step, told to the layers that draw random numbers."""

from torch import nn

from .experts import MXFP4Experts
from .linear import MXFP4Linear


def random_layers(model: nn.Module) -> list[MXFP4Linear | MXFP4Experts]:
    """The layers of ``model`` that round stochastically or rotate with random signs."""
    return [m for m in model.modules() if isinstance(m, (MXFP4Linear, MXFP4Experts)) and m.is_random]


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
