# SPDX-License-Identifier: Apache-2.0
"""Schemes as a user writes them for a whole model: which operands are quantized, and how each is."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from ...config import MXFP4RLConfig
from ...module_names import find_layers
from ...numerics import QuantScheme, parse_scheme
from ...presets import PRESETS
from ..errors.layer_names import location_of
from ..errors.schemes import bits_per_element
from ..errors.source import SourceError
from .swapped import for_evaluation


#: What the help of `--scheme` and the messages here say of them.
SPELLINGS = (
    "'default', a preset (w4a16, w4a4, paper_a, ...) with its usual options, 'w4a16:SCHEME' (weights alone), "
    "'w4a4:SCHEME' or SCHEME (weights and activations), 'w4a4:WEIGHTS/ACTIVATIONS' (a scheme each), 'own' (that of the "
    "checkpoint) or 'config:FILE' (options of MXFP4RLConfig as JSON or YAML)"
)
_OPERANDS = ("w4a16", "w4a4")
#: Bits of a weight that is left in full precision.
FULL_BITS = 16.0


@dataclass(frozen=True)
class ModelScheme:
    """A scheme of a whole model, and what it is called.

    Attributes:
        average: bits of an operand where layers in full precision are counted too, as by [`without_each`]; `None` for
            those of quantized layers.
    """

    name: str
    config: MXFP4RLConfig
    average: float | None = None

    @property
    def operands(self) -> str:
        """Which operands of the forward product are quantized, in words."""
        weights, activations = (bits is not None for bits in (self.weight_bits, self.activation_bits))
        return "weights and activations" if weights and activations else "weights" if weights else "activations"

    @property
    def weight_bits(self) -> float | None:
        """Bits of a weight; `None` where weights are left in full precision."""
        return _bits(self.config.gemms().fprop.right)

    @property
    def activation_bits(self) -> float | None:
        """Bits of an activation; `None` where they are left in full precision."""
        return _bits(self.config.gemms().fprop.left)

    @property
    def bits(self) -> float:
        """Bits of an operand: ``average``, or the mean over those that are quantized."""
        if self.average is not None:
            return self.average
        known = [bits for bits in (self.weight_bits, self.activation_bits) if bits is not None]
        return sum(known) / len(known)


def read_schemes(texts: list[str], own: MXFP4RLConfig | None = None) -> list[ModelScheme]:
    """The schemes that a user names, each once; see [`SPELLINGS`].

    Scheme strings are those of [`hf_mxfp4.numerics.parse_scheme`], where ``mbs<size>-hybrid`` means dynamic for weights
    and static for activations; tiles (``32x32``) are of weights alone.

    Args:
        own: the config of the checkpoint; the layers that it leaves alone are left alone by all schemes, but those of a
            file.

    Raises [`SourceError`] for what cannot be read.
    """
    found: dict[MXFP4RLConfig, ModelScheme] = {}
    for text in texts:
        config = for_evaluation(_read(text.strip(), own))
        found.setdefault(config, ModelScheme(text.strip(), config))
    names = [scheme.name for scheme in found.values()]
    if twice := [name for name in names if names.count(name) > 1]:
        raise SourceError(f"two schemes are called {twice[0]!r}; give files of other names")
    return list(found.values())


def without_each(scheme: ModelScheme, model: nn.Module, unit: str) -> list[ModelScheme]:
    """Return ``scheme`` once for each part of a full-precision ``model``, with that part left in full precision (16
    bits): how much less the divergence is then says what quantizing the part costs.

    Args:
        unit: what a part is: all layers of one ``type`` (``mlp.down_proj``) or a decoder ``layer``.

    Raises [`SourceError`] where the model has nothing to quantize.
    """
    left = tuple(scheme.config.modules_to_not_convert or ())
    try:
        layers = find_layers(model, left)[0]
    except ValueError as error:
        raise SourceError(str(error)) from error
    parts: dict[str, list[str]] = {}
    for name in layers:
        decoder_layer = re.match(r"(.*?\.\d+)\.", name)
        by_layer = decoder_layer[1] if decoder_layer else name
        parts.setdefault(by_layer if unit == "layer" else location_of(name).layer_type, []).append(name)
    sizes = {name: sum(p.numel() for p in layer.parameters() if p.dim() > 1) for name, layer in layers.items()}
    found = []
    for part, names in parts.items():
        share = sum(sizes[name] for name in names) / sum(sizes.values())
        config = replace(scheme.config, modules_to_not_convert=(*left, *names))
        average = scheme.bits + (FULL_BITS - scheme.bits) * share
        found.append(ModelScheme(f"{scheme.name} without {part}", config, average))
    return found


def _read(text: str, own: MXFP4RLConfig | None) -> MXFP4RLConfig:
    if text == "own":
        if own is None:
            raise SourceError("the checkpoint has no scheme of its own (mxfp4_rl in its config.json); leave out 'own'")
        return own
    kind, _, rest = text.partition(":")
    try:
        if kind == "config":
            return MXFP4RLConfig.from_dict(_options(Path(rest).expanduser()))
        config = MXFP4RLConfig(dither_ties=False, **_scheme_options(text, kind, rest))
    except (TypeError, ValueError) as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"--scheme {text}: {error}; known are {SPELLINGS}") from error
    return config if own is None else replace(config, modules_to_not_convert=own.modules_to_not_convert)


def _scheme_options(text: str, kind: str, rest: str) -> dict[str, Any]:
    if text == "default":
        return {}
    if text in PRESETS:
        return {"preset": text}
    preset, schemes = (kind, rest) if kind in _OPERANDS else ("w4a4", text)
    weights, slash, activations = schemes.partition("/")
    fprop = {"weight": _checked(weights.replace("-hybrid", "-dynamic"))}
    if preset == "w4a16":
        if slash:
            raise ValueError("w4a16 quantizes weights alone; give one scheme, or w4a4:WEIGHTS/ACTIVATIONS")
    elif slash:
        fprop["x"] = activations if activations == "full" else _checked(activations)
    else:
        fprop["x"] = str(replace(parse_scheme(weights.replace("-hybrid", "-static")), block_rows=1))
    return {"preset": preset, "fprop": fprop}


def _checked(text: str) -> str:
    return str(parse_scheme(text))


def _options(file: Path) -> dict[str, Any]:
    """The options in a file, which may be a checkpoint's config.json."""
    import yaml

    try:
        content = file.read_text(encoding="utf-8")
        options = json.loads(content) if file.suffix == ".json" else yaml.safe_load(content)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SourceError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    if isinstance(options, dict):
        options = options.get("quantization_config", options)
    if not isinstance(options, dict):
        raise SourceError(f"{file} does not hold options of MXFP4RLConfig")
    return options


def _bits(operand: object) -> float | None:
    return bits_per_element(operand) if isinstance(operand, QuantScheme) else None
