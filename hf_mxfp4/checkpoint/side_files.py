# SPDX-License-Identifier: Apache-2.0
"""The files of a checkpoint that conversions copy: those of tokenizers, processors and generation, and code."""

import contextlib
import shutil
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from .folder import CONFIG, CheckpointError, read_json


#: What transformers reads next to the weights, in addition to files that other files name (see [`find_side_files`]). No
#: pickles, optimizer state or model card.
SIDE_FILES = (
    "generation_config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*_token*.json",
    "chat_template*",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "*processor_config.json",
    "LICENSE*",
    "NOTICE*",
    "additional_chat_templates/*.jinja",
    "custom_generate/*",
    "*_tokenizer/*",  # the second tokenizer of a processor
)


def find_side_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint that match [`SIDE_FILES`], the vocabulary files of its tokenizer class, and the
    code that ``auto_map`` names.

    Raises [`CheckpointError`] for a link out of the folder: a stranger's checkpoint could publish a private file.
    """
    configs = [CONFIG, "tokenizer_config.json", *(file.name for file in folder.glob("*processor_config.json"))]
    contents = {name: read_json(folder / name) for name in configs if (folder / name).is_file()}
    patterns = [*SIDE_FILES, *_vocabulary_files(contents)]
    files = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    for content in contents.values():
        files |= _code_files(folder, content.get("auto_map"))
    for file in sorted(files):
        if not _is_inside(file, folder):
            raise CheckpointError(
                f"{file} is a link to a file outside of the folder, which is not copied; replace the link by a copy of "
                "the file, or remove it"
            )
    return sorted(files)


def copy_side_files(files: Iterable[Path], source: Path, target: Path) -> None:
    """Copy files of the folder ``source`` to the same places in ``target``, except those that it has already."""
    for file in files:
        new = target / file.relative_to(source)
        if not new.exists():
            new.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, new)


def is_side_folder(name: str) -> bool:
    """Return whether a folder of this name in a checkpoint is one of [`SIDE_FILES`]."""
    return any(fnmatch(name, pattern.partition("/")[0]) for pattern in SIDE_FILES if "/" in pattern)


def _vocabulary_files(contents: dict[str, dict[str, Any]]) -> set[str]:
    """Return the names of vocabulary files of the tokenizer classes that configs name."""
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    names = {content.get("tokenizer_class") for content in contents.values()}
    model_type = contents.get(CONFIG, {}).get("model_type")
    names.add(TOKENIZER_MAPPING_NAMES.get(str(model_type)))
    files: set[str] = set()
    for name in names:
        if isinstance(name, str):
            with contextlib.suppress(ImportError):  # of a package that the class needs
                tokenizer_class = tokenizer_class_from_name(name)
                files |= set((getattr(tokenizer_class, "vocab_files_names", None) or {}).values())
    return files


def _code_files(folder: Path, auto_map: Any) -> set[Path]:
    """Return the modules in the folder that an ``auto_map`` names, and what these import."""
    from transformers.dynamic_module_utils import get_relative_import_files

    if not isinstance(auto_map, dict):
        return set()
    names: list[Any] = []
    for classes in auto_map.values():
        if isinstance(classes, list):  # the slow and the fast tokenizer
            names += classes
        else:
            names.append(classes)
    files: set[Path] = set()
    for name in names:
        module = folder / f"{str(name).partition('.')[0]}.py"  # "repository--module.Class" is not in the folder
        if module.is_file():
            files.add(module)
            with contextlib.suppress(OSError, ValueError):  # what it imports is missing, or it is not text
                files |= {Path(file) for file in get_relative_import_files(module)}
    return files


def _is_inside(file: Path, folder: Path) -> bool:
    """Return whether a file is in a folder after links are followed, or in the Hub's cache, where the folder
    ``snapshots/<commit>`` consists of links to ``blobs``."""
    folder = folder.resolve()
    file = file.resolve()
    is_cached = folder.parent.name == "snapshots" and file.parent == folder.parent.parent / "blobs"
    return is_cached or file.is_relative_to(folder)
