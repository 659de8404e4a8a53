# SPDX-License-Identifier: Apache-2.0
"""What vLLM holds of the policy already, so that it need not be pushed again; and what a push is in bytes."""

import weakref

import torch
from torch import nn

from ...gemm.storage.packed_weight import PACKED_SUFFIXES


#: What wrappers of models and layers add to the names of parameters, beside the names of PEFT's adapters.
_WRAPPERS = ("base_model.model.", "base_layer.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


class HeldWeights:
    """Parameters of the policy that vLLM has as they are now: those that are frozen, since they were pushed.

    Anything else may have changed. A parameter that was replaced, or written in place, is another one.

    Args:
        model: the policy.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._held: dict[str, tuple[weakref.ref, int]] = {}
        self._frozen: dict[str, nn.Parameter] = {}
        self._notes = True

    def begin(self, notes: bool = True) -> None:
        """Look at what is frozen now, for the walk over the parameters that comes.

        Args:
            notes: whether [`note`] is to remember what is pushed; not where nothing is.
        """
        parameters = plain_parameters(self._model)
        self._frozen = {name: parameter for name, parameter in parameters.items() if not parameter.requires_grad}
        self._notes = notes

    def has(self, name: str) -> bool:
        """Whether vLLM has the parameter of this plain name as it is, without noise."""
        parameter, held = self._frozen.get(name), self._held.get(name)
        return parameter is not None and held is not None and held[0]() is parameter and held[1] == parameter._version

    def names(self) -> frozenset[str]:
        """All for which [`has`] holds."""
        return frozenset(name for name in self._held if self.has(name))

    def note(self, name: str, is_clean: bool) -> None:
        """Remember that this parameter was pushed, and whether as it is: without noise, and without adapters in it."""
        if not self._notes:
            return
        parameter = self._frozen.get(name)
        if is_clean and parameter is not None:
            self._held[name] = weakref.ref(parameter), parameter._version
        else:
            self._held.pop(name, None)

    def forget(self) -> None:
        """VLLM has nothing any more."""
        self._held.clear()


def plain_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a policy by the names that they have without PEFT and other wrappers: of one that PEFT trains a
    copy of the copy, and none of adapters."""
    found = {}
    for name, parameter in model.named_parameters():
        if ".lora_" in name or ".original_module." in name:
            continue
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        before, saved, after = name.partition(".modules_to_save.")
        found[f"{before}.{after.partition('.')[2]}" if saved else name] = parameter
    return found


def bytes_in_16_bits(model: nn.Module) -> int:
    """What all weights of a policy take in 16 bits each, packed ones and those of adapters merged."""
    total = 0
    for name, parameter in plain_parameters(model).items():
        numel = getattr(parameter, "ds_numel", parameter.numel())  # of ZeRO-3, also where it is not here
        if parameter.dtype != torch.uint8:
            total += 2 * numel
        elif not name.endswith(PACKED_SUFFIXES[1:]):  # two codes to a byte
            total += 4 * numel
    return total
