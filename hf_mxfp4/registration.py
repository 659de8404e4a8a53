# SPDX-License-Identifier: Apache-2.0
"""The quantization method `mxfp4_rl` in transformers' tables, without importing them.

`transformers.quantizers.auto` takes seconds to import, and `from_pretrained` imports it anyway. So the method is
entered the moment that module has been imported, by whomever: a finder on `sys.meta_path` adds a step to its loader.
What is entered are lazy classes: an import inside another import could wait for a thread that waits for it.
"""

import importlib
import sys
from types import ModuleType
from typing import Any


QUANT_METHOD = "mxfp4_rl"
_PACKAGE = "transformers.quantizers"
TABLES = f"{_PACKAGE}.auto"
_QUANTIZER = "hf_mxfp4.integrations.transformers.quantizer"


class LazyClass:
    """A class of `hf_mxfp4.integrations.transformers`, imported when it is called or asked for an attribute."""

    def __init__(self, class_name: str):
        self._class_name = class_name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._import()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_class_name":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._import(), name)

    def __repr__(self) -> str:
        return f"<{self._class_name} of hf_mxfp4, imported on use>"

    def _import(self) -> type:
        return getattr(importlib.import_module(_QUANTIZER), self._class_name)


class TableFinder:
    """Finds transformers' tables as the other finders do, and has the method entered once they have been run."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if name != TABLES:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None:
            _add_step(spec.loader)
        return spec


def register_with_tables() -> None:
    """Enter the method into transformers' tables: now where they are imported already, else as soon as they are."""
    finders = {(type(finder).__module__, type(finder).__qualname__) for finder in sys.meta_path}
    if (__name__, TableFinder.__qualname__) not in finders:
        sys.meta_path.insert(0, TableFinder())
    # The finder stands there first: tables that another thread is importing are either waited for here or seen by it.
    if _PACKAGE in sys.modules:
        _enter_lazily(_imported_tables())


def enter_classes(config: Any, quantizer: Any, tables: ModuleType | None = None) -> None:
    """Put classes into the tables, in the place of lazy ones, or of what a reloaded module put there before.
    transformers' functions for it refuse what is not a class, and a second time."""
    tables = _imported_tables() if tables is None else tables
    tables.AUTO_QUANTIZATION_CONFIG_MAPPING[QUANT_METHOD] = config
    tables.AUTO_QUANTIZER_MAPPING[QUANT_METHOD] = quantizer


def _imported_tables() -> ModuleType:
    """Return the tables, through the package first, as it imports them, so that threads do not wait for each other."""
    importlib.import_module(_PACKAGE)
    return importlib.import_module(TABLES)


def _enter_lazily(tables: ModuleType) -> None:
    # A quantizer that is imported has entered itself; only tables that were reloaded have lost it.
    if _QUANTIZER not in sys.modules or QUANT_METHOD not in tables.AUTO_QUANTIZER_MAPPING:
        enter_classes(LazyClass("MXFP4RLConfig"), LazyClass("MXFP4RLQuantizer"), tables)


def _add_step(loader: Any) -> None:
    run = loader.exec_module

    def run_and_enter(module: ModuleType) -> None:
        run(module)
        if module.__name__ == TABLES:  # a loader of zipped packages loads others, too
            _enter_lazily(module)

    loader.exec_module = run_and_enter
