# SPDX-License-Identifier: Apache-2.0
"""Every option that a run really used, defaults included, as a file beside its results."""

import hashlib
import json
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from transformers import TrainingArguments

import hf_mxfp4
from recipes.common.hardware import versions


FILE_NAME = "resolved_config.yaml"
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate")
#: Options that say where a run is written and whether it goes on, not what it computes.
BOOKKEEPING = ("output_dir", "overwrite", "resume_from_checkpoint", "logging_dir", "run_name")


def resolved_options(*groups: Any) -> dict[str, Any]:
    """All options of dataclasses as plain values by name, in the order of the groups. Tokens are left out."""
    options: dict[str, Any] = {}
    for group in groups:
        named = isinstance(group, TrainingArguments)
        own = group.to_dict() if named else {f.name: getattr(group, f.name) for f in fields(group) if f.init}
        options |= {name: _plain(value) for name, value in own.items() if not name.endswith("_token")}
    return options


def run_id(options: dict[str, Any]) -> str:
    """Twelve hexadecimal digits that two runs share when all their options but `BOOKKEEPING` and the version of this
    package are equal."""
    counted = {name: value for name, value in options.items() if name not in BOOKKEEPING}
    text = json.dumps([hf_mxfp4.__version__, counted], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def write_resolved_config(folder: Path, *groups: Any) -> str:
    """Write `resolved_config.yaml`: the options of all groups, versions of packages, and the id of the run; the id."""
    options = resolved_options(*groups)
    text = yaml.safe_dump(
        {
            "run_id": run_id(options),
            "versions": {"hf_mxfp4": hf_mxfp4.__version__, **versions(PACKAGES)},
            "options": options,
        },
        sort_keys=False,
        allow_unicode=True,
    )
    (folder / FILE_NAME).write_text(text, encoding="utf-8")
    return run_id(options)


def _plain(value: Any) -> Any:
    """A value as YAML has it."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value)
