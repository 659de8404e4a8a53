# SPDX-License-Identifier: Apache-2.0
"""NVFP4 in the layout of NVIDIA Model-Optimizer (`quant_method: modelopt`): TensorRT-LLM, vLLM, SGLang.

The values of [`NVFP4Format`] under other names, with factors in place of divisors. Options have the fields of NVIDIA's
published checkpoints, in `config.json` and, for TensorRT-LLM, in `hf_quant_config.json`.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ...config import MXFP4RLConfig
from .base import Names, expect
from .nvfp4 import GROUP, NVFP4Format


#: `quant_algo`, by whether inputs are quantized.
_ALGORITHMS = {True: "NVFP4", False: "W4A16_NVFP4"}
_PRODUCER = {"name": "modelopt", "version": "0.35.0"}  # whose layout it is; engines look at both


class ModelOptFormat(NVFP4Format):
    """NVFP4 in the layout of NVIDIA's Model-Optimizer."""

    name = "nvfp4-modelopt"
    quant_method = "modelopt"
    names = {"weight": "weight", "weight_scale": "weight_scale"}
    tensor_scales = "weight_scale_2", "input_scale"

    def tensor_scale(self, divisor: torch.Tensor) -> torch.Tensor:
        return 1 / divisor.reshape(-1)[0]

    def quantization_config(self, config: MXFP4RLConfig, ignored: Names, quantized: Names = ()) -> dict[str, Any]:
        elements = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": GROUP}
        inputs = elements if self.quantizes_inputs else None
        return {
            "quant_method": self.quant_method,
            "quant_algo": _ALGORITHMS[self.quantizes_inputs],
            "config_groups": {"group_0": {"input_activations": inputs, "weights": elements, "targets": ["Linear"]}},
            "ignore": list(ignored),
            "producer": _PRODUCER,
        }

    def more_files(self, options: Mapping[str, Any]) -> dict[str, Any]:
        quantization = {"quant_algo": options["quant_algo"], "kv_cache_quant_algo": None, "group_size": GROUP}
        quantization["exclude_modules"] = options["ignore"]
        return {"hf_quant_config.json": {"producer": _PRODUCER, "quantization": quantization}}

    def notes(self, config: MXFP4RLConfig, ignored: Names, quantized: Names = ()) -> list[str]:
        return [*super().notes(config, ignored), "transformers does not read this layout; format nvfp4 is for it."]

    def read_config(self, options: Mapping[str, Any]) -> tuple[MXFP4RLConfig, list[str]]:
        expected = {"quant_algo": tuple(_ALGORITHMS.values()), "kv_cache_scheme": None}
        expect("quantization_config", options, expected)
        inputs = {**self.elements, "dynamic": self.inputs} if options["quant_algo"] == _ALGORITHMS[True] else None
        group = {"weights": self.elements, "input_activations": inputs, "format": self.format}
        return super().read_config({"config_groups": {"group_0": group}})
