# SPDX-License-Identifier: Apache-2.0
"""What changes in a linear layer from step to step: its random numbers, and the cache that is open for it."""

import itertools
import weakref
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..numerics import FULL, GemmScheme, LinearScheme
from .rng import LayerRng
from .spec import GemmSpec


if TYPE_CHECKING:
    from .cache import WeightCache

#: Layers by their number, for compiled code.
_layers: "weakref.WeakValueDictionary[int, GemmState]" = weakref.WeakValueDictionary()
_numbers = itertools.count()


class GemmState:
    """The changing part of a linear layer, or of one projection of experts.

    Args:
        spec: of the products; exchanged by layers whose backward products change.
        rngs: the random numbers of each weight matrix: one of a linear layer, one per expert of experts.

    Attributes:
        rng: the random numbers of a linear layer; `None` of a layer that draws none and has no name.
        cache: the [`WeightCache`] that is open for this layer, or `None`.
        plans: how the layer multiplies, by device, dtype and shape of the weight; see [`hf_mxfp4.ops.plan`].
        layer_id: int64 without axes, the number by which compiled code finds this object when it runs. As a tensor, an
            input of the graph, it lets layers of equal shapes share one graph.
    """

    def __init__(self, spec: GemmSpec, rngs: Sequence[LayerRng] = ()):
        self.spec = spec
        self.rngs = tuple(rngs)
        self.rng = self.rngs[0] if self.rngs else None
        self.cache: WeightCache | None = None
        self.plans: dict[Hashable, Any] = {}
        self._register()

    @property
    def step(self) -> int:
        """The optimizer step whose random numbers are drawn."""
        return 0 if self.rng is None else self.rng.step

    def rng_of(self, expert: int = 0) -> LayerRng | None:
        """Return the random numbers of one weight matrix; see `rng`."""
        return self.rngs[expert] if self.rngs else None

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
        return {"spec": self.spec, "rngs": self.rngs, "rng": self.rng, "cache": None, "plans": {}}

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
