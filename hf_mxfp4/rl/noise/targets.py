# SPDX-License-Identifier: Apache-2.0
"""What adaptive quantization noise is put on: the layers that are chosen by name."""

from collections.abc import Iterable, Sequence

from ...module_names import name_matches
from ...suggestions import nearest_names


def plain_name(name: str) -> str:
    """A module's name without the wrappers that PEFT puts around models, layers and modules to save."""
    name = name.removeprefix("base_model.model.").replace(".base_layer", "").removesuffix(".original_module")
    return name.split(".modules_to_save.")[0]


def chosen_names(names: Iterable[str], patterns: Sequence[str] | None) -> list[str]:
    """Those of ``names`` whose plain name a pattern matches as [`name_matches`] says; all without patterns."""
    if patterns is None:
        return list(names)
    return [name for name in names if any(name_matches(plain_name(name), pattern) for pattern in patterns)]


def check_patterns(patterns: Sequence[str], names: Sequence[str]) -> None:
    """Raise `ValueError` for a pattern that matches none of ``names``, the plain names of all norms that noise can be
    put on, with those that are nearest."""
    for pattern in patterns:
        if not any(name_matches(name, pattern) for name in names):
            nearest = nearest_names(pattern.removeprefix("re:"), names)
            raise ValueError(
                f"aqn_layers has {pattern!r}, which matches none of the {len(names)} norms that noise can be put on; "
                f"nearest: {', '.join(nearest) or 'none'}. Give whole dotted name parts such as "
                "'layers.0' or 'input_layernorm', or 're:<regex on the full name>'"
            )
