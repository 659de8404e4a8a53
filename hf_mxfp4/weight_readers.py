# SPDX-License-Identifier: Apache-2.0
"""Find linear layers whose ``weight`` the model's code reads itself, instead of calling the layer.

Such code (a fused kernel that gets ``self.out_proj.weight``) sees master weights or packed bytes where it means the
weight that the layer computes with. The source of each module's forward pass is read, and of the methods of its own
class that it calls; nothing is run.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch import nn


#: A layer as the code names it: the steps from ``self``, ``("mlp", "down_proj")``. `_EACH` stands for any element of a
#: container.
Path = tuple[str, ...]
_EACH = "*"
#: A place that reads a weight: the layer, the method, and the conditions on ``self`` around it.
_Read = tuple[Path, str, tuple[ast.expr, ...]]


def find_weight_readers(model: nn.Module) -> dict[nn.Module, str]:
    """Return the linear layers of ``model`` whose weight is read outside of them, each with the name of the reader."""
    found: dict[nn.Module, str] = {}
    for owner in model.modules():
        if next(owner.children(), None) is None or type(owner).__module__.startswith("torch."):
            continue
        for path, reader, tests in _read_by_forward(type(owner)):
            if not any(_is_off(owner, test) for test in tests):
                layers = (layer for layer in _follow(owner, path) if isinstance(layer, nn.Linear))
                found |= {layer: reader for layer in layers if layer not in found}
    return found


@functools.cache
def _read_by_forward(cls: type) -> tuple[_Read, ...]:
    """Return what the forward pass of a class reads, and the methods that it calls."""
    found, seen, names = [], set(), ["forward"]
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
        seen.add(name)
    return tuple(found)


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
    step, *rest = path
    found = [getattr(owner, step, None)] if step != _EACH else getattr(owner, "children", list)()
    return [end for each in found for end in _follow(each, rest)]


def _is_off(owner: nn.Module, test: ast.expr) -> bool:
    """Return whether a condition is false for a module as it was made."""
    try:
        return not eval(compile(ast.Expression(test), "<condition>", "eval"), {"__builtins__": {}}, {"self": owner})
    except (AttributeError, TypeError):
        return False
