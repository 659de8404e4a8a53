# SPDX-License-Identifier: Apache-2.0
"""The arms of the study: which operands of which products are quantized, and by what.

The named ones follow arXiv 2605.09825: the forward product alone, then the gradient of the input, then that of the
weight (progressively), and all three with each stabiliser. Products that are not quantized run on full-precision
operands, the master weight and the layer's input, and not on the values of the forward product.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig
from hf_mxfp4.numerics import FP8, GEMM_OPERANDS, QuantScheme
from hf_mxfp4.utils import unknown_key_message


BASELINE = "baseline"

_FULL_DGRAD = {"grad": "full", "weight": "full"}
_FULL_WGRAD = {"grad": "full", "x": "full"}
_UNROTATED = {"rotation": "none"}
#: Options on top of `paper_b`; "{rule}" stands for the study's scale rule.
_NAMED: dict[str, dict[str, Any]] = {
    "fprop": {"dgrad": _FULL_DGRAD, "wgrad": _FULL_WGRAD},
    "fprop_dgrad": {"wgrad": _FULL_WGRAD},
    "all": {"wgrad": _UNROTATED},
    "all_sr": {"dgrad": {"grad": "{rule}+stochastic"}, "wgrad": {"grad": "{rule}+stochastic", **_UNROTATED}},
    "all_random16": {"wgrad": {"rotation": "random-16"}},
    "all_deterministic16": {"wgrad": {"rotation": "deterministic-16"}},
    "all_deterministic32": {"wgrad": {"rotation": "deterministic-32"}},
}
NAMED_ARMS = (BASELINE, *_NAMED)


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        name: in the results.
        config: the scheme; `None` for the baseline.
    """

    name: str
    config: MXFP4RLConfig | None

    def seeded(self, seed: int) -> MXFP4RLConfig | None:
        """Return the scheme of a run with this seed, which random rounding and signs follow."""
        if self.config is None or not self.config.gemms().is_random:
            return self.config
        return replace(self.config, stochastic_seed=seed)


def choose_arms(names: Sequence[str], extra: Mapping[str, Mapping[str, Any]] | None, scale_rule: str) -> list[Arm]:
    """Return the arms of a study, the baseline first.

    Args:
        names: of arms, out of `NAMED_ARMS` and ``extra``.
        extra: further arms, each a mapping of options of `MXFP4RLConfig`.
        scale_rule: of the named arms.

    Raises `ValueError` for an unknown or repeated name, a study without baseline, or options that `MXFP4RLConfig`
    refuses.
    """
    extra = {} if extra is None else extra
    if not isinstance(extra, Mapping) or not all(isinstance(options, Mapping) for options in extra.values()):
        raise ValueError(f"extra_arms={extra!r} must map names to options of MXFP4RLConfig")
    if same := [name for name in extra if name in NAMED_ARMS]:
        raise ValueError(f"extra_arms has {', '.join(same)}, the name of a built-in arm; give it another")
    known = [*NAMED_ARMS, *extra]
    if "all_oscireset" in names:
        raise ValueError(
            "the arm all_oscireset was removed: resets made no difference (docs/backward.md); leave it out"
        )
    for name in names:
        if name not in known:
            raise ValueError(unknown_key_message("arms", str(name), known))
    if BASELINE not in names or len(set(names)) != len(names):
        raise ValueError(f"arms={list(names)} must be distinct, with {BASELINE!r}, which the others are compared with")
    return [_arm(name, extra.get(name), scale_rule) for name in sorted(names, key=lambda name: name != BASELINE)]


def _arm(name: str, options: Mapping[str, Any] | None, scale_rule: str) -> Arm:
    if name == BASELINE:
        return Arm(name, None)
    if options is None:
        options = {"preset": "paper_b", "scale_rule": scale_rule}
        for key, value in _NAMED[name].items():
            if isinstance(value, dict):
                value = {operand: text.replace("{rule}", scale_rule) for operand, text in value.items()}
            options[key] = value
    try:
        return Arm(name, MXFP4RLConfig(**options))
    except (TypeError, ValueError) as error:
        raise ValueError(f"arm {name}: {error}") from None


def quantized_operands(model: nn.Module) -> dict[str, int]:
    """Count in how many layers each operand (``"fprop.x"``, ... ``"wgrad.x"``) is quantized for its product."""
    counts = {f"{gemm}.{operand}": 0 for gemm, operands in GEMM_OPERANDS.items() for operand in operands}
    for module in model.modules():
        if isinstance(module, MXFP4Linear):
            for gemm, names in GEMM_OPERANDS.items():
                product = getattr(module.gemms, gemm)
                for name, scheme in zip(names, (product.left, product.right), strict=True):
                    counts[f"{gemm}.{name}"] += isinstance(scheme, QuantScheme) or scheme is FP8
    return counts
