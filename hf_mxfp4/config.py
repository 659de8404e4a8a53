# SPDX-License-Identifier: Apache-2.0
"""`MXFP4RLConfig`: one frozen, validated description of how a model is quantized."""

import difflib
import enum
import re
from collections.abc import Iterable
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, replace
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from .numerics import QuantScheme, ScaleRule
from .numerics.scheme import MACRO_BLOCKS, check_alpha, check_fallback_rate, one_of


QUANT_METHOD = "mxfp4_rl"
#: Version of the meaning of the fields, written to `config.json`; a newer one is refused instead of misread.
FORMAT_VERSION = 1

MODES = ("qat", "packed")
PRESETS = ("w4a16", "w4a4")
MACRO_SEARCHES = ("static", "dynamic", "hybrid", "blockwise")
OPERANDS = ("both", "weights", "activations")
#: Rows x columns of a weight that share a block scale, and the rows of it.
WEIGHT_BLOCKS = {"1x32": 1, "32x32": 32}
BACKENDS = ("auto", "eager", "cpu", "triton")


class _Default(enum.Enum):
    """Stands for "what is usual in this mode" until the mode is known; a finished config holds the value itself."""

    BY_MODE = "by mode"

    def __str__(self) -> str:
        return self.value


#: Values of the options that depend on the mode.
MODE_DEFAULTS = {
    "qat": {"preset": "w4a4", "outlier_fallback": 0.5},
    "packed": {"preset": "w4a16", "outlier_fallback": None},
}


def unknown_key_message(owner: str, key: str, known: list[str]) -> str:
    """`"<owner> has no option 'key'"`, with the closest known names when there are any."""
    close = difflib.get_close_matches(key, known, n=2)
    if close:
        return f"{owner} has no option {key!r}; did you mean {' or '.join(map(repr, close))}?"
    return f"{owner} has no option {key!r}" + (f"; options are {', '.join(known)}" if len(known) < 30 else "")


@dataclass(repr=False, kw_only=True, unsafe_hash=True)
class MXFP4RLConfig(QuantizationConfigMixin):
    """How a model is quantized: pass it to `from_pretrained(quantization_config=...)`; it is saved in `config.json`.

    The default is the dense recipe of arXiv 2605.20402: both operands of every linear layer of the decoder in MXFP4
    with the ceiling scale rule, macro-block scaling at 128 (searched for weights, static for activations) and outlier
    fallback at 0.5 on both operands. With ``mode="packed"`` it is frozen weights of 4.3125 bits as the base of
    adapters: weights alone in MXFP4, macro-block scaling at 128, no outlier fallback.

    A checkpoint that already is quantized keeps its own scheme, and transformers warns that the config passed is not
    used. To pack what was trained with ``mode="qat"``, use [`hf_mxfp4.pack`].

    Raises:
        TypeError: an option that does not exist (with the nearest names).
        ValueError: a value outside its supported set.
    """

    quant_method: str = field(default=QUANT_METHOD, init=False)
    format_version: int = field(
        default=FORMAT_VERSION,
        metadata={"help": "Version of this description. Leave it alone; checkpoints of a newer version are refused."},
    )
    mode: str = field(
        default="qat",
        metadata={
            "help": "'qat': full-precision master weights are trained through their quantized values; 'packed': "
            "weights are stored in 4 bits and frozen, and adapters are trained on them."
        },
    )
    preset: str = field(
        default=_Default.BY_MODE,
        metadata={
            "help": "Which operands of a linear layer are MXFP4: 'w4a16' the weight (usual in mode 'packed'), 'w4a4' "
            "weight and activation (usual in mode 'qat'). The backward pass uses the same quantized operands; output "
            "gradients stay in full precision."
        },
    )
    scale_rule: str = field(
        default=ScaleRule.RCEIL.value,
        metadata={"help": "How block scales are chosen: 'rceil' (never clips), 'floor' (OCP), 'even' or 'mse'."},
    )
    macro_block: int | str | None = field(
        default=128,
        metadata={"help": "Elements per macro-block factor: 32, 64, 128, 256 or 'row'; none switches it off."},
    )
    macro_search: str = field(
        default="hybrid",
        metadata={
            "help": "How macro factors are found: 'static' (from the largest magnitude), 'dynamic' (best of 16 by "
            "squared error), 'hybrid' (dynamic for weights, static for activations) or 'blockwise' (two mantissa "
            "bits for each of the four block scales, by squared error)."
        },
    )
    outlier_fallback: float | None = field(
        default=_Default.BY_MODE,
        metadata={
            "help": "Weight in (0, 1] of the quantized residual that is added back; none switches it off. Usual are "
            "0.5 in mode 'qat' and none in mode 'packed', where it doubles the memory of the weights."
        },
    )
    outlier_fallback_operands: str = field(
        default="both",
        metadata={"help": "Operands that get outlier fallback: 'both', 'weights' or 'activations'."},
    )
    outlier_fallback_rate: float | None = field(
        default=None,
        metadata={
            "help": "Share of blocks in (0, 1) that get outlier fallback, those with the largest errors: exactly this "
            "share of every weight, and about this share of activations, by a threshold per layer that follows it "
            "from step to step; none: all blocks."
        },
    )
    weight_block: str = field(
        default="1x32",
        metadata={
            "help": "Rows x columns of a weight that share a block scale: '1x32', or '32x32', which suits the weight "
            "and its transpose alike (bit for bit so without macro_block, or with 32)."
        },
    )
    modules_to_not_convert: list[str] | tuple[str, ...] | None = field(
        default=None,
        metadata={
            "help": "Modules to leave in full precision, besides the head, routers and embeddings, which always are. "
            "Each is one or more whole dotted name parts ('layers.0', 'mlp.down_proj') or "
            "'re:<regex on the full name>'."
        },
    )
    backend: str = field(
        default="auto",
        metadata={
            "help": "Where quantization runs: 'auto' (Triton on GPUs, fused C++ on CPUs, where they apply), "
            "'eager', 'cpu' or 'triton'."
        },
    )

    def __new__(cls, *args: Any, **kwargs: Any):
        known = [f.name for f in fields(cls) if f.init]
        for key in kwargs:
            if key not in known:
                raise TypeError(unknown_key_message(cls.__name__, key, known))
        return super().__new__(cls)

    def __post_init__(self):
        if type(self.format_version) is not int or self.format_version != FORMAT_VERSION:
            newer = type(self.format_version) is int and self.format_version > FORMAT_VERSION
            advice = "; install a newer hf_mxfp4 to load this checkpoint" if newer else ""
            raise ValueError(
                f"format_version={self.format_version!r}: this hf_mxfp4 reads version {FORMAT_VERSION}{advice}"
            )
        one_of("mode", self.mode, MODES)
        for name, value in MODE_DEFAULTS[self.mode].items():
            if getattr(self, name) is _Default.BY_MODE:
                object.__setattr__(self, name, value)
        one_of("preset", self.preset, PRESETS)
        one_of("scale_rule", self.scale_rule, tuple(rule.value for rule in ScaleRule))
        object.__setattr__(self, "scale_rule", ScaleRule(self.scale_rule).value)
        if isinstance(self.macro_block, str) and self.macro_block.isascii() and self.macro_block.isdigit():
            object.__setattr__(self, "macro_block", int(self.macro_block))
        one_of("macro_block", self.macro_block, (None, *MACRO_BLOCKS))
        one_of("macro_search", self.macro_search, MACRO_SEARCHES)
        one_of("outlier_fallback_operands", self.outlier_fallback_operands, OPERANDS)
        one_of("backend", self.backend, BACKENDS)
        check_alpha(self.outlier_fallback)
        check_fallback_rate("outlier_fallback_rate", self.outlier_fallback_rate, self.outlier_fallback)
        one_of("weight_block", self.weight_block, tuple(WEIGHT_BLOCKS))
        self._scheme("weights", "static" if self.macro_search == "hybrid" else self.macro_search)  # checks the pair
        if self.preset == "w4a16" and self.outlier_fallback_operands == "activations":
            raise ValueError(
                "outlier_fallback_operands='activations' has no effect under preset='w4a16', "
                "which quantizes no activations; use 'weights', or preset='w4a4'"
            )
        if self.mode == "packed":
            for name, (reason, _) in self._idle_options().items():
                raise ValueError(
                    f"{name}={getattr(self, name)!r} has no effect in mode='packed' {reason}; leave it out"
                )
        object.__setattr__(self, "modules_to_not_convert", _as_names(self.modules_to_not_convert))
        object.__setattr__(self, "_frozen", True)

    # dataclass(frozen=True) cannot extend the mixin, which is a dataclass and not frozen.
    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("_frozen"):
            raise FrozenInstanceError(f"{type(self).__name__} is frozen; build a new one to change {name!r}")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"{type(self).__name__} is frozen; it keeps {name!r}")

    @property
    def weight_scheme(self) -> QuantScheme:
        """How weights are quantized, along their input dimension."""
        return self._scheme("weights", "dynamic" if self.macro_search == "hybrid" else self.macro_search)

    @property
    def activation_scheme(self) -> QuantScheme | None:
        """How layer inputs are quantized, along their last axis; `None` when they are not."""
        if self.preset == "w4a16":
            return None
        return self._scheme("activations", "static" if self.macro_search == "hybrid" else self.macro_search)

    def _scheme(self, operand: str, macro_search: str) -> QuantScheme:
        fallback = self.outlier_fallback if self.outlier_fallback_operands in ("both", operand) else None
        search = macro_search if self.macro_block is not None else "static"
        return QuantScheme(
            ScaleRule(self.scale_rule),
            self.macro_block,
            search,
            fallback,
            block_rows=WEIGHT_BLOCKS[self.weight_block] if operand == "weights" else 1,
            fallback_rate=None if fallback is None else self.outlier_fallback_rate,
        )

    def _idle_options(self) -> dict[str, tuple[str, Any]]:
        """Options that would do nothing in packed mode: why, and their default."""
        idle: dict[str, tuple[str, Any]] = {}
        if self.outlier_fallback is None and self.outlier_fallback_operands != "both":
            idle["outlier_fallback_operands"] = ("without outlier_fallback, which is off there by default", "both")
        if self.macro_block is None and self.macro_search != "hybrid":
            idle["macro_search"] = ("without macro_block", "hybrid")
        if self.backend == "triton":
            idle["backend"] = ("whose weights no Triton kernel reads", "auto")
        return idle

    def packed(self) -> "MXFP4RLConfig":
        """The same scheme in mode ``"packed"``: what a model of this config becomes by [`hf_mxfp4.pack`]."""
        defaults = {name: default for name, (_, default) in self._idle_options().items()}
        return replace(self, mode="packed", **defaults)

    def describe(self) -> str:
        """One line: preset and what is done to each operand."""
        activation = self.activation_scheme
        return f"{self.preset} [weights {self.weight_scheme}, activations {activation or 'full precision'}]"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any):
        """Build from the dictionary form of `config.json`. Keyword arguments replace entries of the dictionary.

        Raises as the constructor does; also `ValueError` when the dictionary is another method's.
        """
        options = dict(config_dict)
        method = options.pop("quant_method", QUANT_METHOD)
        if method != QUANT_METHOD:
            raise ValueError(f"this is a {method!r} quantization config; MXFP4RLConfig reads {QUANT_METHOD!r} only")
        names = {f.name for f in fields(cls) if f.init}
        unused = {key: value for key, value in kwargs.items() if key not in names} if return_unused_kwargs else {}
        options.update({key: value for key, value in kwargs.items() if key not in unused})
        config = cls(**options)
        return (config, unused) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        """A JSON-clean dictionary that [`from_dict`] reads back to an equal config."""
        options = asdict(self)
        names = options["modules_to_not_convert"]
        options["modules_to_not_convert"] = None if names is None else list(names)
        return options

    def __iter__(self):
        yield from self.to_dict().items()

    def __repr__(self) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in self.to_dict().items() if key != "quant_method")
        return f"{type(self).__name__}({options})"


def _as_names(names: Any) -> tuple[str, ...] | None:
    if names is None:
        return None
    problem = f"modules_to_not_convert={names!r} must be a list of module names"
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ValueError(problem)
    names = tuple(names)
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError(problem)
    for name in names:
        try:
            re.compile(name[3:] if name.startswith("re:") else "")
        except re.error as error:
            raise ValueError(f"modules_to_not_convert has {name!r}, which is no regular expression: {error}") from error
    return names
