# SPDX-License-Identifier: Apache-2.0
"""Schemes as a user writes them for a whole model, the bits that they take, and putting them on a model in memory."""

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch import nn

from ...config import MXFP4RLConfig
from ...layers import QUANTIZED, TRAINABLE
from ...model.layer_names import find_layers
from ...numerics import FULL, MXFP8, NVFP4, OperandScheme, QuantScheme, parse_scheme
from ...presets import PRESETS
from ...report import master_sqnr
from ..errors.bits import bits_per_element
from ..errors.layers import location_of
from ..errors.source import SourceError


#: Plain MXFP4 and the two corrections of arXiv 2605.20402.
PAPER_SCHEMES = ("rceil", "rceil+mbs128-static", "rceil+mbs128-static+of0.5")
_SPELLINGS = (
    "'default', a preset (w4a16, w4a4, paper_a, ...) with its usual options, 'w4a16:SCHEME' (weights alone), "
    "'w4a8:SCHEME' (activations in E4M3; 'w4a8:SCHEME/mxfp8': in MXFP8), 'w4a4:SCHEME' or SCHEME (weights and "
    "activations), 'w4a4:WEIGHTS/ACTIVATIONS' (a scheme each), 'own' (that of the checkpoint) or 'config:FILE' "
    "(options of MXFP4RLConfig as JSON or YAML)"
)
_OPERANDS = ("w4a16", "w4a8", "w4a4")
#: Bits of a weight that is left in full precision.
_FULL_BITS = 16.0
_SET_BY_TRANSFORMERS = ("is_quantized", "quantization_method")


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
        """Name the operands of the forward product that are quantized."""
        operands = {"weights": self.weight_bits, "activations": self.activation_bits}
        return " and ".join(name for name, bits in operands.items() if bits is not None)

    @property
    def weight_bits(self) -> float | None:
        """Bits of a weight; `None` where weights are left in full precision."""
        return _bits_of(self.config.gemms().fprop.right)

    @property
    def activation_bits(self) -> float | None:
        """Bits of an activation; `None` where they are left in full precision."""
        return _bits_of(self.config.gemms().fprop.left)

    @property
    def bits(self) -> float:
        """Bits of an operand: ``average``, or the mean over those that are quantized."""
        if self.average is not None:
            return self.average
        known = [bits for bits in (self.weight_bits, self.activation_bits) if bits is not None]
        return sum(known) / len(known)


def _bits_of(operand: OperandScheme) -> float | None:
    if operand is FULL:
        return None
    return bits_per_element(operand)


def read_schemes(texts: list[str], own: MXFP4RLConfig | None = None) -> list[ModelScheme]:
    """Read the schemes that a user names, each once; see the table in docs/error-analysis.md.

    Scheme strings are those of [`hf_mxfp4.numerics.parse_scheme`], where ``mbs<size>-hybrid`` means dynamic for weights
    and static for activations; tiles (``32x32``) are of weights alone.

    Args:
        own: the config of the checkpoint; the layers that it leaves alone are left alone by all schemes, but those of a
            file.

    Raises [`SourceError`] for what cannot be read.
    """
    schemes: dict[MXFP4RLConfig, ModelScheme] = {}
    for text in texts:
        config = for_evaluation(_read(text.strip(), own))
        schemes.setdefault(config, ModelScheme(text.strip(), config))
    return list(schemes.values())


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
        if unit == "layer":
            # The name up to its first number; all of it where there is none.
            decoder_layer = re.match(r"(.*?\.\d+)\.", name)
            part = name
            if decoder_layer:
                part = decoder_layer[1]
        else:
            part, _ = location_of(name)
        parts.setdefault(part, []).append(name)
    # Biases are not quantized.
    sizes = {name: sum(p.numel() for p in layer.parameters() if p.dim() > 1) for name, layer in layers.items()}
    schemes = []
    for part, names in parts.items():
        share = sum(sizes[name] for name in names) / sum(sizes.values())
        config = replace(scheme.config, modules_to_not_convert=(*left, *names))
        average = scheme.bits + (_FULL_BITS - scheme.bits) * share
        schemes.append(ModelScheme(f"{scheme.name} without {part}", config, average))
    return schemes


def for_evaluation(config: MXFP4RLConfig) -> MXFP4RLConfig:
    """Return a config with the same forward product on master weights that nothing moves: trainable layers then have
    the numbers of packed ones, and a checkpoint is measured as it is."""
    if config.mode == "qat" and not config.dither_ties:
        return config
    # A seed of products that draw nothing would tell equal schemes apart.
    seed = 0
    if config.gemms().is_random:
        seed = config.stochastic_seed
    return replace(config, mode="qat", dither_ties=False, stochastic_seed=seed)


@contextlib.contextmanager
def swapped(model: nn.Module, config: MXFP4RLConfig) -> Iterator[float | None]:
    """Let the layers that ``config`` matches compute under its scheme, on the very weights of ``model``; restore the
    plain layers on exit. What `from_pretrained` would have made of the same files has the same bits.

    Gives the signal to quantization noise ratio of the weights in decibels, as `quantization_report` has it.

    Raises `ValueError` for a model that is quantized already, and where the config matches nothing.
    """
    from transformers.quantizers.auto import AutoHfQuantizer  # it imports every quantization library there is

    if any(isinstance(module, QUANTIZED) for module in model.modules()):
        raise ValueError(f"{type(model).__name__} is quantized; schemes are put on a model in full precision")
    before = dict(model.named_modules(remove_duplicate=False))
    attributes = {name: model.__dict__[name] for name in _SET_BY_TRANSFORMERS if name in model.__dict__}
    try:
        # As transformers does it, which knows the quantizer. It marks the model before the scheme is checked.
        AutoHfQuantizer.from_config(for_evaluation(config)).preprocess_model(model)
        if not any(isinstance(module, TRAINABLE) for module in model.modules()):
            raise ValueError(f"{config.describe()} quantizes no layer of {type(model).__name__}")
        yield master_sqnr(model)
    finally:
        for name, module in before.items():
            if name and model.get_submodule(name) is not module:
                model.set_submodule(name, module)
        for name in _SET_BY_TRANSFORMERS:
            model.__dict__.pop(name, None)
        model.__dict__.update(attributes)


def _read(text: str, own: MXFP4RLConfig | None) -> MXFP4RLConfig:
    """Return the config that ``text`` names; see [`read_schemes`]."""
    if text == "own":
        if own is None:
            raise SourceError("the checkpoint has no scheme of its own (mxfp4_rl in its config.json); leave out 'own'")
        return own
    kind, _, rest = text.partition(":")
    try:
        if kind == "config":
            return MXFP4RLConfig.from_dict(_options(Path(rest).expanduser()))
        config = MXFP4RLConfig(dither_ties=False, smooth=False, **_scheme_options(text, kind, rest))
    except SourceError:
        raise
    except (TypeError, ValueError) as error:
        raise SourceError(f"--scheme {text}: {error}; known are {_SPELLINGS}") from error
    if own is None:
        return config
    return replace(config, modules_to_not_convert=own.modules_to_not_convert)


def _scheme_options(text: str, kind: str, rest: str) -> dict[str, Any]:
    """Return the options of `MXFP4RLConfig` for ``text``, a preset or ``kind:rest`` of `_SPELLINGS`."""
    if text == "default":
        return {}
    if text in PRESETS:
        return {"preset": text}
    if kind in _OPERANDS:
        preset = kind
        schemes = rest
    else:
        preset = "w4a4"
        schemes = text
    weights, slash, activations = schemes.partition("/")
    fprop = {"weight": str(parse_scheme(weights.replace("-hybrid", "-dynamic")))}
    if fprop["weight"] == NVFP4.value and preset == "w4a4" and not slash:
        return {"preset": preset, "fprop": {**fprop, "x": NVFP4.value}}
    if preset == "w4a8" and activations == MXFP8.value:
        fprop["x"] = activations
    elif preset in ("w4a16", "w4a8"):
        if slash:
            raise ValueError(f"{preset} quantizes weights alone in MXFP4; give one scheme, or w4a4:WEIGHTS/ACTIVATIONS")
    elif activations == "full":
        fprop["x"] = activations
    elif slash:
        fprop["x"] = str(parse_scheme(activations))
    else:
        # That of the weights, without tiles.
        scheme = cast(QuantScheme, parse_scheme(weights.replace("-hybrid", "-static")))
        fprop["x"] = str(replace(scheme, block_rows=1))
    return {"preset": preset, "fprop": fprop}


def _options(file: Path) -> dict[str, Any]:
    """Return the options in a file, which may be a checkpoint's config.json."""
    import yaml

    try:
        content = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            options = json.loads(content)
        else:
            options = yaml.safe_load(content)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SourceError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    if isinstance(options, dict):
        options = options.get("quantization_config", options)
    if not isinstance(options, dict):
        raise SourceError(f"{file} does not hold options of MXFP4RLConfig")
    return options
