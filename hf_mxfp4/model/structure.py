# SPDX-License-Identifier: Apache-2.0
"""Find the body of a model, by how the model is built and not by what its parts are called.

The body is made of the stacks of repeated layers of the base model; in a model of several modalities, of its text
decoder. Everything else stays in full precision: heads, poolers, embedders, towers, projectors and connectors.

Linear layers and fused experts are those of [`hf_mxfp4.model.plain_layers`].
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from .plain_layers import ExpertsLayout, experts_adapter, is_linear, is_plain_linear, linear_size, linear_weight_name


HEAD = "outside the layers of the base model, as heads, poolers and embedders are"
OTHER_MODALITY = "outside the layers of the text decoder"
ROUTER = "a router"

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def outside_body(model: nn.Module) -> dict[nn.Module, str]:
    """Return the linear layers and fused experts of ``model`` that are no part of its body, each with the reason.

    Only routers are found in a module that is not, and does not hold, a transformers model.
    """
    reasons = {router: ROUTER for router in _linear_routers(model)}
    whole = _transformers_model(model)
    if whole is None:
        return reasons
    decoders = _text_decoders(whole)
    foreign = _foreign_parts(whole)
    has_stack = any(_is_stack(module) for module in whole.modules())
    body = set()
    for root in decoders or [_base_model(whole)]:
        for leaf, is_in_stack in _leaves(root, foreign):
            if is_in_stack or not has_stack:
                body.add(leaf)
    reason = OTHER_MODALITY if decoders or foreign else HEAD
    for name, module in model.named_modules():
        if is_leaf(name, module) and module not in body:
            reasons[module] = reason
    return reasons


def has_structure(model: nn.Module) -> bool:
    """Return whether ``model`` is, or holds, a transformers model, whose structure shows what its body is."""
    return _transformers_model(model) is not None


def text_part(model: nn.Module) -> set[nn.Module] | None:
    """Return the modules of the text decoder in a model of several modalities; `None` for any other model."""
    whole = _transformers_model(model)
    if whole is None:
        return None
    decoders = _text_decoders(whole)
    foreign = _foreign_parts(whole)
    if decoders is None and not foreign:
        return None
    inside: set[nn.Module] = set()
    for root in decoders or [_base_model(whole)]:
        inside.update(root.modules())
    for part in foreign:
        inside.difference_update(part.modules())
    return inside


def _text_decoders(whole: nn.Module) -> list[nn.Module] | None:
    """Return the models within ``whole`` that have the config of its text decoder; `None` if that is its own config."""
    text = _text_config(whole.config)
    if text is whole.config or _is_one_modality(whole):
        return None
    decoders = [module for module in whole.modules() if _is_model(module) and type(module.config) is type(text)]
    return decoders or [whole.get_decoder()]


def _foreign_parts(whole: nn.Module) -> set[nn.Module]:
    """Return the parts of other modalities: they have a config of their own, which is not that of the text decoder."""
    if _is_one_modality(whole):
        return set()
    sub_configs = _sub_configs(whole.config)
    text = type(_text_config(whole.config))
    others = {type(config) for config in sub_configs.values()} - {text, type(whole.config)}
    if text is not type(whole.config):
        return {module for module in whole.modules() if type(getattr(module, "config", None)) in others}
    # The text decoder has the config of the whole model. Parts that are no models are found by the configs' names.
    prefixes = tuple(name.removesuffix("_config") for name in sub_configs)
    has_modalities = len(_modalities(whole)) > 1
    foreign = set()
    for name, module in whole.named_modules():
        if _is_model(module):
            is_foreign = type(module.config) in others and not _declares_text(module)
        else:
            is_foreign = has_modalities and name.rpartition(".")[2].startswith(prefixes)
        if is_foreign:
            foreign.add(module)
    return foreign


def _leaves(module: nn.Module, foreign: set[nn.Module], is_in_stack: bool = False) -> Iterator[tuple[nn.Module, bool]]:
    """Yield what could be quantized below ``module``, and whether it is in a stack of layers. Skip foreign parts, and
    modules that connect them to the model."""
    for name, child in module.named_children():
        is_connector = not _is_model(child) and any(part in foreign for part in child.modules())
        if child in foreign or is_connector:
            continue
        if is_leaf(name, child):
            yield child, is_in_stack
        else:
            yield from _leaves(child, foreign, is_in_stack or _is_stack(child))


def _is_stack(module: nn.Module) -> bool:
    """Return whether a container holds layers that consist of several modules."""
    return isinstance(module, _CONTAINERS) and any(next(layer.children(), None) for layer in module.children())


def _linear_routers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the linear layers of modules next to the experts of a block that end in one output for each expert (or one
    more, for none), or in a single one (the gate of a shared expert)."""
    for block in model.modules():
        counts = {count_experts(name, child) for name, child in block.named_children()} - {0}
        if not counts:
            continue
        sizes = {1, *counts, *(count + 1 for count in counts)}
        for name, child in block.named_children():
            linears = [module for module in child.modules() if is_linear(module)]
            if linears and not count_experts(name, child) and linear_size(linears[-1])[0] in sizes:
                yield from linears


def is_leaf(name: str, module: nn.Module) -> bool:
    """Return whether a module called ``name`` is a plain linear layer, or experts that are fused in 3-D parameters."""
    if is_plain_linear(module):
        return True
    is_fused = any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
    return is_fused and count_experts(name.rpartition(".")[2], module) > 0


def count_experts(name: str, module: nn.Module) -> int:
    """Return how many experts a module called ``name`` holds, fused or one by one; 0 for other modules."""
    if "expert" not in f"{name} {type(module).__name__}".lower():
        return 0
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return sum(next(expert.parameters(), None) is not None for expert in module.children())
    return max((p.shape[0] for p in module.parameters(recurse=False) if p.dim() == 3), default=0)


def _transformers_model(model: nn.Module) -> nn.Module | None:
    """Return the transformers model that is, or is in, ``model``."""
    return next((module for module in model.modules() if _is_model(module)), None)


def _base_model(whole: nn.Module) -> nn.Module:
    """Return a transformers model without its head."""
    return getattr(whole, whole.base_model_prefix or "", whole)


def _is_model(module: nn.Module) -> bool:
    # Asked of the class, since wrappers pass on what they are asked for.
    return hasattr(type(module), "base_model_prefix") and hasattr(getattr(module, "config", None), "get_text_config")


def _text_config(config: Any) -> Any:
    """Return the part of a config that describes the text decoder, or the config itself."""
    try:
        return config.get_text_config()
    except ValueError:  # it has a text encoder and a decoder
        return config.get_text_config(decoder=True)


def _sub_configs(config: Any) -> dict[str, Any]:
    """Return the configs within a config, and within these, by the names of their options."""
    configs: dict[str, Any] = {}
    for name in getattr(config, "sub_configs", None) or ():
        value = getattr(config, name, None)
        if hasattr(value, "get_text_config"):
            configs |= {name: value, **_sub_configs(value)}
    return configs


def _is_one_modality(whole: nn.Module) -> bool:
    """Return whether a model has no part to leave out: it reads no text, or it is an encoder-decoder of text."""
    modalities = _modalities(whole)
    if modalities == {"text"}:
        return getattr(whole.config, "is_encoder_decoder", False)
    return "text" not in modalities


def _modalities(module: nn.Module) -> set[str]:
    """Return what a model says that it reads, such as ``{"text", "image"}``."""
    declared = getattr(module, "input_modalities", "text")
    return {declared} if isinstance(declared, str) else set(declared)


def _declares_text(module: nn.Module) -> bool:
    """Return whether a model says itself that it reads text, instead of inheriting this from `PreTrainedModel`."""
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
    return (linear_weight_name(layer),) if is_linear(layer) else projections(layer)


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
    """Return why experts with 3-D weights cannot be quantized; `None` if they can."""
    if experts_adapter(experts) is None:
        return f"{type(experts).__name__} is not made by transformers' use_experts_implementation"
    if getattr(experts, "_is_expert_parallel", False):
        return "its experts are spread over processes (expert parallelism)"
    layout = experts_layout(experts)
    needed = set(layout.projections)
    if layout.has_bias:
        needed |= {f"{name}_bias" for name in layout.projections}
    parameters = dict(experts.named_parameters(recurse=False))
    if parameters.keys() != needed:
        return f"{type(experts).__name__} has the parameters {sorted(parameters)} instead of {sorted(needed)}"
    return None
