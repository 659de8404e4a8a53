# SPDX-License-Identifier: Apache-2.0
"""Quantization of layer inputs as one operator, so that vLLM can compile the model around it."""

import functools
import json

import torch

from ...backends import fake_quantize
from ...config import MXFP4RLConfig


@torch.library.custom_op("mxfp4_rl::quantize_input", mutates_args=())
def quantize_input(x: torch.Tensor, scheme: str) -> torch.Tensor:
    """``Q(x)`` along the last axis, in the dtype of ``x``; ``scheme`` is an `MXFP4RLConfig` as JSON."""
    config = _config(scheme)
    return fake_quantize(x, config.activation_scheme, config.backend).contiguous()


@quantize_input.register_fake
def _(x: torch.Tensor, scheme: str) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@functools.lru_cache
def _config(scheme: str) -> MXFP4RLConfig:
    return MXFP4RLConfig.from_dict(json.loads(scheme))
