# SPDX-License-Identifier: Apache-2.0
"""Find the body of a model, by how the model is built and not by what its parts are called.

The body is made of the stacks of repeated layers of the base model; in a model of several modalities, of its text
decoder. Everything else stays in full precision: heads, poolers, embedders, towers, projectors and connectors.

Fused experts are what `transformers.integrations.moe.use_experts_implementation` makes: one 3-D parameter for each
projection. The order of gate and up columns is left to the class's own `_apply_gate`.

Layers whose ``weight`` the model's code reads itself, instead of calling the layer, are found in its source: such code
(a fused kernel that gets ``self.out_proj.weight``) would see master weights or packed bytes. Nothing is run.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch import nn


HEAD = "outside the layers of the base model, as heads, poolers and embedders are"
OTHER_MODALITY = "outside the layers of the text decoder"
ROUTER = "a router"

#: What the decorator of fused experts leaves on every instance (transformers 5.17 and newer).
_EXPERTS_MARKS = ("is_transposed", "is_concatenated", "has_bias", "has_gate")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
#: A layer as the code names it: the steps from ``self``, ``("mlp", "down_proj")``. `_EACH` stands for any element of a
#: container.
Path = tuple[str, ...]
_EACH = "*"
#: A place that reads a weight: the layer, the method, and the conditions on ``self`` around it.
_Read = tuple[Path, str, tuple[ast.expr, ...]]


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
            linears = [module for module in child.modules() if isinstance(module, nn.Linear)]
            if linears and not count_experts(name, child) and linears[-1].out_features in ends:
                yield from linears


def is_leaf(name: str, module: nn.Module) -> bool:
    """Whether a module called ``name`` is an exact `nn.Linear`, or experts that are fused in 3-D parameters."""
    is_fused = any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))
    return type(module) is nn.Linear or (is_fused and count_experts(name.rpartition(".")[2], module) > 0)


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


def projections(experts: nn.Module) -> tuple[str, str]:
    """Return the names of the two weights, in the order in which tokens pass them; each may have a ``<name>_bias``."""
    return ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")


def matrix_names(name: str, experts: nn.Module) -> list[str]:
    """Return a name for each linear map in experts called ``name``: ``<name>.3.down_proj`` is one of expert 3."""
    names = projections(experts)
    count = getattr(experts, names[0]).shape[0]
    return [f"{name}.{expert}.{projection}" for expert in range(count) for projection in names]


def weight_size(experts: nn.Module, projection: str) -> tuple[int, int, int]:
    """Return ``(experts, N, K)`` of a full-precision weight, which maps ``K`` features to ``N``."""
    count, rows, columns = getattr(experts, projection).shape
    return (count, columns, rows) if experts.is_transposed else (count, rows, columns)


def experts_unsupported_reason(experts: nn.Module) -> str | None:
    """Why a module with 3-D weights is not experts of the one layout known here; `None` when it is."""
    missing = [mark for mark in _EXPERTS_MARKS if not hasattr(experts, mark)]
    if missing:
        return f"{type(experts).__name__} is not made by transformers' use_experts_implementation"
    if getattr(experts, "_is_expert_parallel", False):
        return "its experts are spread over processes (expert parallelism)"
    names = projections(experts)
    allowed = {*names, *(f"{name}_bias" for name in names)}
    own = dict(experts.named_parameters(recurse=False))
    needed = allowed if experts.has_bias else set(names)
    if own.keys() != needed:
        return f"{type(experts).__name__} has the parameters {sorted(own)} instead of {sorted(needed)}"
    return None


# ---- code that reads weights ----------------------------------------------------------------------------------------


def find_weight_readers(model: nn.Module) -> dict[nn.Module, str]:
    """Return the linear layers of ``model`` whose weight is read outside of them, each with the name of the reader."""
    found: dict[nn.Module, str] = {}
    calls = [(owner, "forward") for owner in model.modules()]
    seen = set()
    for owner, method in calls:  # which grows
        is_seen = (owner, method) in seen
        if is_seen or next(owner.children(), None) is None or type(owner).__module__.startswith("torch."):
            continue
        seen.add((owner, method))
        reads, called = _read_by(type(owner), method)  # type: ignore[arg-type]
        for path, reader, tests in reads:
            if not any(_is_off(owner, test) for test in tests):
                layers = (layer for layer in _follow(owner, path) if isinstance(layer, nn.Linear))
                found |= {layer: reader for layer in layers if layer not in found}
        for path in called:
            calls += [(part, path[-1]) for part in _follow(owner, path[:-1]) if isinstance(part, nn.Module)]
    return found


@functools.cache
def _read_by(cls: type, method: str) -> tuple[tuple[_Read, ...], tuple[Path, ...]]:
    """Return what a method of a class reads, with the methods that it calls; and the paths to methods of its parts."""
    found, called, seen, names = [], [], set(), [method]
    while names:
        name = names.pop()
        functions = [vars(base).get(name) for base in cls.__mro__ if not base.__module__.startswith("torch.")]
        for function in functions if name not in seen else ():
            tree = _parsed(function) if isinstance(function, FunctionType) else None
            parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)} if tree else {}
            for node, path in _paths(tree) if tree else ():
                if len(path) == 1:
                    names += path
                elif path[-1] == "weight":
                    found.append((path[:-1], f"{cls.__name__}.{name}", tuple(_tests(node, parents))))
                elif isinstance(parents.get(node), ast.Call):
                    called.append(path)
        seen.add(name)
    return tuple(found), tuple(called)


def _parsed(function: FunctionType) -> ast.FunctionDef | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    except (OSError, TypeError, SyntaxError):  # written in another language, or not kept
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None


def _paths(tree: ast.FunctionDef) -> Iterator[tuple[ast.AST, Path]]:
    """Yield each expression ``self.a.b`` and its steps, also behind a local name, or that of a loop's elements."""
    aliases: dict[str, Path] = {"self": ()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if path := _path(node.value, aliases):
                aliases.setdefault(node.targets[0].id, path)
        elif isinstance(node, (ast.For, ast.comprehension)):
            # Also of `enumerate` and `zip`: a name then stands for elements of the first container.
            iterables = node.iter.args if isinstance(node.iter, ast.Call) else [node.iter]
            path = next(filter(None, (_path(each, aliases) for each in iterables)), None)
            for target in ast.walk(node.target) if path else ():
                if isinstance(target, ast.Name):
                    aliases.setdefault(target.id, (*path, _EACH))
    for node in ast.walk(tree):
        if path := _path(node, aliases):
            yield node, path


def _path(node: ast.AST, aliases: dict[str, Path]) -> Path | None:
    """Return the steps from ``self`` that an expression takes; `None` for anything else."""
    steps: list[str] = []
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        steps.insert(0, node.attr if isinstance(node, ast.Attribute) else _EACH)
        node = node.value
    return (*aliases[node.id], *steps) if isinstance(node, ast.Name) and node.id in aliases else None


def _tests(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.expr]:
    """Yield the conditions on attributes of ``self`` and constants alone under which a part of a function runs."""
    allowed = (ast.Attribute, ast.Name, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp)
    while node in parents:
        inner, node = node, parents[node]
        if isinstance(node, ast.If) and inner in node.body:
            parts = [part for part in ast.walk(node.test) if isinstance(part, ast.expr)]
            names = {part.id for part in parts if isinstance(part, ast.Name)}
            changes = any(isinstance(part, ast.Attribute) and part.attr == "training" for part in parts)
            if names == {"self"} and not changes and all(isinstance(part, allowed) for part in parts):
                yield node.test


def _follow(owner: Any, path: Path) -> list[Any]:
    """Return what a path leads to from a module."""
    if not path:
        return [owner]
    step, rest = path[0], path[1:]
    found = [getattr(owner, step, None)] if step != _EACH else getattr(owner, "children", list)()
    return [end for each in found for end in _follow(each, rest)]


def _is_off(owner: nn.Module, test: ast.expr) -> bool:
    """Return whether a condition is false for a module as it was made."""
    try:
        return not eval(compile(ast.Expression(test), "<condition>", "eval"), {"__builtins__": {}}, {"self": owner})
    except (AttributeError, TypeError):
        return False
