# SPDX-License-Identifier: Apache-2.0
"""compressed-tensors `mxfp4-pack-quantized`: transformers with the compressed-tensors package, vLLM, SGLang.

compressed-tensors dequantizes to bfloat16. Its own activation quantization is plain MXFP4 by the rule `even`. vLLM
(0.32) quantizes the inputs of layers wherever it has kernels for it, whatever the config says, and else computes W4A16.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ...config import MXFP4RLConfig
from ...numerics import QuantScheme
from ..folder import CheckpointError
from .base import Names, RenamedFormat, expect


FORMAT = "mxfp4-pack-quantized"
_ELEMENTS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
#: transformers (5.24) drops full-precision experts as it loads them, unless a group of 8-bit floats names experts; then
#: it takes them as they are. This one applies to no layer, as all experts are in `ignore`.
_EXPERTS_GROUP = {
    "targets": [r"re:.*\.experts\.\d+\.\w+$"],
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
    "input_activations": None,
    "output_activations": None,
    "format": "float-quantized",
}


class CompressedTensorsFormat(RenamedFormat):
    """MXFP4 in the layout of compressed-tensors."""

    name = quant_method = "compressed-tensors"
    #: As `config.json` calls it.
    format: ClassVar[str] = FORMAT
    elements: ClassVar[Mapping[str, Any]] = _ELEMENTS
    #: `dynamic` of quantized inputs.
    inputs: ClassVar[bool | str] = True
    names = {"weight": "weight_packed", "weight_scale": "weight_scale"}
    activations = "the exported model says that they are not (W4A16), though vLLM quantizes them where its GPU can"

    def quantization_config(self, config: MXFP4RLConfig, ignored: Names, quantized: Names = ()) -> dict[str, Any]:
        weights = {**_ELEMENTS, "dynamic": False, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        groups = {"group_0": {**group, "format": self.format}}
        if has_experts(ignored) and not has_experts(quantized):
            groups["group_1"] = _EXPERTS_GROUP
        return {
            "quant_method": self.quant_method,
            "format": self.format,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": list(ignored),
        }

    def notes(self, config: MXFP4RLConfig, ignored: Names, quantized: Names = ()) -> list[str]:
        notes = super().notes(config, ignored, quantized)
        if isinstance(config.activation_scheme, QuantScheme):
            notes[0] += " Format quark keeps W4A4, in plain MXFP4."
        if has_experts(ignored) and has_experts(quantized):
            notes.append(
                "Some weights of experts are 4-bit and others are not: transformers 5.24 fails to load such a "
                "checkpoint of this format. Format bf16 loads."
            )
        return notes

    def read_config(self, options: Mapping[str, Any]) -> tuple[MXFP4RLConfig, list[str]]:
        where = "quantization_config"
        groups = options.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise CheckpointError(f"{where} has no config_groups")
        groups = {name: group for name, group in groups.items() if group != _EXPERTS_GROUP}
        for name, group in groups.items():
            if not isinstance(group, Mapping):
                raise CheckpointError(f"{where}.config_groups.{name} is {group!r}; only a full scheme can be imported")
            stored = group.get("format") or options.get("format")
            if stored != self.format:
                raise CheckpointError(f"{where} has the format {stored!r}; only {self.format!r} can be imported")
        expect(where, options, {"kv_cache_scheme": None, "quantization_status": (None, "compressed", "frozen")})
        for key in ("transform_config", "sparsity_config", "moe_sparsity_config"):
            if options.get(key) and options[key] != {"format": "dense"}:
                raise CheckpointError(f"{where} has a {key}, which this package has no equal of")
        presets = {self._preset(f"{where}.config_groups.{name}", group) for name, group in groups.items()}
        if len(presets) > 1:
            raise CheckpointError(f"{where} quantizes the activations of some groups only; a config here is for all")
        config = MXFP4RLConfig(mode="packed", preset=presets.pop(), scale_rule="even", **self.holds)
        return config, ["The scales are taken as they are; scale_rule='even' is compressed-tensors' own rule."]

    def _preset(self, where: str, group: Mapping[str, Any]) -> str:
        """Return the preset that a group of `config_groups` stands for. Raises [`CheckpointError`]."""
        expect(f"{where}.weights", group.get("weights"), {**self.elements, "dynamic": (False, None), "actorder": None})
        expect(where, group, {"output_activations": None})
        if group.get("input_activations") is None:
            return "w4a16"
        expect(f"{where}.input_activations", group["input_activations"], {**self.elements, "dynamic": self.inputs})
        return "w4a4"


def has_experts(names: Sequence[str]) -> bool:
    """Return whether some names are those of experts or their weights."""
    return any(".experts." in f"{name}." for name in names)
