# SPDX-License-Identifier: Apache-2.0
"""AMD Quark: vLLM, SGLang (W4A16, or W4A4 where there are kernels for it).

The `quantization_config` has the fields of AMD's published MXFP4 checkpoints. Activations are quantized as they come,
in plain MXFP4.
"""

from collections.abc import Mapping
from typing import Any

from ...config import MXFP4RLConfig
from ...numerics import QuantScheme, ScaleRule
from ..folder import CheckpointError
from .base import Names, RenamedFormat, expect


_TENSOR = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
_TENSOR_DETAILS = {
    "ch_axis": -1,
    "symmetric": None,
    "round_method": "half_even",
    "scale_type": "float",
    "mx_element_dtype": None,
    "observer_cls": "PerBlockMXObserver",
    "is_scale_quant": False,
}
#: Rules of ours that Quark has a `scale_calculation_mode` for.
_MODES = {ScaleRule.EVEN: "even", ScaleRule.FLOOR: "floor"}


class QuarkFormat(RenamedFormat):
    """MXFP4 in the layout of AMD Quark."""

    name = quant_method = "quark"
    quantizes_activations = True
    quantized_activations = "the exported model quantizes them as plain MXFP4"
    names = {"weight": "weight", "weight_scale": "weight_scale"}

    def quantization_config(self, config: MXFP4RLConfig, ignored: Names, quantized: Names = ()) -> dict[str, Any]:
        tensor = {**_TENSOR, **_TENSOR_DETAILS, "scale_calculation_mode": _mode(config)}
        activations = None
        if self.quantizes_inputs:
            activations = {**tensor, "is_dynamic": True}
        return {
            "quant_method": self.quant_method,
            "quant_mode": "eager_mode",
            "algo_config": None,
            "exclude": list(ignored),
            "global_quant_config": {
                "weight": {**tensor, "is_dynamic": False},
                "input_tensors": activations,
                "output_tensors": None,
                "bias": None,
                "target_device": None,
            },
            "layer_quant_config": {},
            "layer_type_quant_config": {},
            "kv_cache_quant_config": {},
            "export": {
                "kv_cache_group": [],
                "min_kv_scale": 0.0,
                "pack_method": "reorder",
                "weight_format": "real_quantized",
                "weight_merge_groups": None,
            },
        }

    def notes(self, config: MXFP4RLConfig, ignored: Names, quantized: Names = ()) -> list[str]:
        keeps_activations = config.activation_scheme == QuantScheme(ScaleRule(_mode(config)))
        if self.quantizes_inputs and keeps_activations:
            return []
        return super().notes(config, ignored, quantized)

    def read_config(self, options: Mapping[str, Any]) -> tuple[MXFP4RLConfig, list[str]]:
        where = "quantization_config"
        expect(f"{where}.export", options.get("export"), {"weight_format": (None, "real_quantized")})
        for key in ("layer_quant_config", "layer_type_quant_config", "kv_cache_quant_config"):
            if options.get(key):
                raise CheckpointError(f"{where} has a {key}; only one scheme for all layers can be imported")
        if "rotation" in str(options.get("algo_config")).lower():
            raise CheckpointError(f"{where} has a rotation in algo_config, which this package has no equal of")
        scheme = options.get("global_quant_config")
        expect(f"{where}.global_quant_config", scheme, {"output_tensors": None, "bias": None})
        weight = scheme.get("weight")
        activations = scheme.get("input_tensors")
        expect(f"{where}.global_quant_config.weight", weight, {**_TENSOR, "is_dynamic": (False, None)})
        preset = "w4a16"
        rule = weight.get("scale_calculation_mode")
        if activations is not None:
            modes = (None, *_MODES.values())
            inputs = f"{where}.global_quant_config.input_tensors"
            expect(inputs, activations, {**_TENSOR, "is_dynamic": True, "scale_calculation_mode": modes})
            preset = "w4a4"
            rule = activations.get("scale_calculation_mode")
        if rule not in _MODES.values():
            rule = "even"
        return MXFP4RLConfig(mode="packed", preset=preset, scale_rule=rule, macro_block=None), []


def _mode(config: MXFP4RLConfig) -> str:
    """Return the name that Quark has for the scale rule of a config, or for the nearest one."""
    return _MODES.get(ScaleRule(config.scale_rule), "even")
