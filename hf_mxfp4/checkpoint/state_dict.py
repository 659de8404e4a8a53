# SPDX-License-Identifier: Apache-2.0
"""Keep the state dict that a trainer hands to `save_pretrained`.

transformers replaces the caller's ``state_dict`` by the quantizer's when a model has one, and offers the quantizer no
look at it. Under FSDP2 and ZeRO-3 the caller's is the gathered one: without it, the first hangs on save and the second
writes empty tensors. So the argument is set aside on the model for the quantizer to return.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING


if TYPE_CHECKING:  # importing it would load torch.compile's machinery, and Triton with it
    from transformers import PreTrainedModel


_SET_ASIDE = "_mxfp4_state_dict"


@contextlib.contextmanager
def set_aside(model: "PreTrainedModel", state_dict: dict | None) -> Iterator[None]:
    """Make [`take_state_dict`] give ``state_dict`` while the context lasts."""
    model.__dict__[_SET_ASIDE] = state_dict
    try:
        yield
    finally:
        model.__dict__.pop(_SET_ASIDE, None)


def take_state_dict(model: "PreTrainedModel") -> dict | None:
    """The state dict set aside by the `save_pretrained` call in progress, if it was given one."""
    return model.__dict__.get(_SET_ASIDE)
