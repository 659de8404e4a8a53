# SPDX-License-Identifier: Apache-2.0
"""Keep the state dict that a trainer hands to `save_pretrained`.

transformers replaces the caller's ``state_dict`` by the quantizer's when a model has one, and offers the quantizer no
look at it. Under FSDP2 and ZeRO-3 the caller's is the gathered one: without it, the first hangs on save and the second
writes empty tensors. So the argument is set aside on the model for the quantizer to return.
"""

import functools
from typing import TYPE_CHECKING


if TYPE_CHECKING:  # importing it would load torch.compile's machinery, and Triton with it
    from transformers import PreTrainedModel


_SET_ASIDE = "_mxfp4_state_dict"


def forward_state_dict(model: "PreTrainedModel") -> None:
    """Make `model.save_pretrained(state_dict=...)` reach the quantizer.

    Wraps the method of the model's class, once; models of the class that are not quantized save as ever. (On the model
    itself it would be a reference cycle, which keeps a deleted model in memory, and be lost in copies.)
    """
    cls = type(model)
    original = cls.save_pretrained
    if getattr(original, "sets_state_dict_aside", False):
        return

    @functools.wraps(original)
    def save_pretrained(self, save_directory, is_main_process=True, state_dict=None, *args, **kwargs):
        self.__dict__[_SET_ASIDE] = state_dict
        try:
            return original(self, save_directory, is_main_process, state_dict, *args, **kwargs)
        finally:
            self.__dict__.pop(_SET_ASIDE, None)

    save_pretrained.sets_state_dict_aside = True
    cls.save_pretrained = save_pretrained


def take_state_dict(model: "PreTrainedModel") -> dict | None:
    """The state dict set aside by the `save_pretrained` call in progress, if it was given one."""
    return model.__dict__.get(_SET_ASIDE)
