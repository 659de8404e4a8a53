# SPDX-License-Identifier: Apache-2.0
"""What vLLM has of the policy already, so that it need not be pushed again."""

import weakref
from collections.abc import Set

from torch import nn

from ..noise import plain_name


#: What wrappers of models and layers add to the names of parameters, in addition to the names of PEFT's adapters.
_WRAPPERS = ("base_model.model.", "base_layer.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


class PushedWeights:
    """Parameters of the policy that vLLM has as they are now: those that are frozen, since they were pushed.

    Anything else may have changed. A parameter that was replaced, or written in place, is another one.

    Args:
        model: the policy.
        whole_layers: leave out whole layers only, and linear layers with all beside them, which vLLM may have joined: a
            server takes a layer down to load some of it, and has nothing in the place of the rest.

    Attributes:
        left_out: names of what need not be pushed in the walk over the parameters that has begun.
    """

    def __init__(self, model: nn.Module, whole_layers: bool = False):
        self._model, self._whole_layers = model, whole_layers
        self._pushed: dict[str, tuple[weakref.ref, int]] = {}
        self._frozen: dict[str, nn.Parameter] = {}
        self.left_out: frozenset[str] = frozenset()
        self._notes = True

    def begin(self, notes: bool = True, changing: Set[str] = frozenset()) -> None:
        """Begin a walk over the parameters: find what is frozen, and what can be left out.

        Args:
            notes: whether [`note`] is to remember what is pushed; not where nothing is.
            changing: names of what is pushed with noise, or with adapters in it.
        """
        parameters, self._notes = plain_parameters(self._model), notes
        self._frozen = {name: parameter for name, parameter in parameters.items() if not parameter.requires_grad}
        known = {name for name in self._pushed if self._has(name)} - changing
        if self._whole_layers:
            layers = self._layers(parameters)
            broken = {layer for name, layer in layers.items() if name not in known}
            known = {name for name in known if layers[name] not in broken}
        self.left_out = frozenset(known)

    def note(self, name: str, is_clean: bool) -> None:
        """Remember that this parameter was pushed, and whether as it is: without noise, and without adapters in it."""
        if not self._notes:
            return
        parameter = self._frozen.get(name)
        if is_clean and parameter is not None:
            self._pushed[name] = weakref.ref(parameter), parameter._version
        else:
            self._pushed.pop(name, None)

    def forget(self) -> None:
        """Note that vLLM has nothing any more."""
        self._pushed.clear()

    def _has(self, name: str) -> bool:
        parameter, (pushed, version) = self._frozen.get(name), self._pushed[name]
        return parameter is not None and pushed() is parameter and version == parameter._version

    def _layers(self, parameters: dict[str, nn.Parameter]) -> dict[str, str]:
        """What each parameter is a part of in vLLM, at most."""
        linears = {plain_name(name) for name, module in self._model.named_modules() if isinstance(module, nn.Linear)}
        owners = {name: name.rpartition(".")[0] for name in parameters}
        return {name: f"{owner.rpartition('.')[0]}.*" if owner in linears else owner for name, owner in owners.items()}


def plain_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a policy by the names that they have without PEFT and other wrappers: of one that PEFT
    trains a copy of the copy, and none of adapters."""
    found = {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name or ".original_module." in name:
            continue
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        before, saved, after = name.partition(".modules_to_save.")
        found[f"{before}.{after.partition('.')[2]}" if saved else name] = parameter
    return found
