# SPDX-License-Identifier: Apache-2.0
"""Choose the tensors of a checkpoint that would be quantized, and say where they are."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from ...checkpoint import LayerCost, StoredTensor, bits_per_weight
from ...checkpoint.folder import CheckpointFolder
from ...checkpoint.names import FileNames, quantizable_layers
from ...config import MXFP4RLConfig
from ...model.layer_names import ALWAYS_SKIPPED, name_matches
from ...model.plain_layers import is_linear
from ...model.structure import experts_layout, weight_names
from .source import Source


_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_EMBEDDING = re.compile(r"(?:.*_)?(?:embeds?|embed_tokens|embed_in|embed_positions|embeddings?)|wte|wpe", re.IGNORECASE)
_NORM = re.compile(r"(?:.*_)?(?:layer_?norm|rms_?norm|norm)\d*|ln_\w+", re.IGNORECASE)
_QUANTIZED_STORAGE = re.compile(
    r".*\.(?:weight_packed|weight_scale|weight_scale_inv|qweight|qzeros|weight_macro|absmax)|.*_(?:blocks|scales)"
)


@dataclass(frozen=True)
class Selection:
    """Choose tensors, within what the user wants.

    Attributes:
        exclude: patterns of [`hf_mxfp4.model.layer_names.name_matches`].
        axes: the tensors that the model has quantized, and the axis that blocks run along; `None` where no model is
            known, so that names and shapes decide.
    """

    exclude: tuple[str, ...] = ()
    axes: Mapping[str, int] | None = None

    @classmethod
    def of(cls, source: Source, exclude: Sequence[str] = ()) -> "Selection":
        """Return the selection for a checkpoint in full precision, by its model if there is a `config.json`.

        Raises `SourceError` for a quantized one, and `ValueError` for a model that is not known or not supported.
        """
        scheme = source.scheme
        axes = None
        if source.config:
            axes = _quantized_axes(source, scheme, exclude)
        return cls(tuple(exclude), axes)

    def reason_against(self, name: str) -> str | None:
        """Return why the user does not want the layer of this name; `None` for one that is wanted."""
        if any(name_matches(name, pattern) for pattern in self.exclude):
            return "--skip"
        return None

    def decide(self, tensor: StoredTensor) -> int | str | None:
        """Return the axis that blocks run along, or why a tensor is left out; `None` if it is stored quantized."""
        if reason := self.reason_against(module_name(tensor.name)):
            return reason
        by_name = classify(tensor.name, tensor.shape, tensor.dtype)
        if self.axes is None or by_name is None:
            return by_name
        if tensor.name in self.axes:
            return self.axes[tensor.name]
        if isinstance(by_name, str):
            return by_name
        return "left alone by the model's structure or its scheme"

    def unmatched(self, names: Sequence[str]) -> list[str]:
        """Return the patterns that match none of the tensor names."""
        modules = [module_name(name) for name in names]
        return [pattern for pattern in self.exclude if not any(name_matches(name, pattern) for name in modules)]


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
    place = numbers[0]
    below = [part for part in parts[place + 1 :] if not part.isdigit()]
    if not below:
        below = parts[:place]
    return ".".join(below), int(parts[place])


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """Return a key that sorts "layers.2" before "layers.10"."""
    key: list[tuple[int, int | str]] = []
    for part in re.split(r"(\d+)", name):
        # The first element keeps numbers and texts from being compared.
        if part.isdigit():
            key.append((0, int(part)))
        elif part:
            key.append((1, part))
    return key


def classify(tensor: str, shape: Sequence[int], dtype: torch.dtype) -> int | str | None:
    """Decide as [`Selection.decide`] does, from name, shape and dtype alone."""
    name = module_name(tensor)
    parts = name.split(".")
    if _QUANTIZED_STORAGE.fullmatch(tensor):
        return None
    if len(shape) < 2 or len(shape) == 2 and _NORM.fullmatch(parts[-1]):
        return "norm, bias or other vector"
    if any(name_matches(name, pattern) for pattern in ALWAYS_SKIPPED):
        return "head, router or other tower"
    if any(_EMBEDDING.fullmatch(part) for part in parts):
        return "embedding"
    is_expert = len(shape) == 3 and "experts" in parts and not parts[-1].endswith("bias")
    is_linear = len(shape) == 2 and tensor.endswith(".weight")
    if not is_expert and not is_linear:
        return "not the weight of a linear layer"
    # Weights of other dtypes are quantized already.
    if dtype not in _FLOATS:
        return None
    return -1


def _quantized_axes(source: Source, own: MXFP4RLConfig | None, exclude: Sequence[str]) -> dict[str, int]:
    """Return the axis that blocks run along, for the tensors in the files that quantized weights are loaded from."""
    tensors = {tensor.name: tensor for _, shard in source.shards([]) for tensor in shard}
    model = CheckpointFolder(source.folder, source.config, tensors).empty_model()
    modules = [name for name, _ in model.named_modules()]
    unwanted = [pattern for pattern in exclude if any(name_matches(name, pattern) for name in modules)]
    names = FileNames(model, tensors)
    config = own or MXFP4RLConfig()
    skips = [*(config.modules_to_not_convert or ()), *unwanted] or None
    config = replace(config, modules_to_not_convert=skips).keeping(config.full_precision)
    layers = quantizable_layers(names, config, tensors, own is not None)[0]
    axis_of_weight = {}
    for name, layer in layers.items():
        axis = -1
        if not is_linear(layer) and experts_layout(layer).is_transposed:
            axis = 1
        for weight in weight_names(layer):
            axis_of_weight[f"{name}.{weight}"] = axis
    axes = {name: axis_of_weight[place] for name, place in names.places.items() if place in axis_of_weight}
    # What transformers joins are matrices of linear layers.
    joined = {name: -1 for name, place in names.converted.items() if place in axis_of_weight}
    return axes | joined


def conversion_rows(costs: Sequence[LayerCost]) -> list[list[str]]:
    """Return a row for all layers of a type that the same was done to in a conversion."""
    groups: dict[tuple[str, str], list[LayerCost]] = {}
    for cost in costs:
        groups.setdefault((location_of(cost.name)[0], cost.action), []).append(cost)
    rows = []
    for (layer_type, action), members in groups.items():
        sqnrs = [member.sqnr_db for member in members]
        shown = ["-", "-"]
        if action != "left":
            shown = [_sqnr_cell(median(sqnrs)), _sqnr_cell(min(sqnrs))]
        count = sum(member.matrices for member in members)
        rows.append([layer_type, str(count), action, *shown, f"{bits_per_weight(members):.4g}"])
    return rows


def _sqnr_cell(sqnr_db: float) -> str:
    if sqnr_db == math.inf:
        return "exact"
    return f"{sqnr_db:.2f}"
