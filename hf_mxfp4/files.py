# SPDX-License-Identifier: Apache-2.0
"""Values as JSON can hold them, and files that are replaced in one step."""

import math
import os
from pathlib import Path
from typing import Any


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def json_clean(value: Any) -> Any:
    """``value`` with null for numbers that JSON has no word for, lists for tuples, and strings for keys."""
    if isinstance(value, dict):
        return {str(key): json_clean(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_clean(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file that appears whole or stays what it was."""
    draft = path.with_name(path.name + ".part")
    draft.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(draft, path)
