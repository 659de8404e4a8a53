# SPDX-License-Identifier: Apache-2.0
"""`MXFP4RLConfig`: one frozen, validated description of how a model is quantized."""

import copy
import functools
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields
from typing import Any, ClassVar

from transformers.utils.quantization_config import QuantizationConfigMixin

from .model.layer_names import read_names
from .numerics import FULL, GEMM_OPERANDS, PLAIN, LinearScheme, OperandScheme, QuantScheme, Rotation, ScaleRule
from .numerics.schemes import check_alpha, check_mantissas, one_of
from .presets import (
    CHOICES,
    DEFAULT_PRESETS,
    MODES,
    PRESETS,
    Default,
    Preset,
    apply_options,
    check_matmul_backend,
    check_products,
    presets_with,
    read_gemm,
)
from .registration import QUANT_METHOD
from .utils import described_options
from .utils import option as _option


#: Version of the meaning of the fields, written to `config.json`; a newer one is refused instead of misread.
FORMAT_VERSION = 1

#: Options that are written only where they differ from their defaults: other files stay readable by earlier versions.
_UNWRITTEN = ("fprop", "dgrad", "wgrad", "stochastic_seed", "dither_ties", "matmul_backend")
#: Options whose default is that of the preset. The search depends on the macro block.
_OF_PRESETS = ("scale_rule", "macro_block", "macro_search", "outlier_fallback")


class IdleOptionError(ValueError):
    """An option that is set and would change nothing."""

    def __init__(self, option: str, value: Any, where: str):
        super().__init__(f"{option}={value!r} has no effect {where}; leave {option} out")
        self.option = option


@described_options
@dataclass(repr=False, kw_only=True, unsafe_hash=True)
class MXFP4RLConfig(QuantizationConfigMixin):
    """How a model is quantized: pass it to `from_pretrained(quantization_config=...)`; it is saved in `config.json`.

    By default the weights of every linear layer of the decoder are in MXFP4 with two mantissa bits for each block
    scale, 4.3125 bits per weight, and its inputs in E4M3 with one scale per token: ``preset="w4a8"``. With
    ``mode="packed"`` the weights have the same scheme, are stored in 4 bits and frozen as the base of adapters, and
    inputs stay in full precision: ``preset="w4a16"``.

    A checkpoint that already is quantized keeps its own scheme, and transformers warns that the config passed is not
    used. To pack what was trained with ``mode="qat"``, use [`hf_mxfp4.pack`].

    Raises:
        TypeError: an option that does not exist (with the nearest names).
        ValueError: a value outside its supported set, or an option that would change nothing.
    """

    quant_method: str = field(default=QUANT_METHOD, init=False)
    format_version: int = _option(
        FORMAT_VERSION, "Version of this description. Leave it alone; checkpoints of a newer version are refused."
    )
    mode: str = _option(
        "qat",
        "'qat' trains full-precision master weights through their quantized values; 'packed' trains adapters on frozen "
        "weights in 4 bits.",
    )
    preset: str = _option(
        Default.BY_MODE,
        f"Which operands of linear layers are quantized: {', '.join(PRESETS)}. 'w4a8' is the default, in mode 'packed' "
        "'w4a16'. "
        + "; ".join(f"'{preset.name}': {preset.summary}" for preset in PRESETS.values())
        + ". The backward pass uses the same quantized operands; what a preset does not name stays in full precision.",
    )
    scale_rule: str = _option(
        Default.BY_PRESET,
        "How block scales are chosen: " + ", ".join(f"{rule.value!r} ({rule.summary})" for rule in ScaleRule) + ".",
    )
    macro_block: int | str | None = _option(
        Default.BY_PRESET, "Elements per macro-block factor: 32, 64, 128, 256 or 'row'; none switches it off."
    )
    macro_search: str = _option(
        Default.BY_PRESET,
        "How macro factors are found: block_mantissas, block_mantissas_fp8, static, dynamic or hybrid. These are "
        "'block_mantissas' (two mantissa bits for each of the four block scales, by squared error; usual under "
        f"{presets_with('block_mantissas')}), 'block_mantissas_fp8' (the same without 1.75: every value is an E4M3 "
        "number times a power of two, so FP8 tensor cores multiply it; usual under "
        f"{presets_with('block_mantissas_fp8')}), 'static' (from the largest magnitude), 'dynamic' (best of 16 by "
        "squared error) or 'hybrid' (dynamic for weights, static for activations; usual with other sizes than 128).",
    )
    outlier_fallback: float | None = _option(
        Default.BY_PRESET,
        "Weight in (0, 1] of the quantized residual that is added back to every operand in MXFP4: a second tensor of "
        "the same size. 'paper_a' has 0.5; none, which is usual elsewhere, switches it off.",
    )
    fprop: dict[str, str] | None = _option(
        None,
        "What differs from the preset in the forward product: a mapping of x, weight, rotation. x and weight are "
        "'full', 'fp8', 'nvfp4' or a scheme such as 'rceil+mbs128-static+of0.5+stochastic+32x32', x also 'mxfp8'; "
        "rotation is 'none', 'deterministic-16', 'random-32', ... 128.",
    )
    dgrad: dict[str, str] | None = _option(
        None,
        "The same for the gradient of the input: grad, weight, rotation. grad is 'full', 'fp8', 'mxfp8' or a "
        "scheme; weight is 'full', 'reuse' for fprop's values, or a scheme.",
    )
    wgrad: dict[str, str] | None = _option(
        None,
        "The same for the gradient of the weight: grad, x, rotation. grad is 'full', 'fp8', 'mxfp8' or a scheme; x is "
        "'full', 'reuse' for fprop's values, or a scheme.",
    )
    stochastic_seed: int = _option(
        0, "Seed of stochastic rounding, of the signs of random rotations and of dither_ties."
    )
    dither_ties: bool = _option(
        True,
        "Mode 'qat': dither float32 master weights that come from a 16-bit checkpoint. They move to random places "
        "within half an ulp of their 16-bit numbers as they are loaded. About one in a hundred of these lie exactly on "
        "a rounding boundary of MXFP4, and the first training step of any size would flip them all. Codes, scales and "
        "the checkpoint that rounding gives back stay the same. No part of a scheme: configs that differ in it are "
        "equal, and mode 'packed' has no use for it.",
        compare=False,
    )
    smooth: bool = _option(
        True,
        "Mode 'qat': smooth activations by powers of two as a plain full-precision checkpoint is loaded. The model "
        "computes the same in full precision, and quantized operands have fewer outliers. No part of a scheme: configs "
        "that differ in it are equal, and mode 'packed' has no use for it.",
        compare=False,
    )
    modules_to_not_convert: list[str] | tuple[str, ...] | None = _option(
        None,
        "Modules to leave in full precision, besides the head, routers and embeddings, which always are. Each is one "
        "or more whole dotted name parts ('layers.0', 'mlp.down_proj') or 're:<regex on the full name>'.",
    )
    backend: str = _option(
        "auto",
        "Where quantization runs: 'auto' (Triton on GPUs, fused C++ on CPUs, where they apply), 'eager', 'cpu' or "
        "'triton'.",
    )
    matmul_backend: str = _option(
        "auto",
        "What multiplies quantized operands: auto, dense, fp8 or fp4. These are 'auto' (FP4 tensor cores for forward "
        "products of codes, FP8 ones for values that are E4M3 numbers), 'dense' (ordinary products of the values), "
        "'fp8' (as 'auto' without FP4, on CPUs too) or 'fp4' (as 'auto'; it warns where a forward product is not in "
        "FP4).",
    )

    #: Not an option: modules that a saved model keeps in full precision, where names alone do not tell.
    #: Written to `config.json` and read from it, so that a checkpoint keeps its choice of layers.
    full_precision: ClassVar[tuple[str, ...] | None] = None

    def __post_init__(self):
        version = self.format_version
        if type(version) is not int or version != FORMAT_VERSION:
            advice = "install a newer hf_mxfp4 to load this checkpoint"
            raise ValueError(f"format_version={version!r}: this hf_mxfp4 reads version {FORMAT_VERSION}; {advice}")

        # The mode decides the preset, and the preset all options that were left out.
        one_of("mode", self.mode, MODES)
        if self.preset is Default.BY_MODE:
            self._set("preset", DEFAULT_PRESETS[self.mode])
        one_of("preset", self.preset, tuple(PRESETS))
        if self.mode not in self._preset.modes:
            choices = ", ".join(repr(preset.name) for preset in PRESETS.values() if self.mode in preset.modes)
            raise ValueError(f"preset={self.preset!r} is for mode='qat'; with mode='packed' choose one of {choices}")
        self._fill_in_defaults()

        # Check each option by itself.
        for name, values in CHOICES.items():
            one_of(name, getattr(self, name), values)
        check_alpha(self.outlier_fallback)
        check_mantissas(self.macro_search, self.macro_block)
        for gemm in GEMM_OPERANDS:
            self._set(gemm, read_gemm(gemm, getattr(self, gemm)))

        # Check them together. From here on there are `gemms`.
        if self.mode == "packed" and self.packing_unsupported_reason:
            raise ValueError(f"mode='packed' cannot use this config: {self.packing_unsupported_reason}")
        check_products(self.gemms(), self.backend)
        check_matmul_backend(self.matmul_backend, self.gemms())
        self._check_seed()
        if type(self.smooth) is not bool:
            raise ValueError(f"smooth={self.smooth!r} must be True or False")
        for name in ("dgrad", "wgrad"):
            value = getattr(self, name)
            if self.mode == "packed" and value is not None:
                reason = "whose frozen weights have one product, also for the gradient of the input"
                raise IdleOptionError(name, value, f"in mode='packed' {reason}")
        self._check_effect()
        self._set("modules_to_not_convert", read_names("modules_to_not_convert", self.modules_to_not_convert))
        self._set("_frozen", True)

    def _fill_in_defaults(self) -> None:
        """Give options that are not set the usual values, and others the form that they are kept in."""
        if isinstance(self.scale_rule, ScaleRule):
            self._set("scale_rule", self.scale_rule.value)
        if isinstance(self.macro_block, str) and self.macro_block.isascii() and self.macro_block.isdigit():
            self._set("macro_block", int(self.macro_block))
        for name in _OF_PRESETS:
            if getattr(self, name) is Default.BY_PRESET:
                self._set(name, self._usual(name))

    @property
    def _preset(self) -> Preset:
        return PRESETS[self.preset]

    def _usual(self, name: str) -> Any:
        """Return the default of an option of the scheme under this preset and ``macro_block``."""
        if name == "macro_search":
            return self._preset.usual_macro_search(self.macro_block)
        return getattr(self._preset, name)

    def _check_seed(self) -> None:
        """Raise `ValueError` for a seed that is none, or that would draw nothing."""
        seed = self.stochastic_seed
        if type(self.dither_ties) is not bool:
            raise ValueError(f"dither_ties={self.dither_ties!r} must be True or False")
        if type(seed) is not int or seed < 0:
            raise ValueError(f"stochastic_seed={seed!r} must be a whole number of at least 0")
        dithers = self.dither_ties and self.mode == "qat"
        if seed and not dithers and not self.gemms().is_random:
            raise ValueError(f"stochastic_seed={seed} has no effect, since nothing is random here; leave it out")

    # dataclass(frozen=True) cannot extend the mixin, which is a dataclass and not frozen.
    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("_frozen"):
            raise FrozenInstanceError(f"{type(self).__name__} is frozen; build a new one to change {name!r}")
        super().__setattr__(name, value)

    def _set(self, name: str, value: Any) -> None:
        """Set an attribute, also of a frozen config."""
        object.__setattr__(self, name, value)

    @property
    def weight_scheme(self) -> QuantScheme:
        """How weights are quantized, along their input dimension.

        Raises `ValueError` when ``fprop`` does not take them in MXFP4.
        """
        scheme = self.gemms().fprop.right
        if not isinstance(scheme, QuantScheme):
            raise ValueError(f"fprop takes weights in {scheme}; there is no scheme of MXFP4 of theirs")
        return scheme

    @property
    def activation_scheme(self) -> OperandScheme | None:
        """How layer inputs are quantized, along their last axis: a [`QuantScheme`] of MXFP4,
        [`hf_mxfp4.numerics.FP8`], `MXFP8` or `NVFP4`; `None` when they are not."""
        scheme = self.gemms().fprop.left
        return None if scheme is FULL else scheme

    def gemms(self) -> LinearScheme:
        """Return how the three products of a layer are computed."""
        return self._gemms

    @functools.cached_property
    def _gemms(self) -> LinearScheme:
        """The products, which every layer of a model asks for."""
        if self.macro_search == "hybrid":
            weights = self._scheme("dynamic")
            activations = self._scheme("static")
        else:
            weights = activations = self._scheme(self.macro_search)
        of_preset = self._preset.products(weights, activations)
        products = {}
        for gemm in GEMM_OPERANDS:
            products[gemm] = apply_options(gemm, getattr(of_preset, gemm), getattr(self, gemm))
        return LinearScheme(**products)

    @property
    def packing_unsupported_reason(self) -> str | None:
        """Why stored 4-bit weights cannot stand for the forward product; `None` where they can."""
        fprop = self.gemms().fprop
        if not isinstance(fprop.right, QuantScheme):
            return f"its fprop takes weights in {fprop.right}, and packed ones are in MXFP4"
        if fprop.rotation is not None and fprop.rotation.random:
            return f"its fprop rotates both operands by signs that are drawn anew in every step ({fprop.rotation})"
        if fprop.is_random:
            return "its fprop rounds stochastically, anew in every step"
        return None

    @property
    def weights_alone_unsupported_reason(self) -> str | None:
        """Why layers and engines that know nothing of the scheme cannot compute the forward product from quantized
        weights: what cannot be packed, and what rotates. `None` if they can."""
        fprop = self.gemms().fprop
        if fprop.rotation is not None and isinstance(fprop.right, QuantScheme):
            return f"its fprop rotates both operands ({fprop.rotation}), which weights alone cannot express"
        return self.packing_unsupported_reason

    @property
    def weight_rotation(self) -> Rotation | None:
        """The rotation of weights, before they are quantized, and of inputs along the input dimension, if any."""
        return self.gemms().fprop.rotation

    def _scheme(self, macro_search: str) -> QuantScheme:
        """Return the scheme of operands in MXFP4 that the options describe, with a search of macro factors."""
        if self.macro_block is None:
            macro_search = "static"  # nothing to search: equal schemes compare equal
        return QuantScheme(ScaleRule(self.scale_rule), self.macro_block, macro_search, self.outlier_fallback)

    def _check_effect(self) -> None:
        """Raise `IdleOptionError` for an option of the scheme that changes no operand of any product.

        An option that is switched off (`None`) and one with its usual value are never idle.
        """
        for name in _OF_PRESETS:
            value = self._usual(name)
            if getattr(self, name) in (None, value):
                continue
            other = copy.copy(self)
            other.__dict__.pop("_gemms", None)
            other._set(name, value)
            if other.gemms() == self.gemms():
                raise IdleOptionError(name, getattr(self, name), f"on any operand of {self.describe()}")

    def packed(self) -> "MXFP4RLConfig":
        """Return the same scheme in mode ``"packed"``: what a model of this config becomes by [`hf_mxfp4.pack`]. Of the
        three products the forward one is left.

        Raises `ValueError` when packed weights cannot stand for it.
        """
        if self.packing_unsupported_reason:
            raise ValueError(f"this config cannot be packed: {self.packing_unsupported_reason}")
        options = {option.name: getattr(self, option.name) for option in fields(self) if option.init}
        options["mode"] = "packed"
        packable = [preset for preset in PRESETS.values() if "packed" in preset.modes]
        if self._preset not in packable:
            # The first preset that treats inputs in the same way.
            inputs = self._preset.fprop[0]
            options["preset"] = next(preset.name for preset in packable if preset.fprop[0] == inputs)
        fprop = dict(self.fprop or {})
        if self._preset.tiles:  # which no preset of this mode has
            fprop.setdefault("weight", str(self.weight_scheme))
        options["fprop"] = fprop or None
        # Of no use for frozen weights.
        options |= {"stochastic_seed": 0, "dgrad": None, "wgrad": None}
        return self._without_idle(options)

    def keeping(self, full_precision: tuple[str, ...] | None) -> "MXFP4RLConfig":
        """Return a copy for a model that keeps these modules in full precision; see `full_precision`."""
        config = copy.copy(self)
        config._set("full_precision", full_precision)
        return config

    def describe(self) -> str:
        """Return one line: the preset, and each operand with a scheme of its own."""
        scheme = self.gemms()
        fprop = scheme.fprop
        operands = f"weights {fprop.right}, activations {fprop.left}"
        if fprop.rotation is not None:
            operands += f", rotation {fprop.rotation}"
        parts = [f"{self.preset} [{operands}]"]
        if not scheme.dgrad == scheme.wgrad == PLAIN:
            parts += [f"{gemm} [{scheme.describe(gemm)}]" for gemm in ("dgrad", "wgrad")]
        return ", ".join(parts)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any):
        """Build from the dictionary form of `config.json`. Keyword arguments replace entries of the dictionary; what
        it says to vLLM alone (`"vllm"`) is passed over.

        Raises as the constructor does; also `ValueError` when the dictionary is another method's.
        """
        options = dict(config_dict)
        method = options.pop("quant_method", QUANT_METHOD)
        if method != QUANT_METHOD:
            raise ValueError(f"this is a {method!r} quantization config; MXFP4RLConfig reads {QUANT_METHOD!r} only")
        options.pop("vllm", None)
        full_precision = read_names("full_precision", options.pop("full_precision", None))
        names = {option.name for option in fields(cls) if option.init}
        unused = {}
        for key, value in kwargs.items():
            if return_unused_kwargs and key not in names:
                unused[key] = value
            else:
                options[key] = value
        config = cls(**options).keeping(full_precision)
        if return_unused_kwargs:
            return config, unused
        return config

    @classmethod
    def _without_idle(cls, options: dict[str, Any]) -> "MXFP4RLConfig":
        """Build from options that had an effect in another mode; drop those that have none in this one."""
        while True:
            try:
                return cls(**options)
            except IdleOptionError as error:
                if error.option not in options:
                    raise
                options = {name: value for name, value in options.items() if name != error.option}

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-clean dictionary that [`from_dict`] reads back to an equal config."""
        options = asdict(self)
        # JSON has no tuples.
        if self.modules_to_not_convert is not None:
            options["modules_to_not_convert"] = list(self.modules_to_not_convert)
        for gemm in GEMM_OPERANDS:
            if options[gemm] is not None:
                options[gemm] = dict(options[gemm])
        for option in fields(self):
            if option.name in _UNWRITTEN and options[option.name] == option.default:
                del options[option.name]
        if self.full_precision is not None:
            options["full_precision"] = list(self.full_precision)
        return options

    def get(self, name: str, default: Any = None) -> Any:
        """Return an entry of the dictionary form: transformers reads the config of a model in memory so, when it is
        given to `from_pretrained`."""
        return self.to_dict().get(name, default)

    def __iter__(self):
        yield from self.to_dict().items()

    def __repr__(self) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in self.to_dict().items() if key != "quant_method")
        return f"{type(self).__name__}({options})"
