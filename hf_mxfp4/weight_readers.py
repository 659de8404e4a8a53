# SPDX-License-Identifier: Apache-2.0
"""Find linear layers whose ``weight`` the model's code reads itself, instead of calling the layer.

Such code (a fused kernel that gets ``self.out_proj.weight``, a cast to ``self.wo.weight.dtype``) sees master weights or
packed bytes where it means the weight that the layer computes with. The source of each module's forward pass is read,
with what it calls of its own class and the functions that it passes layers to; nothing is run.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn


#: A layer as the code names it: the steps from ``self`` or from an argument, ``("mlp", "down_proj")``. `_EACH` stands
#: for any element of a container.
Path = tuple[str, ...]
_EACH = "*"


def find_weight_readers(model: nn.Module) -> dict[nn.Module, str]:
    """Return the linear layers of ``model`` whose weight is read outside of them, each with the name of the reader."""
    found: dict[nn.Module, str] = {}
    for owner in model.modules():
        if next(owner.children(), None) is None or type(owner).__module__.startswith("torch."):
            continue
        for path, reader in _read_by_forward(type(owner)):
            if not any(_is_off(owner, test) for test in reader.tests):
                layers = (layer for layer in _follow(owner, path) if isinstance(layer, nn.Linear))
                found |= {layer: reader.name for layer in layers if layer not in found}
    return found


class _Reader(NamedTuple):
    """A function that reads a weight, and the conditions around the place where it does."""

    name: str
    tests: tuple[ast.expr, ...]


@functools.cache
def _read_by_forward(cls: type) -> tuple[tuple[Path, _Reader], ...]:
    """Return what the forward pass of a class reads, and the methods that it calls."""
    found, seen, names = [], set(), ["forward"]
    while names:
        name = names.pop()
        functions = [vars(base).get(name) for base in cls.__mro__ if not base.__module__.startswith("torch.")]
        for function in functions if name not in seen else ():
            source = _source(function) if isinstance(function, FunctionType) else None
            if source is not None:
                found += source.reads("self", cls.__name__)
                names += source.methods
        seen.add(name)
    return tuple(found)


class _Source:
    """The parsed source of a function: what it reads of its arguments, and what it calls."""

    def __init__(self, function: FunctionType, tree: ast.FunctionDef):
        self.function, self.tree = function, tree
        self.parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self.aliases: dict[str, Path] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                path = self._path(node.value)
                if path is not None and len(path) > 1:
                    self.aliases.setdefault(node.targets[0].id, path)
            elif isinstance(node, (ast.For, ast.comprehension)):
                # Also of `enumerate` and `zip`: a name then stands for elements of the first container.
                iterables = node.iter.args if isinstance(node.iter, ast.Call) else [node.iter]
                path = next(filter(None, map(self._path, iterables)), None)
                for target in ast.walk(node.target) if path is not None else ():
                    if isinstance(target, ast.Name):
                        self.aliases.setdefault(target.id, (*path, _EACH))
        attributes = [path for node in ast.walk(tree) if (path := self._path(node)) and path[0] == "self"]
        self.methods = [path[1] for path in attributes if len(path) == 2]

    def reads(self, argument: str, owner: str, depth: int = 3) -> list[tuple[Path, _Reader]]:
        """Return the layers, as steps from ``argument``, whose weight is read here or where they are handed to."""
        found = []
        name = f"{owner}.{self.tree.name}" if owner else self.tree.name
        for node in ast.walk(self.tree):
            path = self._path(node)
            if path is not None and path[0] == argument and path[-1] == "weight":
                found.append((path[1:-1], _Reader(name, self._tests(node))))
            if isinstance(node, ast.Call) and depth:
                called = _called(self.function, node.func)
                source = _source(called) if called is not None else None
                for parameter, value in _arguments(source, node) if source is not None else ():
                    path = self._path(value)
                    if path is None or path[0] != argument:
                        continue
                    for steps, reader in source.reads(parameter, "", depth - 1):
                        found.append((path[1:] + steps, _Reader(reader.name, self._tests(node))))
        return found

    def _path(self, node: ast.AST) -> Path | None:
        """``self.a.b`` as ``("self", "a", "b")``, with local names for such replaced; `None` for anything else."""
        steps: list[str] = []
        while isinstance(node, (ast.Attribute, ast.Subscript)):
            steps.insert(0, node.attr if isinstance(node, ast.Attribute) else _EACH)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        return (*self.aliases.get(node.id, (node.id,)), *steps)

    def _tests(self, node: ast.AST) -> tuple[ast.expr, ...]:
        """Conditions on ``self`` alone, under which a part of the function runs."""
        tests: list[ast.expr] = []
        while node in self.parents:
            inner, node = node, self.parents[node]
            if isinstance(node, ast.If) and inner in node.body and _is_about_self(node.test):
                tests.append(node.test)
        return tuple(tests)


@functools.cache
def _source(function: Callable[..., Any]) -> _Source | None:
    function = inspect.unwrap(function)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):  # written in another language, or not kept
        return None
    return _Source(function, tree) if isinstance(tree, ast.FunctionDef) else None


def _called(function: FunctionType, node: ast.expr) -> FunctionType | None:
    """The function that a name stands for, in the module of the function that has it."""
    named = function.__globals__.get(node.id) if isinstance(node, ast.Name) else None
    is_own = isinstance(named, FunctionType) and not named.__module__.startswith("torch.")
    return named if is_own else None


def _arguments(source: _Source, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    names = [argument.arg for argument in (*source.tree.args.posonlyargs, *source.tree.args.args)]
    yield from zip(names, call.args, strict=False)
    yield from ((keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg is not None)


def _follow(owner: Any, path: Path) -> list[Any]:
    """Return what a path leads to from a module."""
    found = [owner]
    for step in path:
        if step == _EACH:
            found = [child for module in found if isinstance(module, nn.Module) for child in module.children()]
        else:
            found = [getattr(module, step, None) for module in found]
    return found


def _is_about_self(test: ast.expr) -> bool:
    allowed = (ast.Attribute, ast.Name, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp)
    nodes = [node for node in ast.walk(test) if isinstance(node, ast.expr)]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    changes = any(isinstance(node, ast.Attribute) and node.attr == "training" for node in nodes)
    return names == {"self"} and not changes and all(isinstance(node, allowed) for node in nodes)


def _is_off(owner: nn.Module, test: ast.expr) -> bool:
    """Whether a condition of attributes and constants is false for a module as it was made."""
    try:
        return not eval(compile(ast.Expression(test), "<condition>", "eval"), {"__builtins__": {}}, {"self": owner})
    except (AttributeError, TypeError):
        return False
