# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a checkpoint would be quantized, and where in the model they stand: by name and shape alone."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...module_names import ALWAYS_SKIPPED, CONV1D_MODELS, name_matches


FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

#: Architectures whose fused experts are ``[experts, in, out]``, contracted along the middle axis.
_TRANSPOSED_EXPERTS = ("gpt_oss", "llama4", "llama4_text", "aria", "aria_text", "openai_privacy_filter")
_EMBEDDING = re.compile(r"(?:.*_)?(?:embeds?|embed_tokens|embed_in|embed_positions|embeddings?)|wte|wpe", re.IGNORECASE)
_EXPERTS = re.compile(r".*\.experts(?=\.)")
_NORM = re.compile(r"(?:.*_)?(?:layer_?norm|rms_?norm|norm)\d*|ln_\w+", re.IGNORECASE)
_QUANTIZED_STORAGE = re.compile(
    r".*\.(?:weight_packed|weight_scale|weight_scale_inv|qweight|qzeros|weight_macro|absmax)|.*_(?:blocks|scales)"
)


@dataclass(frozen=True)
class TensorLocation:
    """Where a tensor stands: ``layer_type`` without indices ("mlp.experts.up_proj"), ``depth`` the layer's index."""

    layer_type: str
    depth: int | None


@dataclass(frozen=True)
class TensorDecision:
    """Whether a tensor is analysed: blocks run along ``axis``, or ``skipped`` says why not. ``stored`` names a tensor
    that is quantized already, so that it has no error left to measure."""

    axis: int | None = None
    skipped: str | None = None
    stored: str | None = None


def module_name(tensor: str) -> str:
    """The name of the layer that owns a weight: without ``.weight``."""
    return tensor.removesuffix(".weight")


def location_of(tensor: str) -> TensorLocation:
    """Layer type and depth; the first number in the name is the depth, further ones (experts) are dropped."""
    parts = module_name(tensor).split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    if not numbers:
        return TensorLocation(".".join(parts), None)
    rest = [part for part in parts[numbers[0] + 1 :] if not part.isdigit()]
    return TensorLocation(".".join(rest) or ".".join(parts[: numbers[0]]), int(parts[numbers[0]]))


def classify(
    tensor: str, shape: Sequence[int], dtype: torch.dtype, model_type: str = "", skips: Sequence[str] = ()
) -> TensorDecision:
    """Whether the tensor would be quantized, from its name, shape and dtype.

    Args:
        model_type: `model_type` of the checkpoint's `config.json`, for layouts that names do not show.
        skips: `modules_to_not_convert` of the checkpoint's own scheme.
    """
    name = module_name(tensor)
    parts = name.split(".")
    if _QUANTIZED_STORAGE.fullmatch(tensor):
        return TensorDecision(stored=f"{tensor} ({_short(dtype)})")
    if len(shape) < 2:
        return TensorDecision(skipped="norm, bias or other vector")
    if any(name_matches(name, pattern) for pattern in ALWAYS_SKIPPED):
        return TensorDecision(skipped="head, router or other tower")
    if any(_EMBEDDING.fullmatch(part) for part in parts):
        return TensorDecision(skipped="embedding")
    if any(name_matches(owner, pattern) for owner in _owners(name) for pattern in skips):
        return TensorDecision(skipped="modules_to_not_convert")
    is_expert = len(shape) == 3 and "experts" in parts and not parts[-1].endswith("bias")
    is_linear = len(shape) == 2 and tensor.endswith(".weight") and model_type not in CONV1D_MODELS
    if is_linear and _NORM.fullmatch(parts[-1]):
        return TensorDecision(skipped="norm, bias or other vector")
    if not is_expert and not is_linear:
        return TensorDecision(skipped="not the weight of a linear layer")
    if dtype not in FLOAT_DTYPES:
        return TensorDecision(stored=f"{tensor} ({_short(dtype)})")
    return TensorDecision(axis=1 if is_expert and model_type in _TRANSPOSED_EXPERTS else -1)


def _owners(name: str) -> list[str]:
    """What a pattern of the scheme may call the layer: experts are one module of the model, under its own names."""
    in_model = name.replace(".block_sparse_moe.", ".mlp.")
    experts = _EXPERTS.match(in_model)
    return [experts[0]] if experts else [name, in_model]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
