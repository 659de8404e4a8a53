# SPDX-License-Identifier: Apache-2.0
"""Which names of targets reach packed experts, and a word where they do not."""

from peft import LoraConfig
from torch import nn

from .._logging import get_logger
from ..layers import MXFP4PackedExperts


#: What linear layers of experts are called in checkpoints and in models of older versions of transformers.
_OLD_NAMES = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3")


def check_expert_targets(config: LoraConfig, model: nn.Module) -> None:
    """Say that ``target_modules="all-linear"`` means no experts; raise `ValueError` for the name of a part of experts
    that no module of ``model`` has any more, with which PEFT would train other layers only."""
    targets = config.target_modules
    if isinstance(targets, str):
        if targets.lower() == "all-linear":
            count = sum(isinstance(module, MXFP4PackedExperts) for module in model.modules())
            get_logger().warning(
                'target_modules="all-linear" means linear layers: the experts of %d layers get no adapters. For '
                'adapters on them, give a list of names with "experts" among them',
                count,
            )
        return
    names = [name for name, _ in model.named_modules()]
    for target in sorted(targets or ()):
        if target.rpartition(".")[2] in _OLD_NAMES and not any(f".{name}".endswith(f".{target}") for name in names):
            raise ValueError(
                f"target_modules has {target!r}, which no layer of {type(model).__name__} is called: its experts are "
                "one module each; give 'experts' for adapters on both projections of every expert"
            )
