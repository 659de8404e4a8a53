# SPDX-License-Identifier: Apache-2.0
"""What quantization does to the routing of a mixture of experts, and how evenly its experts are used."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from ...layers import full_precision
from ...model.routers import choice_agreement, find_routers, recorded_choices
from ...utils import evaluation_mode


@dataclass(frozen=True)
class RouterStatistics:
    """One router on one set of tokens.

    Attributes:
        name: of the module.
        agreement: share of the experts chosen that the same model chooses in full precision, in any order.
        load_entropy: entropy of the experts' shares of the choices over its largest value, log(experts): 1 when all are
            used equally, 0 when a single one is.
        load_max_over_mean: choices of the most used expert over the mean; 1 when all are used equally.
        dead_experts: share of the experts that no token chose.
    """

    name: str
    agreement: float | None
    load_entropy: float
    load_max_over_mean: float
    dead_experts: float

    @classmethod
    def of(
        cls, name: str, choices: torch.Tensor, num_experts: int, reference: torch.Tensor | None = None
    ) -> "RouterStatistics":
        """Return the statistics of expert indices ``[tokens, k]``, and of a reference's for the same tokens.

        Raises `ValueError` when there is no token.
        """
        if len(choices) == 0:
            raise ValueError("no token was routed: the attention mask is zero everywhere")
        counts = torch.bincount(choices.flatten(), minlength=num_experts).double()
        share = counts / counts.sum()
        agreement = None
        if reference is not None:
            agreement = float(choice_agreement(choices, reference).mean())
        entropy = 1.0
        if num_experts > 1:
            entropy = float(-torch.xlogy(share, share).sum()) / math.log(num_experts)
        return cls(
            name=name,
            agreement=agreement,
            load_entropy=entropy,
            load_max_over_mean=float(share.max() * num_experts),
            dead_experts=float((counts == 0).double().mean()),
        )


def router_statistics(
    model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> list[RouterStatistics]:
    """Return statistics of every router of ``model``, from the first layer to the last.

    The model runs once as it is, in evaluation mode and without gradients, and once more in full precision to compare
    with.

    Both passes read the same tokens, so deeper layers also differ by what earlier choices did to their inputs.

    Args:
        model: with trainable quantized layers.
        input_ids: ``[batch, length]``.
        attention_mask: the same shape; padding (0) does not count.

    Raises `ValueError` when the model has no router, or one of unknown form; when nothing is left of the tokens; and
    when the model has packed layers or no quantized layer.
    """
    routers = find_routers(model)
    device = next(model.parameters()).device
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    ids = input_ids.to(device)
    mask = mask.to(device)

    def choices() -> dict[str, torch.Tensor]:
        with recorded_choices(routers) as recorded:
            model(input_ids=ids, attention_mask=mask, use_cache=False)
        missed = [name for name, passes in recorded.items() if len(passes) != 1 or len(passes[0]) != mask.numel()]
        if missed:
            raise ValueError(f"{missed[0]} did not route the {mask.numel()} tokens of the batch in one pass")
        return {name: passes[0][mask.flatten().bool()] for name, passes in recorded.items()}

    with torch.no_grad(), evaluation_mode(model):
        quantized = choices()
        with full_precision(model):
            reference = choices()
    return [
        RouterStatistics.of(name, quantized[name], _num_experts(router), reference.get(name))
        for name, router in routers.items()
    ]


def _num_experts(router: nn.Module) -> int:
    count = getattr(router, "num_experts", None)
    return count if isinstance(count, int) else router.weight.shape[0]
