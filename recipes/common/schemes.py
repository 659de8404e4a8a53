# SPDX-License-Identifier: Apache-2.0
"""The scheme of a run: where its options come from, and which preset it is."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.presets import FORWARD_PRESETS, PRESETS


_OPTIONS = [option.name for option in fields(MXFP4RLConfig) if option.init]
#: Options that belong to the model or the machine, whatever the scheme.
_OF_THE_MODEL = ("format_version", "modules_to_not_convert", "backend")
#: Options that a preset leaves alone: they do not change the numbers that it stands for.
_BESIDE_PRESETS = (*_OF_THE_MODEL, "mode", "matmul_backend", "stochastic_seed", "dither_ties")


def put_over(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Prepare options for others to be put over them.

    A preset in ``later`` resets the options of the scheme in ``earlier``, so that it is exactly the preset, and so does
    another mode.

    Returns:
        What is left of ``earlier``, and what was dropped.
    """
    kept: tuple[str, ...] = tuple(_OPTIONS)
    if "mode" in later and later["mode"] != earlier.get("mode", "qat"):
        kept = _OF_THE_MODEL
    elif "preset" in later:
        kept = _BESIDE_PRESETS
    left = {name: value for name, value in earlier.items() if name in kept or name not in _OPTIONS or name in later}
    return left, {name: value for name, value in earlier.items() if name not in left}


def describe(config: MXFP4RLConfig) -> str:
    """The scheme in one line, and whether it is a preset."""
    return f"{config.describe()}: {preset_of(config)}"


def preset_of(config: MXFP4RLConfig) -> str:
    """Say which preset a scheme is exactly, or what differs from the one that it names."""
    names = PRESETS if config.mode == "qat" else FORWARD_PRESETS
    presets = {name: MXFP4RLConfig(mode=config.mode, preset=name) for name in (config.preset, *names)}
    for name, preset in presets.items():
        same = config.gemms() == preset.gemms() and config.saved_activations == preset.saved_activations
        if same:
            written = "" if name == config.preset else f" (written as {config.preset})"
            return f"exactly the preset {name}{written}"
    usual = presets[config.preset]
    return f"the preset {config.preset} but for {', '.join(differences(config, usual, beside=_BESIDE_PRESETS))}"


def differences(config: MXFP4RLConfig, other: MXFP4RLConfig, beside: tuple[str, ...] = ()) -> list[str]:
    """The options in which two schemes differ, each as ``name=value (not other value)``."""
    return [
        f"{name}={getattr(config, name)} (not {getattr(other, name)})"
        for name in _OPTIONS
        if name not in beside and getattr(config, name) != getattr(other, name)
    ]
