# SPDX-License-Identifier: Apache-2.0
"""Which linear layers of a model are quantized, decided by whole name parts and never by substrings."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import nn

from ._logging import get_logger
from .experts_layout import matrix_names, unsupported_reason


#: Where models of images and sound keep what is no part of the decoder.
OTHER_MODALITIES = (
    "vision_tower",
    "vision_model",
    "vision_encoder",
    "visual",
    "audio_tower",
    "audio_encoder",
    "multi_modal_projector",
    "embed_vision",
    "embed_audio",
)

#: Parts of a model that always keep full precision: heads, routers, adapters, and the towers beside a multimodal
#: decoder.
ALWAYS_SKIPPED = (
    "lm_head",
    "embed_out",
    "score",
    "classifier",
    "qa_outputs",
    "mlp.gate",
    "shared_expert_gate",
    "block_sparse_moe.gate",
    "router",
    "router_gate",
    "modality_router",
    "lora_A",
    "lora_B",
    *OTHER_MODALITIES,
)


#: Architectures that keep their projections in transformers' `Conv1D`, which is no linear layer to the quantizer.
CONV1D_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
CONV1D_HINT = (
    "This architecture keeps its projections in transformers' Conv1D, as GPT-2 does, which is not supported; what is "
    "are models on nn.Linear, such as Llama, Qwen, Mistral, Gemma and SmolLM, and their mixtures of experts"
)


def name_matches(name: str, pattern: str) -> bool:
    """Whether ``pattern`` is a run of whole parts of the dotted ``name``, or ``re:<regex>`` matching all of it.

    ``"layers.2"`` matches ``"model.layers.2.mlp.up_proj"``, not ``"model.layers.20.mlp.up_proj"``.
    """
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], name) is not None
    return f".{pattern}." in f".{name}."


def split_linears(model: nn.Module, extra_skips: Iterable[str] = ()) -> tuple[dict[str, nn.Linear], list[str]]:
    """The linear layers of ``model`` to quantize, by name, and the names of those to leave alone.

    Only exact `nn.Linear` modules count: subclasses already are something else. The output head is found through the
    model as well as by name. A layer that stands in several places is listed under each.

    Raises `ValueError` for a skip pattern that matches no module, which would be a silent misspelling.
    """
    extra_skips = tuple(extra_skips)
    modules = dict(model.named_modules(remove_duplicate=False))
    for pattern in extra_skips:
        if pattern not in ALWAYS_SKIPPED and not any(_matches(model, name, pattern) for name in modules):
            raise ValueError(
                f"modules_to_not_convert has {pattern!r}, which matches no module of {type(model).__name__}; "
                "give whole dotted name parts such as 'layers.0' or 'mlp.down_proj', or 're:<regex on the full name>'"
            )
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    quantized, skipped = {}, []
    for name, module in modules.items():
        if type(module) is not nn.Linear:
            continue
        if module is head or any(_matches(model, name, pattern) for pattern in (*ALWAYS_SKIPPED, *extra_skips)):
            skipped.append(name)
        else:
            quantized[name] = module
    return quantized, skipped


def find_layers(model: nn.Module, extra_skips: Iterable[str] = ()) -> tuple[dict[str, nn.Module], list[str]]:
    """The linear layers and the fused experts of ``model`` to quantize, by name, and the names of the linear maps to
    leave alone.

    Raises `ValueError` as [`split_linears`] does, when nothing is left to quantize, and for fused experts of a layout
    that is not known here and that are not skipped.
    """
    extra_skips = tuple(extra_skips)
    linears, skipped = split_linears(model, extra_skips)
    chosen = set(fused_experts(model, (*ALWAYS_SKIPPED, *extra_skips)))
    layers: dict[str, nn.Module] = {}
    experts = set(fused_experts(model))
    for name, module in model.named_modules(remove_duplicate=False):
        if name in linears:
            layers[name] = module
        elif name in chosen:
            problem = unsupported_reason(module)
            if problem:
                raise ValueError(
                    f"{type(model).__name__} keeps experts in fused 3-D weights that cannot be quantized ({name}: "
                    f"{problem}); to leave the experts in full precision on purpose, add 'experts' to "
                    "modules_to_not_convert"
                )
            layers[name] = module
        elif name in experts:
            skipped += [name] if unsupported_reason(module) else matrix_names(name, module)
    if not layers:
        raise _nothing_left(model, skipped, extra_skips)
    if conv1d := sum(type(module).__name__ == "Conv1D" for module in model.modules()):
        get_logger().warning("%d layers of %s stay in full precision. %s", conv1d, type(model).__name__, CONV1D_HINT)
    return layers, skipped


def _nothing_left(model: nn.Module, skipped: list[str], extra_skips: tuple[str, ...]) -> ValueError:
    kinds = Counter(type(m).__name__ for m in model.modules() if next(m.parameters(recurse=False), None) is not None)
    hint = f". {CONV1D_HINT}" if "Conv1D" in kinds else ""
    return ValueError(
        f"MXFP4RLConfig matches no layer of {type(model).__name__}: it has {len(skipped)} nn.Linear, all skipped "
        f"(modules_to_not_convert={list(extra_skips)}), and {dict(kinds.most_common(5))}{hint}"
    )


def fused_experts(model: nn.Module, extra_skips: Iterable[str] = ()) -> list[str]:
    """Names of modules that hold the weights of many experts in 3-D parameters, which no linear layer represents."""
    extra_skips = tuple(extra_skips)
    return [
        name
        for name, module in model.named_modules()
        if "expert" in f"{name.rsplit('.', 1)[-1]} {type(module).__name__}".lower()
        and any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
        and not any(_matches(model, name, pattern) for pattern in extra_skips)
    ]


def full_names(model: nn.Module, name: str) -> tuple[str, ...]:
    """The names that a module of ``model`` goes by: its own, and for a base model also the one that it has in a model
    with a head, whose names have a prefix more."""
    prefix = getattr(model, "base_model_prefix", "")
    return (name, f"{prefix}.{name}") if prefix else (name,)


def _matches(model: nn.Module, name: str, pattern: str) -> bool:
    """[`name_matches`] for any of the module's names."""
    return any(name_matches(full, pattern) for full in full_names(model, name))


def read_names(option: str, names: Any) -> tuple[str, ...] | None:
    """A list of module names or patterns as a tuple. Raises `ValueError`, naming the option, for anything else."""
    if names is None:
        return None
    problem = f"{option}={names!r} must be a list of module names"
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ValueError(problem)
    names = tuple(names)
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError(problem)
    for name in names:
        try:
            re.compile(name[3:] if name.startswith("re:") else "")
        except re.error as error:
            raise ValueError(f"{option} has {name!r}, which is no regular expression: {error}") from error
    return names
