# SPDX-License-Identifier: Apache-2.0
"""The quantization method `mxfp4_rl` in transformers' tables, without importing them.

`transformers.quantizers.auto` imports torch and every quantization library that is installed, which takes seconds;
`from_pretrained` imports it anyway. So the method is entered the moment that module has been imported, by whomever: a
finder on `sys.meta_path` adds a step to the module's loader. What is entered are stand-ins, which import the quantizer
when they are first used: an import inside another module's import could wait for a thread that waits for it.
"""

import contextlib
import importlib
import logging
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any


QUANT_METHOD = "mxfp4_rl"
_PACKAGE = "transformers.quantizers"
TABLES = f"{_PACKAGE}.auto"
_QUANTIZER = "hf_mxfp4.integrations.transformers.quantizer"

#: Logger to what its messages contain that are not shown. transformers imports torchao, where that is installed,
#: together with its tables. torchao then warns of each of its GPU libraries that does not fit this machine, and torch
#: of what torchao registers; neither says anything about a run here.
_NOISE = {"torchao": "Failed to load", "torch.utils._pytree": "is an Enum subclass"}


class StandIn:
    """Stands for a class of [`hf_mxfp4.integrations.transformers.quantizer`] in a table: the class is imported when the
    stand-in is called or asked for an attribute."""

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
    """Finds transformers' tables as the other finders do, and has the method entered once they have been run; and finds
    torchao, which PEFT imports too, so that it is quiet whoever imports it."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if name not in (TABLES, "torchao"):
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
        _enter_stand_ins(_imported_tables())


def enter_classes(config: type, quantizer: type) -> None:
    """Put the classes themselves in the place of their stand-ins, or of what a reloaded module put there before."""
    _enter(_imported_tables(), config, quantizer)


def _imported_tables() -> ModuleType:
    """The tables, through the package first, as it imports them: the other way round two threads can wait for each
    other."""
    importlib.import_module(_PACKAGE)
    return importlib.import_module(TABLES)


def _enter_stand_ins(tables: ModuleType) -> None:
    # A quantizer that is imported has entered itself; only tables that were reloaded have lost it.
    if _QUANTIZER not in sys.modules or QUANT_METHOD not in tables.AUTO_QUANTIZER_MAPPING:
        _enter(tables, StandIn("MXFP4RLConfig"), StandIn("MXFP4RLQuantizer"))


def _enter(tables: ModuleType, config: Any, quantizer: Any) -> None:
    """Fill the tables directly: transformers' functions for it refuse what is not a class, and a second time."""
    tables.AUTO_QUANTIZATION_CONFIG_MAPPING[QUANT_METHOD] = config
    tables.AUTO_QUANTIZER_MAPPING[QUANT_METHOD] = quantizer


def _add_step(loader: Any) -> None:
    run = loader.exec_module

    def run_and_enter(module: ModuleType) -> None:
        if module.__name__ not in (TABLES, "torchao"):  # a loader of zipped packages loads others, too
            return run(module)
        with _without_noise():
            run(module)
        if module.__name__ == TABLES:
            _enter_stand_ins(module)

    loader.exec_module = run_and_enter


@contextlib.contextmanager
def _without_noise() -> Iterator[None]:
    filters = {name: lambda record, text=text: text not in record.getMessage() for name, text in _NOISE.items()}
    for name, keep in filters.items():
        logging.getLogger(name).addFilter(keep)
    try:
        yield
    finally:
        for name, keep in filters.items():
            logging.getLogger(name).removeFilter(keep)
