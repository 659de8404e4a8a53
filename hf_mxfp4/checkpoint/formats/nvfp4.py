# SPDX-License-Identifier: Apache-2.0
"""NVFP4: compressed-tensors `nvfp4-pack-quantized` (transformers with the compressed-tensors package, vLLM, SGLang),
and the layout of NVIDIA Model-Optimizer (TensorRT-LLM, vLLM, SGLang).

NVFP4 has one E4M3 scale per 16 elements and one float32 scale per tensor, which compressed-tensors stores as a divisor.
A block scale ``2**e * (1 + m/4)`` is an E4M3 number for 16 binades of ``e``. So each scale of a block of 32 is written
twice, the tensor scale is a power of two, and the values stay the same.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ...config import MXFP4RLConfig
from ...numerics import (
    BLOCK_SIZE,
    QuantScheme,
    ScaleRule,
    block_scales,
    decode_e2m1,
    encode_e2m1,
    pack_codes,
    round_nearest,
    unpack_codes,
)
from ...numerics.corrections import BLOCKS_PER_BYTE, pack_mantissas
from ..names import LayerShape
from .base import Format, Names, Packed, Read, expect
from .compressed_tensors import CompressedTensorsFormat, has_experts


FORMAT = "nvfp4-pack-quantized"
#: Elements that share one E4M3 scale.
GROUP = 16
_SCALE_DTYPES = {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
#: The largest block scale of a tensor goes into the top binade of E4M3, 256 to 448.
_TOP_EXPONENT = 8
#: Exponents of the tensor scale whose reciprocal is a normal float32 number as well.
_EXPONENTS = -126, 126
#: The positive E4M3 numbers below 2**-3. A block scale that is no E4M3 number is below 2**-7, its values below 2**-4.
_SMALL_SCALES = torch.arange(1, 32, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
#: `quant_algo` of Model-Optimizer, by whether inputs are quantized.
_ALGORITHMS = {True: "NVFP4", False: "W4A16_NVFP4"}
_PRODUCER = {"name": "modelopt", "version": "0.35.0"}  # whose layout it is; engines look at both


class NVFP4Format(CompressedTensorsFormat):
    """NVFP4 in the layout of compressed-tensors."""

    name = "nvfp4"
    format = FORMAT
    elements = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": GROUP, "symmetric": True}
    inputs = "local"
    activations = Format.activations
    quantizes_activations = True
    quantized_activations = (
        "the exported model quantizes them as NVFP4, with the tensor scale 1, which cuts magnitudes above "
        "2688. If inputs of layers are larger, run hf-mxfp4 smooth first"
    )
    holds = {"macro_block": 128, "macro_search": "block_mantissas"}
    has_tensor_scale = True
    #: What files call the tensor scales of weights and of inputs.
    tensor_scales = "weight_global_scale", "input_global_scale"

    def quantization_config(self, config: MXFP4RLConfig, ignored: Names, quantized: Names = ()) -> dict[str, Any]:
        options = super().quantization_config(config, ignored, quantized)
        group = options["config_groups"]["group_0"]
        elements = {**self.elements, **_SCALE_DTYPES}
        group["weights"] = {**elements, "dynamic": False}
        if self.quantizes_inputs:
            group["input_activations"] = {**elements, "dynamic": self.inputs, "observer": "static_minmax"}
        return options

    def notes(self, config: MXFP4RLConfig, ignored: Names, quantized: Names = ()) -> list[str]:
        notes = super().notes(config, ignored, quantized)
        if has_experts(quantized):
            notes.append(
                "transformers 5.24 ignores the tensor scales of experts in checkpoints of this format, and computes "
                "with wrong weights. vLLM and compressed-tensors itself apply them; format compressed-tensors loads."
            )
        return notes

    def misfits(self, scheme: QuantScheme) -> list[str]:
        has_mantissas = scheme.macro_block is not None and scheme.macro_search.startswith("block_mantissas")
        return super().misfits(scheme)[has_mantissas:]

    def top_exponent(self, packed: Packed) -> int:
        """Return the largest exponent of the block scales of a matrix; -127 if all its blocks are zero or NaN."""
        scale = packed["weight_scale"]
        counts = (scale != 255) & _has_values(packed["weight"])
        return int(scale.masked_fill(~counts, 0).max()) - 127

    def encode(self, packed: Packed, top: int) -> dict[str, torch.Tensor]:
        """Return a matrix in NVFP4: ``weight`` uint8 ``[N, K/2]``, ``weight_scale`` E4M3 ``[N, K/16]`` and
        ``weight_global_scale`` float32 ``[1]``, the divisor.

        Where no E4M3 number is the scale of a block, each half of it gets the scale of least squared error, and its
        codes are rounded again. A block without values has scale 1.

        Args:
            packed: ``weight`` and ``weight_scale`` as in our own files, and block mantissas in ``weight_macro``.
            top: the largest [`top_exponent`] of the matrices that share a tensor scale.
        """
        exponent = min(max(top - _TOP_EXPONENT, _EXPONENTS[0]), _EXPONENTS[1])
        scale = block_scales(packed["weight_scale"], packed.get("weight_macro"), torch.float64)
        scale = (scale * 2.0**-exponent).masked_fill_(~_has_values(packed["weight"]) & ~scale.isnan(), 1.0)
        stored, codes = scale.float().to(torch.float8_e4m3fn), packed["weight"]
        scales = stored.repeat_interleave(BLOCK_SIZE // GROUP, dim=1)
        inexact = (stored.double() != scale) & ~scale.isnan()
        if inexact.any():
            codes, blocks = codes.clone().unflatten(1, (-1, BLOCK_SIZE // 2)), scales.unflatten(1, (-1, 2))
            elements = decode_e2m1(unpack_codes(codes[inexact], BLOCK_SIZE))
            values = (elements * scale[inexact].unsqueeze(1)).float().unflatten(1, (-1, GROUP))
            codes[inexact], blocks.view(torch.uint8)[inexact] = _best_halves(values)
            codes, scales = codes.flatten(1), blocks.flatten(1)
        return {"weight": codes, "weight_scale": scales, "weight_global_scale": torch.tensor([2.0**-exponent])}

    def values(self, stored: Packed) -> torch.Tensor:
        """Return the float32 values ``[N, K]`` of what [`encode`] or [`read`] returned."""
        codes, scales = stored["weight"], stored["weight_scale"].float() / stored.get("weight_global_scale", 1)
        return decode_e2m1(unpack_codes(codes, 2 * codes.shape[1])) * scales.repeat_interleave(GROUP, dim=1)

    def tensors(self, layer: str, shape: LayerShape, packed: Packed) -> dict[str, torch.Tensor]:
        packed = dict(packed)
        divisor = packed.pop("weight_global_scale")
        tensors = super().tensors(layer, shape, packed)
        divisors = self.tensor_scale(divisor), self.tensor_scale(torch.ones_like(divisor))
        for owner in [name.removesuffix("weight_scale") for name in tensors if name.endswith(".weight_scale")]:
            for name, scale in zip(self.tensor_scales, divisors[: 1 + self.quantizes_inputs], strict=False):
                tensors[f"{owner}{name}"] = scale.clone()
        return tensors

    def tensor_scale(self, divisor: torch.Tensor) -> torch.Tensor:
        """Return a tensor scale as it is stored, from the divisor, or the divisor from that."""
        return divisor.reshape(-1)[:1]

    def read(self, layer: str, shape: LayerShape, expert: int | None, read: Read) -> dict[str, torch.Tensor]:
        """Return ``weight`` uint8 ``[N, K/2]`` and ``weight_scale``, float32 ``[N, K/16]``: scales over divisor."""

        def scaled(name: str) -> torch.Tensor:
            tensor = read(name)
            if not name.endswith(".weight_scale"):
                return tensor
            return tensor.float() / self.tensor_scale(read(name.removesuffix("weight_scale") + self.tensor_scales[0]))

        return super().read(layer, shape, expert, scaled)

    def decode(self, stored: Packed) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return what [`read`] returned as in our own files, with block mantissas in ``weight_macro``, and which blocks
        ``[N, K/32]`` keep their values so: those whose scales are one ``2**e * (1 + m/4)``, or that are zero."""
        codes, scales = stored["weight"].unflatten(1, (-1, 2, GROUP // 2)), stored["weight_scale"].unflatten(1, (-1, 2))
        codes = codes.masked_fill((scales == 0).unsqueeze(-1), 0)
        has_values = ((codes & 0x77) != 0).any(dim=-1) | scales.isnan()
        # A half without values takes the other's scale.
        first, second = (torch.where(has_values[..., i], scales[..., i], scales[..., 1 - i]) for i in range(2))
        bits, is_nan = first.view(torch.int32), first.isnan() & second.isnan()
        byte, is_empty = bits >> 23, ~has_values.any(dim=-1)
        exact = (first == second) & (bits & 0x1FFFFF == 0) & (byte > 0) & (byte < 255) | is_nan | is_empty
        byte = byte.masked_fill(is_nan, 255).masked_fill(is_empty, 0).to(torch.uint8)
        mantissas = (bits >> 21 & 3).masked_fill(is_nan | is_empty, 0)
        macro = pack_mantissas(torch.nn.functional.pad(mantissas, (0, -mantissas.shape[1] % BLOCKS_PER_BYTE)))
        packed = {"weight": codes.flatten(1), "weight_scale": byte, "weight_macro": macro.to(torch.uint8)}
        return packed, exact

    def read_config(self, options: Mapping[str, Any]) -> tuple[MXFP4RLConfig, list[str]]:
        config, _ = super().read_config(options)
        notes = [
            "The scales are taken as they are; when adapters are merged, weights are quantized with block mantissas."
        ]
        if config.activation_scheme is None:
            return config, notes
        notes.append("The checkpoint quantizes inputs as NVFP4; here they are in full precision (W4A16).")
        return MXFP4RLConfig(mode="packed", preset="w4a16", scale_rule="even", **self.holds), notes

    def specs(self, layer: str, shape: LayerShape) -> dict[str, torch.Tensor]:
        packed = shape.meta_packed(QuantScheme(ScaleRule.EVEN))
        halves = packed["weight_scale"].repeat_interleave(BLOCK_SIZE // GROUP, dim=-1)
        packed["weight_scale"] = halves.to(torch.float8_e4m3fn)
        leading = halves.shape[:-2]
        return self.tensors(layer, shape, {**packed, "weight_global_scale": torch.empty(*leading, 1, device="meta")})


class ModelOptFormat(NVFP4Format):
    """The same values under other names, with factors in place of divisors: the layout of NVIDIA Model-Optimizer
    (`quant_method: modelopt`). Options have the fields of NVIDIA's published checkpoints, in `config.json` and, for
    TensorRT-LLM, in `hf_quant_config.json`. Experts of gpt-oss are one tensor for each projection, laid out as the
    model has them: ``[E, K/2, N]`` with scales ``[E, K/16, N]``, which are called `<projection>_weight_scale`."""

    name = "nvfp4-modelopt"
    serve = "trtllm-serve {folder}"
    quant_method = "modelopt"
    names = {"weight": "weight", "weight_scale": "weight_scale"}
    tensor_scales = "weight_scale_2", "input_scale"
    holds_fused = True

    def tensors(self, layer: str, shape: LayerShape, packed: Packed) -> dict[str, torch.Tensor]:
        tensors = super().tensors(layer, replace(shape, experts=None) if shape.is_fused else shape, packed)
        if not shape.is_fused:
            return tensors
        fused = {name.replace(f"{layer}.", f"{layer}_"): tensor for name, tensor in tensors.items()}
        fused[layer] = fused.pop(f"{layer}_weight")
        return {name: tensor.mT.contiguous() if tensor.dim() == 3 else tensor for name, tensor in fused.items()}

    def read(self, layer: str, shape: LayerShape, expert: int | None, read: Read) -> dict[str, torch.Tensor]:
        if not shape.is_fused:
            return super().read(layer, shape, expert, read)
        codes, scales = (read(name, expert).mT.contiguous() for name in (layer, f"{layer}_weight_scale"))
        divisor = self.tensor_scale(read(f"{layer}_weight_scale_2"))
        return {"weight": codes, "weight_scale": scales.float() / divisor}

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
        unread = "transformers does not read this layout (nvfp4 is for it), nor vLLM 0.32 gpt-oss in it (vllm#46641)."
        return [*super().notes(config, ignored), unread]

    def read_config(self, options: Mapping[str, Any]) -> tuple[MXFP4RLConfig, list[str]]:
        expected = {"quant_algo": tuple(_ALGORITHMS.values()), "kv_cache_scheme": None}
        expect("quantization_config", options, expected)
        inputs = {**self.elements, "dynamic": self.inputs} if options["quant_algo"] == _ALGORITHMS[True] else None
        group = {"weights": self.elements, "input_activations": inputs, "format": self.format}
        return super().read_config({"config_groups": {"group_0": group}})


def _has_values(codes: torch.Tensor) -> torch.Tensor:
    """Return which blocks of packed codes ``[N, K/2]`` have a code that is not zero: bool ``[N, K/32]``."""
    return ((codes & 0x77) != 0).unflatten(1, (-1, BLOCK_SIZE // 2)).any(dim=-1)


def _best_halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the packed codes ``[B, 16]`` and E4M3 bytes ``[B, 2]`` of least squared error for ``values [B, 2, 16]``
    below 2**-4; the smaller scale wins a tie."""
    least = torch.full(values.shape[:2], torch.inf, dtype=torch.float64)
    codes, scales = torch.zeros_like(values, dtype=torch.uint8), torch.zeros_like(least, dtype=torch.uint8)
    for byte, scale in enumerate(_SMALL_SCALES.tolist(), start=1):
        rounded = round_nearest(values / scale)
        error = (rounded * scale - values).double().square().sum(dim=-1)
        better = error < least
        least = torch.where(better, error, least)
        codes[better], scales[better] = encode_e2m1(rounded[better]), byte
    return pack_codes(codes.flatten(1)), scales
