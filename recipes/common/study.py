# SPDX-License-Identifier: Apache-2.0
"""The option `study` of the recipes: one mapping with what tests, demos and studies set, checked as options are."""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hf_mxfp4.recipes.common.options import build, check_mapping, names, read_yaml


def read_study(kind: type, value: Any) -> Any:
    """Make a ``kind``, a dataclass of options, of a mapping, or of YAML or JSON on the command line. Raises
    `ValueError` for what is no mapping, an unknown name, with the nearest, and a value of another type."""
    if isinstance(value, kind):
        return value
    given = check_mapping(read_yaml("study", value or {}), "study", names((kind,)))
    (study,) = build((kind,), given)
    return study


def moved_to(kind: type) -> dict[str, str]:
    """Return what to write in place of options of earlier versions that ``kind`` has now."""
    return {name: f"write `study: {{{name}: ...}}`" for name in names((kind,))}


def put_together(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Put options over others. Those of a `study` are put over one another, too: naming one leaves the rest."""
    together = {**earlier, **later}
    studies = [read_yaml("study", options["study"]) for options in (earlier, later) if options.get("study")]
    if studies and all(isinstance(study, Mapping) for study in studies):
        together["study"] = {name: value for study in studies for name, value in study.items()}
    return together


def one_study(argv: Sequence[str]) -> list[str]:
    """Return a command line on which all words `--study` are one, put together as by [`put_together`]."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--study", action="append", default=[])
    found, words = parser.parse_known_args(list(argv))
    together: dict[str, Any] = {}
    for text in found.study:
        together = put_together(together, {"study": read_yaml("study", text)})
    return [*words, "--study", json.dumps(together["study"])] if together else words
