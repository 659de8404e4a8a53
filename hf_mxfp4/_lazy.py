# SPDX-License-Identifier: Apache-2.0
"""Names of a package that are imported when they are first used."""

import importlib
from collections.abc import Callable, Collection
from typing import Any


def lazy_names(package: str, modules: dict[str, str], parts: Collection[str] = ()) -> Callable[[str], Any]:
    """A package's `__getattr__` for names that live in the submodules that ``modules`` gives for them, and for its
    submodules ``parts`` themselves."""

    def get(name: str) -> Any:
        if name in parts:
            return importlib.import_module(f".{name}", package)
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f".{modules[name]}", package), name)

    return get
