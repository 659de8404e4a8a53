# SPDX-License-Identifier: Apache-2.0
"""TRL's asynchronous GRPO, noticed where it loads its policy.

It pushes parameters to vLLM as they are stored. Those of a trained quantized policy are master weights, so vLLM would
sample from another policy than the one that trains, and nothing would say so. It loads its policy by itself, with an
attention of its own that nothing else uses, by which it is known.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from torch import nn


#: The attention of `trl.experimental.async_grpo`, for rows of sequences that share their beginnings.
_TREE_ATTENTION = "tree_fa3"

_pushes_quantized_values: ContextVar[bool] = ContextVar("_pushes_quantized_values", default=False)


@contextlib.contextmanager
def pushes_quantized_values() -> Iterator[None]:
    """Within the context a policy may be loaded for asynchronous GRPO: who loads it pushes what it computes with."""
    token = _pushes_quantized_values.set(True)
    try:
        yield
    finally:
        _pushes_quantized_values.reset(token)


def check_attention(model: nn.Module) -> None:
    """Raise `ValueError` for a policy that TRL's own asynchronous GRPO loads."""
    if getattr(model.config, "_attn_implementation", None) == _TREE_ATTENTION and not _pushes_quantized_values.get():
        raise ValueError(
            "trl's AsyncGRPOTrainer would push the master weights of this policy to vLLM, which would sample from "
            "them unquantized; use hf_mxfp4.rl.MXFP4AsyncGRPOTrainer in its place"
        )
