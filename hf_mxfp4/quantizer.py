# SPDX-License-Identifier: Apache-2.0
"""`MXFP4RLQuantizer`: how transformers applies an [`MXFP4RLConfig`] to a model it loads, saves or trains."""

import math
from collections import Counter
from dataclasses import dataclass

from torch import nn
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer

from ._logging import get_logger
from .checkpoint import forward_state_dict, take_state_dict
from .config import QUANT_METHOD, MXFP4RLConfig
from .layers import MXFP4Linear
from .module_names import fused_experts, split_linears
from .ops import fake_quantize


#: Rows of a large weight that the load-time SQNR looks at.
_SQNR_ROWS = 256


@dataclass(frozen=True)
class QuantizationReport:
    """What was quantized when a model was loaded; `model.quantization_report`.

    Attributes:
        scheme: one line, see [`MXFP4RLConfig.describe`].
        quantized, skipped: names of the linear layers in MXFP4 and of those left in full precision.
        sqnr_db: signal to quantization noise ratio of the weights, energies summed over layers (at most 256 evenly
            spaced rows of each), in decibels; `None` when the weights are not materialised.
    """

    scheme: str
    quantized: tuple[str, ...]
    skipped: tuple[str, ...]
    sqnr_db: float | None

    @property
    def n_quantized(self) -> int:
        return len(self.quantized)

    @property
    def n_skipped(self) -> int:
        return len(self.skipped)

    def __str__(self) -> str:
        sqnr = "not measured" if self.sqnr_db is None else f"{self.sqnr_db:.2f} dB"
        left = f" ({', '.join(self.skipped)})" if 0 < self.n_skipped <= 4 else ""
        return f"n_quantized={self.n_quantized} n_skipped={self.n_skipped}{left} weight SQNR={sqnr} | {self.scheme}"


class MXFP4RLQuantizer(HfQuantizer):
    """Swaps the linear layers of a decoder for [`MXFP4Linear`] as the model is loaded.

    Master weights keep their names and dtypes, so any checkpoint of the architecture loads, sharded or not, and what
    `save_pretrained` writes is that checkpoint again plus the scheme in `config.json`.
    """

    requires_calibration = False

    def __init__(self, quantization_config: MXFP4RLConfig, **kwargs):
        super().__init__(quantization_config, **kwargs)
        self._swapped: tuple[list[str], list[str]] = ([], [])

    def _process_model_before_weight_loading(self, model, **kwargs):
        self._swapped = quantize_linears(model, self.quantization_config)
        return model

    def _process_model_after_weight_loading(self, model, **kwargs):
        quantized, skipped = self._swapped
        model.quantization_report = QuantizationReport(
            scheme=self.quantization_config.describe(),
            quantized=tuple(quantized),
            skipped=tuple(skipped),
            sqnr_db=_weight_sqnr(model),
        )
        get_logger().info("%s: %s", type(model).__name__, model.quantization_report)
        forward_state_dict(model)
        return model

    def dequantize(self, model, dtype=None):
        """A plain model: every quantized layer becomes an `nn.Linear` that holds the quantized values.

        With a ``dtype`` all floating-point parameters are converted to it; without one, none is (transformers would
        fall back to the dtype that the model was loaded in, which may no longer be its own).
        """
        model = self._dequantize(model, dtype)
        self.remove_quantization_config(model)
        return model

    def _dequantize(self, model, dtype=None):
        layers = {n: m for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, MXFP4Linear)}
        if not layers:
            raise ValueError("nothing to dequantize: the model has no MXFP4Linear layer")
        plain = {id(layer): layer.to_linear(dtype) for layer in layers.values()}
        for name, layer in layers.items():
            model.set_submodule(name, plain[id(layer)])
        if dtype is not None:
            # Not model.to(dtype): that would convert buffers such as the rotary frequencies too.
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(dtype)
        model.__dict__.pop("quantization_report", None)
        return model

    def get_state_dict_and_metadata(self, model):
        return take_state_dict(model), {}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        return True


def quantize_linears(model: nn.Module, config: MXFP4RLConfig) -> tuple[list[str], list[str]]:
    """Swap the linear layers of ``model`` in place; the names of the quantized and of the skipped ones.

    Raises `ValueError` when nothing matched, or when the model keeps its experts outside of linear layers.
    """
    extra_skips = config.modules_to_not_convert or ()
    linears, skipped = split_linears(model, extra_skips)
    experts = fused_experts(model, extra_skips)
    if experts:
        raise ValueError(
            f"{type(model).__name__} keeps experts in fused 3-D weights ({experts[0]} and {len(experts) - 1} more), "
            "which mode='qat' does not quantize; to train with full-precision experts on purpose, add 'experts' to "
            "modules_to_not_convert"
        )
    if not linears:
        kinds = Counter(
            type(m).__name__ for m in model.modules() if next(m.parameters(recurse=False), None) is not None
        )
        raise ValueError(
            f"MXFP4RLConfig matches no layer of {type(model).__name__}: it has {len(skipped)} nn.Linear, all skipped "
            f"(modules_to_not_convert={list(extra_skips)}), and {dict(kinds.most_common(5))}"
        )
    layers: dict[int, MXFP4Linear] = {}
    for name, linear in linears.items():
        if id(linear) not in layers:
            layers[id(linear)] = MXFP4Linear.from_linear(linear, config, name)
        model.set_submodule(name, layers[id(linear)])
    return [layer.name for layer in layers.values()], skipped


def _weight_sqnr(model: nn.Module) -> float | None:
    signal = noise = 0.0
    for module in model.modules():
        if not isinstance(module, MXFP4Linear):
            continue
        weight = module.weight.detach()
        if weight.is_meta:
            return None
        rows = weight[:: -(-weight.shape[0] // _SQNR_ROWS)]
        error = fake_quantize(rows, module.config.weight_scheme, module.config.backend).float() - rows.float()
        signal += rows.float().square().sum().item()
        noise += error.square().sum().item()
    if noise == 0:
        return math.inf if signal else None
    return 10.0 * math.log10(signal / noise) if signal else None


# A reloaded module registers again; transformers refuses duplicates.
AUTO_QUANTIZATION_CONFIG_MAPPING.pop(QUANT_METHOD, None)
AUTO_QUANTIZER_MAPPING.pop(QUANT_METHOD, None)
register_quantization_config(QUANT_METHOD)(MXFP4RLConfig)
register_quantizer(QUANT_METHOD)(MXFP4RLQuantizer)
