# SPDX-License-Identifier: Apache-2.0
"""What of a layer changes from step to step: random numbers and kept operands of the weight.

Functions get it with every call, beside the [`GemmSpec`], which never changes. Compiled code must hold none of it, so
an operator finds it when it runs, by a number of the layer's own. That number is a tensor: as an input of the graph,
where a plain number would be a constant in it, it lets layers of equal shapes share one graph.
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from .layer_rng import LayerRng
from .spec import GemmSpec, PackedSpec
from .weight_cache import WeightCache, backward_pass


_states: "weakref.WeakValueDictionary[int, GemmState]" = weakref.WeakValueDictionary()
_numbers = itertools.count()


class GemmState:
    """The changing part of a linear layer, or of one projection of experts.

    Args:
        spec: of the products; exchanged by layers whose backward products change.
        rngs: the random numbers of each weight matrix: one of a linear layer, one per expert of experts.
        cached: where one call of `generate` keeps the operand of the weight; see [`WeightCache`].

    Attributes:
        cache: keeps the operand of the weight, dense or packed.
        folded: keeps it as a fast kernel takes it.
        values: keeps dense values beside a packed copy, for prompts: one call reads one.
        plan: an [`InputPlan`], for inputs of the kind that the layer had last; `None` before its first.
        layer_id: of this state in compiled code, int64 without axes on the CPU, wherever the layer's tensors are.
    """

    def __init__(
        self,
        spec: GemmSpec | PackedSpec,
        rngs: Sequence[LayerRng] = (),
        cached: str = "anywhere",
    ):
        self.spec, self.rngs = spec, tuple(rngs)
        self.cache, self.folded, self.values = WeightCache(cached), WeightCache(cached), WeightCache("nowhere")
        self.plan: Any = None
        self._handed: tuple[int, torch.Tensor] | None = None
        self._register()

    def rng_of(self, group: int = 0) -> LayerRng | None:
        """The random numbers of one weight matrix; `None` of a layer that draws none and has no name."""
        return self.rngs[group] if self.rngs else None

    def set_step(self, step: int) -> None:
        """Draw the random numbers of optimizer step ``step`` from now on."""
        for rng in self.rngs:
            rng.set_step(step)
        if self.spec.draws_forward:
            self.clear()

    def clear(self) -> None:
        """Forget what is kept of the weight."""
        for cache in (self.cache, self.folded, self.values):
            cache.clear()

    def hand_over(self, operand: torch.Tensor | None) -> None:
        """Keep the operand of the weight for the gradient of the input, if this forward pass is one that gradient
        checkpointing repeats: that gradient comes next, and an engine that shards weights frees this one after it."""
        number = backward_pass()
        self._handed = None if number is None or operand is None else (number, operand)

    def take_over(self) -> torch.Tensor | None:
        """What [`hand_over`] kept in this backward pass, once."""
        handed, self._handed = self._handed, None
        return None if handed is None or handed[0] != backward_pass() else handed[1]

    def _register(self) -> None:
        number = next(_numbers)
        _states[number] = self
        with torch.inference_mode(False):
            self.layer_id = torch.tensor(number, dtype=torch.int64, device="cpu")

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in vars(self).items() if name != "layer_id"}
        return kept | {"plan": None, "_handed": None}

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes)
        self._register()  # a copied or unpickled layer is another one


def state_of(layer_id: torch.Tensor) -> GemmState:
    """The state that has this number. Raises `RuntimeError` for one of a layer that is gone."""
    state = _states.get(int(layer_id))
    if state is None:
        raise RuntimeError(f"layer {int(layer_id)} of this compiled code is gone; keep its model, or compile again")
    return state
