# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model are quantized: decided by its structure, then by whole name parts, never by substrings."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import regex
from torch import nn

from .._logging import get_logger
from .plain_layers import is_plain_linear
from .structure import (
    HEAD,
    experts_unsupported_reason,
    has_structure,
    is_leaf,
    matrix_names,
    outside_body,
)
from .weight_readers import find_weight_readers


#: Names by which structure cannot tell: routers without experts next to them, and adapters.
_NAMED_PARTS = (
    "mlp.gate",
    "shared_expert_gate",
    "block_sparse_moe.gate",
    "router",
    "router_gate",
    "modality_router",
    "lora_A",
    "lora_B",
)

#: What is kept in full precision where there are only names to go by: in files, and in vLLM's models.
ALWAYS_SKIPPED = (
    "lm_head",
    "embed_out",
    "score",
    "classifier",
    "qa_outputs",
    *_NAMED_PARTS,
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

#: Why a layer is left in full precision: the user names it, model code reads its weight, or its name is one of those
#: above.
BY_OPTION = "modules_to_not_convert"
READS_WEIGHT = "reads its weight"
BY_NAME = "a head, router, tower or adapter by its name"

#: More names, or characters of regular expressions, are no real model's, and take minutes.
MAX_NAMES = 100_000

CONV1D_HINT = (
    "This architecture keeps its projections in transformers' Conv1D, as GPT-2 does, which is not supported; what is "
    "are models on nn.Linear, such as Llama, Qwen, Mistral, Gemma and SmolLM, and their mixtures of experts"
)


def name_matches(name: str, pattern: str) -> bool:
    """Return whether ``pattern`` is a run of whole parts of the dotted ``name``, or ``re:<regex>`` matching all of it.

    ``"layers.2"`` matches ``"model.layers.2.mlp.up_proj"``, not ``"model.layers.20.mlp.up_proj"``.

    Raises `ValueError` for an expression that takes longer than a second, as one of a stranger's config.json may.
    """
    if pattern.startswith("re:"):
        return _matches_expression(name, pattern)
    return f".{pattern}." in f".{name}."


class NamePatterns:
    """Patterns as in [`name_matches`], many of which are as fast as one."""

    def __init__(self, patterns: Iterable[str]):
        patterns = tuple(patterns)
        self._plain = frozenset(patterns)
        self._expressions = [pattern for pattern in patterns if pattern.startswith("re:")]

    def match(self, name: str) -> bool:
        """Return whether one of them matches ``name``. Raises `ValueError` as [`name_matches`] does."""
        if not self._plain.isdisjoint(_runs(name)):
            return True
        return any(_matches_expression(name, expression) for expression in self._expressions)


def _runs(name: str) -> Iterator[str]:
    """Yield all runs of whole parts of a dotted name."""
    parts = name.split(".")
    for start, end in itertools.combinations(range(len(parts) + 1), 2):
        yield ".".join(parts[start:end])


def _matches_expression(name: str, pattern: str) -> bool:
    try:
        return regex.fullmatch(pattern[3:], name, timeout=1.0) is not None
    except TimeoutError:
        raise ValueError(f"{pattern!r} takes too long to match {name!r}; use a simpler expression") from None


def split_linears(model: nn.Module, extra_skips: Iterable[str] = ()) -> tuple[dict[str, nn.Linear], list[str]]:
    """Return the linear layers of ``model`` to quantize, by name, and the names of those to leave alone: what
    [`find_layers`] has without experts, also of models with nothing to quantize. For scripts that look at names."""
    reasons = skip_reasons(model, extra_skips)
    linears = {name: module for name, module in candidates(model).items() if is_plain_linear(module)}
    quantized = {name: module for name, module in linears.items() if name not in reasons}
    return quantized, [name for name in linears if name in reasons]


def skip_reasons(model: nn.Module, extra_skips: Iterable[str] = ()) -> dict[str, str]:
    """Return why linear layers and fused experts of ``model`` stay in full precision, by their names.

    In a transformers model these are heads, routers and all outside of the layers of the (text) decoder or encoder,
    layers whose weight other code reads ([`hf_mxfp4.model.weight_readers`]), adapters, and what ``extra_skips`` names.
    In other modules, names decide. A layer that is in several places is listed under each.

    Raises `ValueError` for an entry of ``extra_skips`` that matches no module, which would be a silent misspelling.
    """
    extra_skips = tuple(extra_skips)
    for pattern in unknown_names(model, extra_skips):
        if pattern not in ALWAYS_SKIPPED:
            raise ValueError(
                f"modules_to_not_convert has {pattern!r}, which matches no module of {type(model).__name__}; "
                "give whole dotted name parts such as 'layers.0' or 'mlp.down_proj', or 're:<regex on the full name>'"
            )
    head = _head(model)
    outside = outside_body(model)
    readers = find_weight_readers(model)
    by_name = NamePatterns(_NAMED_PARTS if has_structure(model) else ALWAYS_SKIPPED)
    by_option = NamePatterns(extra_skips)
    reasons = {}
    for name, module in candidates(model).items():
        if module is head:
            reasons[name] = HEAD
        elif module in outside:
            reasons[name] = outside[module]
        elif _matches(model, name, by_name):
            reasons[name] = BY_NAME
        elif _matches(model, name, by_option):
            reasons[name] = BY_OPTION
        elif module in readers:
            reasons[name] = f"{readers[module]} {READS_WEIGHT}"
    return reasons


def find_layers(
    model: nn.Module, extra_skips: Iterable[str] = (), reasons: dict[str, str] | None = None
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return the linear layers and the fused experts of ``model`` to quantize, by name, and of the linear maps to leave
    alone the names with the reasons. ``reasons`` replaces those of [`skip_reasons`].

    Raises `ValueError` as [`skip_reasons`] does, when nothing is left to quantize, and for fused experts of a layout
    that is not known here and that are not skipped.
    """
    extra_skips = tuple(extra_skips)
    reasons = skip_reasons(model, extra_skips) if reasons is None else reasons
    layers: dict[str, nn.Module] = {}
    skipped: dict[str, str] = {}
    for name, module in candidates(model).items():
        is_linear = is_plain_linear(module)
        problem = None if is_linear else experts_unsupported_reason(module)
        if name in reasons:
            matrices = [name] if is_linear or problem else matrix_names(name, module)
            skipped |= dict.fromkeys(matrices, reasons[name])
        elif problem:
            raise ValueError(
                f"{type(model).__name__} keeps experts in fused 3-D weights that cannot be quantized ({name}: "
                f"{problem}); to leave the experts in full precision on purpose, add 'experts' to "
                "modules_to_not_convert"
            )
        else:
            layers[name] = module
    conv1d = sum(type(module).__name__ == "Conv1D" for module in model.modules())
    if not layers:
        classes = Counter(type(module).__name__ for module in model.modules() if list(module.parameters(recurse=False)))
        hint = f". {CONV1D_HINT}" if conv1d else ""
        raise ValueError(
            f"MXFP4RLConfig matches no layer of {type(model).__name__}: it has {len(skipped)} nn.Linear, all skipped "
            f"(modules_to_not_convert={list(extra_skips)}), and {dict(classes.most_common(5))}{hint}"
        )
    if conv1d:
        get_logger().warning("%d layers of %s stay in full precision. %s", conv1d, type(model).__name__, CONV1D_HINT)
    return layers, skipped


def fused_experts(model: nn.Module) -> list[str]:
    """Return the names of modules that hold the weights of many experts in 3-D parameters."""
    return [name for name, module in model.named_modules() if not is_plain_linear(module) and is_leaf(name, module)]


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Return all that could be quantized: linear layers, in every place where they are, and fused experts."""
    experts = set(fused_experts(model))
    modules = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if is_plain_linear(module) or name in experts}


def _head(model: nn.Module) -> nn.Module | None:
    get_head = getattr(model, "get_output_embeddings", None)
    return get_head() if get_head is not None else None


def full_names(model: nn.Module, name: str) -> tuple[str, ...]:
    """Return the names of a module: in ``model``, and in the same model with a head."""
    prefix = getattr(model, "base_model_prefix", "")
    return (name, f"{prefix}.{name}") if prefix else (name,)


def _matches(model: nn.Module, name: str, patterns: NamePatterns) -> bool:
    """Return whether a pattern matches any of the module's names."""
    return any(patterns.match(full) for full in full_names(model, name))


_ALWAYS_SKIPPED = NamePatterns(ALWAYS_SKIPPED)


def is_skipped_by_name(model: nn.Module, name: str) -> bool:
    """Return whether a layer is the output head of ``model``, or has a name of [`ALWAYS_SKIPPED`]."""
    head = _head(model)
    return (head is not None and model.get_submodule(name) is head) or _matches(model, name, _ALWAYS_SKIPPED)


def full_precision_record(model: nn.Module, reasons: dict[str, str]) -> tuple[str, ...] | None:
    """Return the outermost modules without a quantized layer, for `config.json`; `None` where names say the same."""
    names = list(candidates(model))
    quantized = [name for name in names if name not in reasons]
    plain = [name for name in names if reasons.get(name, BY_OPTION) != BY_OPTION]
    if not any(is_skipped_by_name(model, n) for n in quantized) and all(is_skipped_by_name(model, n) for n in plain):
        return None
    others = [name for name in names if name not in plain]
    return tuple(dict.fromkeys(outermost(name, others) for name in plain))


def is_recorded(model: nn.Module, name: str, record: tuple[str, ...] | None, others: Iterable[str] = ()) -> bool:
    """Return whether a layer is in full precision by a [`full_precision_record`].

    Args:
        record: of this model, or of one with or without its head. Without one, names decide.
        others: further names that the layer may have in the record.
    """
    if record is None:
        return is_skipped_by_name(model, name)
    prefix = getattr(model, "base_model_prefix", "")
    names = {*full_names(model, name), name.removeprefix(f"{prefix}."), *others}
    modules_around = itertools.chain.from_iterable(_prefixes(each) for each in names)
    return not set(record).isdisjoint(modules_around)


def unknown_names(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Return the patterns that match no module of ``model``."""
    names = {full for name, _ in model.named_modules(remove_duplicate=False) for full in full_names(model, name)}
    return _unmatched(patterns, names)


def _unmatched(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the patterns that match none of the names."""
    runs = {run for name in names for run in _runs(name)}
    unmatched = []
    for pattern in patterns:
        is_expression = pattern.startswith("re:")
        is_known = pattern in runs or (is_expression and any(name_matches(name, pattern) for name in names))
        if not is_known:
            unmatched.append(pattern)
    return unmatched


def translate_names(
    model: nn.Module, patterns: Iterable[str], others: Mapping[str, Iterable[str]], absent: Iterable[str]
) -> tuple[str, ...]:
    """Return ``patterns`` with those that match no module of ``model`` replaced by the outermost modules that they
    match by other names.

    Args:
        others: further names of the modules that have tensors, by their names in ``model``.
        absent: names of modules that ``model`` does not have; patterns that match these alone are left out.
    """
    patterns = tuple(patterns)
    unknown = dict.fromkeys(unknown_names(model, patterns))
    known = [pattern for pattern in patterns if pattern not in unknown]
    by_other_name = NamePatterns(unknown)
    matched = {name for name in others if any(by_other_name.match(other) for other in others[name])}
    rest = [name for name in others if name not in matched]
    replacements = dict.fromkeys(outermost(name, rest) for name in others if name in matched)
    every_name = [*absent, *itertools.chain.from_iterable(others.values())]
    return (*known, *replacements, *_unmatched(unknown, every_name))


def outermost(name: str, others: list[str]) -> str:
    """Return the shortest prefix of a module's name that is the prefix of none of the ``others``."""
    return next(prefix for prefix in _prefixes(name) if not any(other.startswith(f"{prefix}.") for other in others))


def _prefixes(name: str) -> list[str]:
    """Return the names of a module and of all that contain it, outermost first."""
    return list(itertools.accumulate(name.split("."), "{}.{}".format))


def read_names(option: str, names: Any) -> tuple[str, ...] | None:
    """Return a list of module names or patterns as a tuple. Raises `ValueError`, naming the option, for the rest."""
    if names is None:
        return None
    is_list = isinstance(names, Iterable) and not isinstance(names, str)
    patterns = tuple(names) if is_list else ()
    if not is_list or not all(isinstance(name, str) and name for name in patterns):
        raise ValueError(f"{option}={names!r} must be a list of module names")
    expressions = [name for name in patterns if name.startswith("re:")]
    if len(patterns) > MAX_NAMES or sum(map(len, expressions)) > MAX_NAMES:
        raise ValueError(f"{option} has more than {MAX_NAMES} names or characters of regular expressions; give fewer")
    for name in expressions:
        try:
            regex.compile(name[3:])
        except regex.error as error:
            raise ValueError(f"{option} has {name!r}, which is no regular expression: {error}") from error
    return patterns
