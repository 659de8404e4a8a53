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
from ...numerics.formats import E8M0_NAN
from ...numerics.nvfp4 import NVFP4_GROUP
from ..names import LayerShape
from .base import Format, Names, Packed, Read, TensorScaleFormat, expect
from .compressed_tensors import CompressedTensorsFormat, has_experts


FORMAT = "nvfp4-pack-quantized"
_SCALE_DTYPES = {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
#: The largest block scale of a tensor goes into the top binade of E4M3, 256 to 448.
_TOP_EXPONENT = 8
#: The largest magnitude of an exponent of the tensor scale: its reciprocal is a normal float32 number as well.
_LARGEST_EXPONENT = 126
#: The positive E4M3 numbers below 2**-3. A block scale that is no E4M3 number is below 2**-7, its values below 2**-4.
_SMALL_SCALES = torch.arange(1, 32, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
#: `quant_algo` of Model-Optimizer, by whether inputs are quantized.
_ALGORITHMS = {True: "NVFP4", False: "W4A16_NVFP4"}
_PRODUCER = {"name": "modelopt", "version": "0.35.0"}  # whose layout it is; engines look at both


class NVFP4Format(CompressedTensorsFormat, TensorScaleFormat):
    """NVFP4 in the layout of compressed-tensors."""

    name = "nvfp4"
    format = FORMAT
    elements = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": NVFP4_GROUP,
        "symmetric": True,
    }
    inputs = "local"
    activations = Format.activations
    quantizes_activations = True
    quantized_activations = (
        "the exported model quantizes them as NVFP4, with the tensor scale 1, which cuts magnitudes above "
        "2688. If inputs of layers are larger, run hf-mxfp4 smooth first"
    )
    holds = {"macro_block": 128, "macro_search": "block_mantissas"}
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
        misfits = super().misfits(scheme)
        if scheme.macro_block is not None and scheme.macro_search.startswith("block_mantissas"):
            return misfits[1:]  # without the macro factors, which come first: block scales hold mantissas
        return misfits

    def top_exponent(self, packed: Packed) -> int:
        """Return the largest exponent of the block scales of a matrix; -127 if all its blocks are zero or NaN."""
        scale = packed["weight_scale"]
        is_used = (scale != E8M0_NAN) & _has_values(packed["weight"])
        return int(scale.where(is_used, 0).max()) - 127

    def encode(self, packed: Packed, top: int) -> dict[str, torch.Tensor]:
        """Return a matrix in NVFP4: ``weight`` uint8 ``[N, K/2]``, ``weight_scale`` E4M3 ``[N, K/16]`` and
        ``weight_global_scale`` float32 ``[1]``, the divisor.

        Where no E4M3 number is the scale of a block, each half of it gets the scale of least squared error, and its
        codes are rounded again. A block without values has scale 1.

        Args:
            packed: ``weight`` and ``weight_scale`` as in our own files, and block mantissas in ``weight_macro``.
            top: the largest [`top_exponent`] of the matrices that share a tensor scale.
        """
        # Bring the largest scale to the top of E4M3, by a power of two.
        exponent = max(-_LARGEST_EXPONENT, min(top - _TOP_EXPONENT, _LARGEST_EXPONENT))
        divisor = 2.0**-exponent
        codes = packed["weight"]
        scale = block_scales(packed["weight_scale"], packed.get("weight_macro"), torch.float64) * divisor
        is_empty = ~_has_values(codes) & ~scale.isnan()
        scale = scale.masked_fill(is_empty, 1.0)
        stored = scale.float().to(torch.float8_e4m3fn)
        halves = stored.repeat_interleave(2, dim=1)

        # Blocks whose scale is no E4M3 number, since it is too small: each half gets one of its own.
        is_inexact = (stored.double() != scale) & ~scale.isnan()
        if is_inexact.any():
            codes = codes.unflatten(1, (-1, BLOCK_SIZE // 2)).clone()
            elements = decode_e2m1(unpack_codes(codes[is_inexact], BLOCK_SIZE))
            values = (elements * scale[is_inexact].unsqueeze(1)).float()
            bytes_of_halves = halves.view(torch.uint8).unflatten(1, (-1, 2))
            codes[is_inexact], bytes_of_halves[is_inexact] = _best_halves(values)
            codes = codes.flatten(1)
        return {"weight": codes, "weight_scale": halves, "weight_global_scale": torch.tensor([divisor])}

    def values(self, stored: Packed) -> torch.Tensor:
        codes = stored["weight"]
        elements = decode_e2m1(unpack_codes(codes, 2 * codes.shape[1]))
        scales = stored["weight_scale"].float() / stored.get("weight_global_scale", 1)
        return elements * scales.repeat_interleave(NVFP4_GROUP, dim=1)

    def tensors(self, layer: str, shape: LayerShape, packed: Packed) -> dict[str, torch.Tensor]:
        divisor = packed["weight_global_scale"]
        fields = {name: tensor for name, tensor in packed.items() if name != "weight_global_scale"}
        tensors = super().tensors(layer, shape, fields)
        of_weights, of_inputs = self.tensor_scales
        for name in list(tensors):
            if name.endswith(".weight_scale"):
                owner = name.removesuffix("weight_scale")
                tensors[f"{owner}{of_weights}"] = self.tensor_scale(divisor).clone()
                if self.quantizes_inputs:
                    tensors[f"{owner}{of_inputs}"] = self.tensor_scale(torch.ones_like(divisor))
        return tensors

    def tensor_scale(self, divisor: torch.Tensor) -> torch.Tensor:
        """Return a tensor scale as it is stored, from the divisor, or the divisor from that."""
        return divisor.reshape(-1)[:1]

    def read(self, layer: str, shape: LayerShape, expert: int | None, read: Read) -> dict[str, torch.Tensor]:
        """Return ``weight`` uint8 ``[N, K/2]`` and ``weight_scale``, float32 ``[N, K/16]``: scales over divisor."""

        def read_scaled(name: str) -> torch.Tensor:
            tensor = read(name)
            if not name.endswith(".weight_scale"):
                return tensor
            owner = name.removesuffix("weight_scale")
            return tensor.float() / self.tensor_scale(read(f"{owner}{self.tensor_scales[0]}"))

        return super().read(layer, shape, expert, read_scaled)

    def decode(self, stored: Packed) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return what [`read`] returned as in our own files, with block mantissas in ``weight_macro``, and which blocks
        ``[N, K/32]`` keep their values so: those whose scales are one ``2**e * (1 + m/4)``, or that are zero."""
        scales = stored["weight_scale"].unflatten(1, (-1, 2))
        codes = stored["weight"].unflatten(1, (-1, 2, NVFP4_GROUP // 2))
        codes = codes.masked_fill((scales == 0).unsqueeze(-1), 0)
        has_values = ((codes & 0x77) != 0).any(dim=-1) | scales.isnan()
        # A half without values takes the other's scale.
        first, second = torch.where(has_values, scales, scales.flip(-1)).unbind(-1)
        is_nan = first.isnan() & second.isnan()
        is_empty = ~has_values.any(dim=-1)

        # A float32 has the exponent as E8M0 has it. Of its mantissa, packed weights hold the first two bits.
        bits = first.view(torch.int32)
        exponent = bits >> 23
        mantissa = bits >> 21 & 3
        is_held = (bits & 0x1FFFFF == 0) & (exponent > 0) & (exponent < E8M0_NAN)
        is_exact = (first == second) & is_held | is_nan | is_empty

        scale = exponent.masked_fill(is_nan, E8M0_NAN).masked_fill(is_empty, 0)
        mantissa = mantissa.masked_fill(is_nan | is_empty, 0)
        mantissa = torch.nn.functional.pad(mantissa, (0, -mantissa.shape[1] % BLOCKS_PER_BYTE))
        packed = {
            "weight": codes.flatten(1),
            "weight_scale": scale.to(torch.uint8),
            "weight_macro": pack_mantissas(mantissa).to(torch.uint8),
        }
        return packed, is_exact

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
        halves = packed["weight_scale"].repeat_interleave(2, dim=-1)
        divisor = torch.empty(*halves.shape[:-2], 1, device="meta")
        packed |= {"weight_scale": halves.to(torch.float8_e4m3fn), "weight_global_scale": divisor}
        return self.tensors(layer, shape, packed)


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
        if not shape.is_fused:
            return super().tensors(layer, shape, packed)
        tensors = super().tensors(layer, replace(shape, experts=None, transposed=False), packed)
        fused = {name.replace(f"{layer}.", f"{layer}_"): tensor for name, tensor in tensors.items()}
        fused[layer] = fused.pop(f"{layer}_weight")
        for name in (layer, f"{layer}_weight_scale"):
            fused[name] = fused[name].mT.contiguous()
        return fused

    def read(self, layer: str, shape: LayerShape, expert: int | None, read: Read) -> dict[str, torch.Tensor]:
        if not shape.is_fused:
            return super().read(layer, shape, expert, read)
        codes = read(layer, expert).mT.contiguous()
        scales = read(f"{layer}_weight_scale", expert).mT.contiguous()
        divisor = self.tensor_scale(read(f"{layer}_weight_scale_2"))
        return {"weight": codes, "weight_scale": scales.float() / divisor}

    def tensor_scale(self, divisor: torch.Tensor) -> torch.Tensor:
        return 1 / divisor.reshape(-1)[0]

    def quantization_config(self, config: MXFP4RLConfig, ignored: Names, quantized: Names = ()) -> dict[str, Any]:
        elements = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4_GROUP}
        inputs = elements if self.quantizes_inputs else None
        return {
            "quant_method": self.quant_method,
            "quant_algo": _ALGORITHMS[self.quantizes_inputs],
            "config_groups": {"group_0": {"input_activations": inputs, "weights": elements, "targets": ["Linear"]}},
            "ignore": list(ignored),
            "producer": _PRODUCER,
        }

    def more_files(self, options: Mapping[str, Any]) -> dict[str, Any]:
        quantization = {
            "quant_algo": options["quant_algo"],
            "kv_cache_quant_algo": None,
            "group_size": NVFP4_GROUP,
            "exclude_modules": options["ignore"],
        }
        return {"hf_quant_config.json": {"producer": _PRODUCER, "quantization": quantization}}

    def notes(self, config: MXFP4RLConfig, ignored: Names, quantized: Names = ()) -> list[str]:
        unread = "transformers does not read this layout (nvfp4 is for it), nor vLLM 0.32 gpt-oss in it (vllm#46641)."
        return [*super().notes(config, ignored), unread]

    def read_config(self, options: Mapping[str, Any]) -> tuple[MXFP4RLConfig, list[str]]:
        expected = {"quant_algo": tuple(_ALGORITHMS.values()), "kv_cache_scheme": None}
        expect("quantization_config", options, expected)
        inputs = None
        if options["quant_algo"] == _ALGORITHMS[True]:
            inputs = {**self.elements, "dynamic": self.inputs}
        group = {"weights": self.elements, "input_activations": inputs, "format": self.format}
        return super().read_config({"config_groups": {"group_0": group}})


def _has_values(codes: torch.Tensor) -> torch.Tensor:
    """Return which blocks of packed codes ``[N, K/2]`` have a code that is not zero: bool ``[N, K/32]``."""
    return ((codes & 0x77) != 0).unflatten(1, (-1, BLOCK_SIZE // 2)).any(dim=-1)


def _best_halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the packed codes ``[B, 16]`` and E4M3 bytes ``[B, 2]`` of least squared error for blocks ``[B, 32]`` of
    values below 2**-4, whose halves have a scale each. The smaller scale wins a tie."""
    values = values.unflatten(1, (2, NVFP4_GROUP))
    least = torch.full(values.shape[:2], torch.inf, dtype=torch.float64)
    codes = torch.zeros_like(values, dtype=torch.uint8)
    scales = torch.zeros_like(least, dtype=torch.uint8)
    for byte, scale in enumerate(_SMALL_SCALES.tolist(), start=1):
        rounded = round_nearest(values / scale)
        error = (rounded * scale - values).double().square().sum(dim=-1)
        is_better = error < least
        least = torch.where(is_better, error, least)
        codes[is_better] = encode_e2m1(rounded[is_better])
        scales[is_better] = byte
    return pack_codes(codes.flatten(1)), scales
