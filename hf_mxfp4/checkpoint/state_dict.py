# SPDX-License-Identifier: Apache-2.0
"""Keep the state dict that a trainer hands to `save_pretrained`.

transformers replaces the caller's ``state_dict`` by the quantizer's when a model has one, and offers the quantizer no
look at it. Under FSDP2 and ZeRO-3 the caller's is the gathered one: without it, the first hangs on save and the second
writes empty tensors. So the argument is set aside on the model for the quantizer to return.
"""

from types import MethodType

from transformers import PreTrainedModel


_SET_ASIDE = "_mxfp4_state_dict"


def forward_state_dict(model: PreTrainedModel) -> None:
    """Make `model.save_pretrained(state_dict=...)` reach the quantizer. Applying it twice changes nothing."""

    def save_pretrained(self, *args, state_dict=None, **kwargs):
        self.__dict__[_SET_ASIDE] = state_dict
        try:
            return type(self).save_pretrained(self, *args, state_dict=state_dict, **kwargs)
        finally:
            self.__dict__.pop(_SET_ASIDE, None)

    model.save_pretrained = MethodType(save_pretrained, model)


def stop_forwarding_state_dict(model: PreTrainedModel) -> None:
    """Undo [`forward_state_dict`]."""
    model.__dict__.pop("save_pretrained", None)


def take_state_dict(model: PreTrainedModel) -> dict | None:
    """The state dict set aside by the `save_pretrained` call in progress, if it was given one."""
    return model.__dict__.get(_SET_ASIDE)
