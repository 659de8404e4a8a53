# SPDX-License-Identifier: Apache-2.0
"""Choose, by names and shapes alone, the tensors of a checkpoint that would be quantized, and say where they are."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from ..checkpoint import LayerCost, StoredTensor, bits_per_weight
from ..module_names import ALWAYS_SKIPPED, name_matches
from .source import Source


#: Architectures that keep their projections in transformers' `Conv1D`, which is no linear layer to the quantizer.
CONV1D_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
#: Architectures whose fused experts are ``[experts, in, out]``, contracted along the middle axis.
_TRANSPOSED_EXPERTS = ("gpt_oss", "llama4", "llama4_text", "aria", "aria_text", "openai_privacy_filter")
_EMBEDDING = re.compile(r"(?:.*_)?(?:embeds?|embed_tokens|embed_in|embed_positions|embeddings?)|wte|wpe", re.IGNORECASE)
_EXPERTS = re.compile(r".*\.experts(?=\.)")
_NORM = re.compile(r"(?:.*_)?(?:layer_?norm|rms_?norm|norm)\d*|ln_\w+", re.IGNORECASE)
_QUANTIZED_STORAGE = re.compile(
    r".*\.(?:weight_packed|weight_scale|weight_scale_inv|qweight|qzeros|weight_macro|absmax)|.*_(?:blocks|scales)"
)


@dataclass(frozen=True)
class TensorDecision:
    """What happens to a tensor: blocks run along ``axis``, or ``skipped`` says why it is left out, or ``stored`` names
    a tensor that is quantized already."""

    axis: int | None = None
    skipped: str | None = None
    stored: str | None = None


@dataclass(frozen=True)
class Selection:
    """Choose tensors: those that the architecture has quantized, within what the user wants. ``exclude``
    has patterns of [`hf_mxfp4.module_names.name_matches`], ``skips`` those of the checkpoint's scheme."""

    exclude: tuple[str, ...] = ()
    skips: tuple[str, ...] = ()
    model_type: str = ""

    @classmethod
    def of(cls, source: Source, exclude: Sequence[str] = ()) -> "Selection":
        """Return the selection for a checkpoint in full precision. Raises `SourceError` for a quantized one."""
        skips = source.scheme.modules_to_not_convert if source.scheme else None
        return cls(tuple(exclude), tuple(skips or ()), str(source.config.get("model_type", "")))

    def reason_against(self, name: str) -> str | None:
        """Return why the user does not want the layer of this name; `None` for one that is wanted."""
        return "--skip" if any(name_matches(name, pattern) for pattern in self.exclude) else None

    def decide(self, tensor: StoredTensor) -> TensorDecision:
        """Decide what happens to a tensor of the checkpoint."""
        if reason := self.reason_against(module_name(tensor.name)):
            return TensorDecision(skipped=reason)
        return classify(tensor.name, tensor.shape, tensor.dtype, self.model_type, self.skips)

    def unmatched(self, names: Sequence[str]) -> list[str]:
        """Return the patterns that match none of the tensor names."""
        modules = [module_name(name) for name in names]
        return [p for p in self.exclude if not any(name_matches(name, p) for name in modules)]


def module_name(tensor: str) -> str:
    """Return the name of the layer that owns a weight: without ``.weight``."""
    return tensor.removesuffix(".weight")


def location_of(tensor: str) -> tuple[str, int | None]:
    """Return layer type (``"mlp.experts.up_proj"``) and depth of a tensor: the first number in its name is the depth,
    `None` without one, and further ones (experts) are dropped."""
    parts = module_name(tensor).split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    if not numbers:
        return ".".join(parts), None
    rest = [part for part in parts[numbers[0] + 1 :] if not part.isdigit()]
    return ".".join(rest) or ".".join(parts[: numbers[0]]), int(parts[numbers[0]])


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """Return a key that sorts "layers.2" before "layers.10"."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]


def classify(
    tensor: str, shape: Sequence[int], dtype: torch.dtype, model_type: str = "", skips: Sequence[str] = ()
) -> TensorDecision:
    """Decide from name, shape and dtype whether a tensor would be quantized.

    Args:
        model_type: `model_type` of the checkpoint's `config.json`, for layouts that names do not show.
        skips: `modules_to_not_convert` of the checkpoint's own scheme.
    """
    name = module_name(tensor)
    parts = name.split(".")
    stored = TensorDecision(stored=f"{tensor} ({str(dtype).removeprefix('torch.')})")
    if _QUANTIZED_STORAGE.fullmatch(tensor):
        return stored
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
    if dtype not in _FLOATS:
        return stored
    return TensorDecision(axis=1 if is_expert and model_type in _TRANSPOSED_EXPERTS else -1)


def _owners(name: str) -> list[str]:
    """Return what a pattern of the scheme may call the layer: experts are one module of the model."""
    in_model = name.replace(".block_sparse_moe.", ".mlp.")
    experts = _EXPERTS.match(in_model)
    return [experts[0]] if experts else [name, in_model]


def conversion_rows(costs: Sequence[LayerCost]) -> list[list[str]]:
    """Return a row for all layers of a type that the same was done to in a conversion."""
    groups: dict[tuple[str, str], list[LayerCost]] = {}
    for cost in costs:
        groups.setdefault((location_of(cost.name)[0], cost.action), []).append(cost)
    rows = []
    for (layer_type, action), members in groups.items():
        values = [member.sqnr_db for member in members]
        found = ["exact" if value == math.inf else f"{value:.2f}" for value in (median(values), min(values))]
        count, bits = str(sum(member.matrices for member in members)), f"{bits_per_weight(members):.4g}"
        rows.append([layer_type, count, action, *(["-", "-"] if action == "left" else found), bits])
    return rows
