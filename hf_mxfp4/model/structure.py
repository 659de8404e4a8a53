# SPDX-License-Identifier: Apache-2.0
"""Find the body of a model, by how the model is built and not by what its parts are called.

The body is made of the stacks of repeated layers of the base model; in a model of several modalities, of its text
decoder. Everything else stays in full precision: heads, poolers, embedders, towers, projectors and connectors.

Linear layers and fused experts are those of [`hf_mxfp4.model.plain_layers`].
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from .plain_layers import ExpertsLayout, experts_adapter, is_linear, is_plain_linear


HEAD = "outside the layers of the base model, as heads, poolers and embedders are"
OTHER_MODALITY = "outside the layers of the text decoder"
ROUTER = "a router"

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def outside_body(model: nn.Module) -> dict[nn.Module, str]:
    """Return the linear layers and fused experts of ``model`` that are no part of its body, each with the reason.

    Only routers are found in a module that is not, and does not hold, a transformers model.
    """
    found = {router: ROUTER for router in _linear_routers(model)}
    whole = _whole(model)
    if whole is None:
        return found
    roots, foreign = _text_roots(whole), _foreign_parts(whole)
    has_stack = any(_is_stack(module) for module in whole.modules())
    pairs = (pair for root in roots or [_base(whole)] for pair in _leaves(root, foreign))
    body = {leaf for leaf, in_stack in pairs if in_stack or not has_stack}
    reason = OTHER_MODALITY if roots or foreign else HEAD
    leaves = (module for name, module in model.named_modules() if is_leaf(name, module))
    found |= {module: reason for module in leaves if module not in body}
    return found


def has_structure(model: nn.Module) -> bool:
    """Whether ``model`` is, or holds, a transformers model, whose structure tells what is its body."""
    return _whole(model) is not None


def text_part(model: nn.Module) -> set[nn.Module] | None:
    """Return the modules of the text decoder in a model of several modalities; `None` for any other model."""
    whole = _whole(model)
    if whole is None:
        return None
    roots, foreign = _text_roots(whole), _foreign_parts(whole)
    if roots is None and not foreign:
        return None
    inside = {module for root in roots or [_base(whole)] for module in root.modules()}
    return inside - {module for part in foreign for module in part.modules()}


def _text_roots(whole: nn.Module) -> list[nn.Module] | None:
    """Models within ``whole`` that have the config of its text decoder; `None` where that is the config of all."""
    text = _text_config(whole.config)
    if text is whole.config or _is_one_modality(whole):
        return None
    found = [module for module in whole.modules() if _is_model(module) and type(module.config) is type(text)]
    return found or [whole.get_decoder()]


def _foreign_parts(whole: nn.Module) -> set[nn.Module]:
    """Parts of a model of several modalities that have a config of their own, other than that of the text decoder."""
    if _is_one_modality(whole):
        return set()
    text = type(_text_config(whole.config))
    others = {type(config) for config in _sub_configs(whole.config).values()} - {text, type(whole.config)}
    if text is not type(whole.config):
        return {module for module in whole.modules() if type(getattr(module, "config", None)) in others}
    is_declared = len(_modalities(whole)) > 1
    prefixes = tuple(name.removesuffix("_config") for name in _sub_configs(whole.config)) if is_declared else ()
    return {
        module
        for name, module in whole.named_modules()
        if (_is_model(module) and type(module.config) in others and not _declares_text(module))
        or (not _is_model(module) and prefixes and name.rpartition(".")[2].startswith(prefixes))
    }


def _leaves(module: nn.Module, foreign: set[nn.Module], in_stack: bool = False) -> Iterator[tuple[nn.Module, bool]]:
    """Yield what could be quantized below ``module`` but foreign parts, and whether it lies in a stack of layers."""
    for name, child in module.named_children():
        if child in foreign or (not _is_model(child) and any(part in foreign for part in child.modules())):
            continue
        if is_leaf(name, child):
            yield child, in_stack
        else:
            yield from _leaves(child, foreign, in_stack or _is_stack(child))


def _is_stack(module: nn.Module) -> bool:
    """Whether a container holds layers that consist of several modules."""
    return isinstance(module, _CONTAINERS) and any(next(layer.children(), None) for layer in module.children())


def _linear_routers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the linear layers of modules that stand beside the experts of a block and end in one output for each expert
    (or one more, for none), or in a single one (the gate of a shared expert)."""
    for block in model.modules():
        counts = {count_experts(name, child) for name, child in block.named_children()} - {0}
        ends = {1, *counts, *(count + 1 for count in counts)}
        for name, child in block.named_children() if counts else ():
            linears = [module for module in child.modules() if is_linear(module)]
            if linears and not count_experts(name, child) and linears[-1].out_features in ends:
                yield from linears


def is_leaf(name: str, module: nn.Module) -> bool:
    """Whether a module called ``name`` is a plain linear layer, or experts that are fused in 3-D parameters."""
    is_fused = any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
    return is_plain_linear(module) or (is_fused and count_experts(name.rpartition(".")[2], module) > 0)


def count_experts(name: str, module: nn.Module) -> int:
    """Return how many experts a module called ``name`` holds, fused or one by one; 0 for other modules."""
    if "expert" not in f"{name} {type(module).__name__}".lower():
        return 0
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return sum(next(expert.parameters(), None) is not None for expert in module.children())
    return max((p.shape[0] for p in module.parameters(recurse=False) if p.dim() == 3), default=0)


def _whole(model: nn.Module) -> nn.Module | None:
    """Return the transformers model that is, or is in, ``model``."""
    return next((module for module in model.modules() if _is_model(module)), None)


def _base(whole: nn.Module) -> nn.Module:
    return getattr(whole, whole.base_model_prefix or "", whole)


def _is_model(module: nn.Module) -> bool:
    # Asked of the class, since wrappers pass on what they are asked for.
    return hasattr(type(module), "base_model_prefix") and hasattr(getattr(module, "config", None), "get_text_config")


def _text_config(config: Any) -> Any:
    try:
        return config.get_text_config()
    except ValueError:  # it has a text encoder and a decoder
        return config.get_text_config(decoder=True)


def _sub_configs(config: Any) -> dict[str, Any]:
    """Return the configs within a config, and within these, by the names of their options."""
    own = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ()}
    own = {name: value for name, value in own.items() if hasattr(value, "get_text_config")}
    return own | {name: inner for value in own.values() for name, inner in _sub_configs(value).items()}


def _is_one_modality(whole: nn.Module) -> bool:
    """Whether a model has no part to leave out: it reads no text, or it is an encoder-decoder of text."""
    modalities = _modalities(whole)
    return "text" not in modalities or (modalities == {"text"} and getattr(whole.config, "is_encoder_decoder", False))


def _modalities(module: nn.Module) -> set[str]:
    declared = getattr(module, "input_modalities", "text")
    return {declared} if isinstance(declared, str) else set(declared)


def _declares_text(module: nn.Module) -> bool:
    """Whether a model says so itself: the attribute of `PreTrainedModel`, text, is what others leave as it is."""
    families = [cls for cls in type(module).__mro__ if cls.__name__ != "PreTrainedModel"]
    return "text" in _modalities(module) and any("input_modalities" in vars(cls) for cls in families)


def experts_layout(experts: nn.Module) -> ExpertsLayout:
    """Return how experts, plain or quantized, hold their weights."""
    return experts_adapter(experts).layout(experts)


def projections(experts: nn.Module) -> tuple[str, str]:
    """Return the names of the two weights, in the order in which tokens pass them; each may have a ``<name>_bias``."""
    return experts_layout(experts).projections


def weight_names(layer: nn.Module) -> tuple[str, ...]:
    """Return the names of the weights of a linear layer or of experts, plain or quantized."""
    return ("weight",) if is_linear(layer) else projections(layer)


def matrix_names(name: str, experts: nn.Module) -> list[str]:
    """Return a name for each linear map in experts called ``name``: ``<name>.3.down_proj`` is one of expert 3."""
    names = projections(experts)
    count = getattr(experts, names[0]).shape[0]
    return [f"{name}.{expert}.{projection}" for expert in range(count) for projection in names]


def weight_size(experts: nn.Module, projection: str) -> tuple[int, int, int]:
    """Return ``(experts, N, K)`` of a full-precision weight, which maps ``K`` features to ``N``."""
    count, rows, columns = getattr(experts, projection).shape
    return (count, columns, rows) if experts_layout(experts).is_transposed else (count, rows, columns)


def experts_unsupported_reason(experts: nn.Module) -> str | None:
    """Why a module with 3-D weights is not experts of a layout known here; `None` when it is."""
    if experts_adapter(experts) is None:
        return f"{type(experts).__name__} is not made by transformers' use_experts_implementation"
    if getattr(experts, "_is_expert_parallel", False):
        return "its experts are spread over processes (expert parallelism)"
    names = projections(experts)
    allowed = {*names, *(f"{name}_bias" for name in names)}
    own = dict(experts.named_parameters(recurse=False))
    needed = allowed if experts_layout(experts).has_bias else set(names)
    if own.keys() != needed:
        return f"{type(experts).__name__} has the parameters {sorted(own)} instead of {sorted(needed)}"
    return None
