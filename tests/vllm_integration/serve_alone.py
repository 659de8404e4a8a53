# SPDX-License-Identifier: Apache-2.0
"""Serve checkpoints with vLLM, one after the other, in a process that cannot import hf_mxfp4.

    VLLM_PLUGINS="" python serve_alone.py OUT FOLDER...

OUT gets a JSON object: for each folder what reads its layers (the names of methods and schemes, and what inputs are
quantized to) and the log-probabilities of the harness's prompts.

vLLM has no MXFP4 and NVFP4 kernels for CPUs: weights are decoded once and multiplied by plain torch. They are what
vLLM's own loaders made of a checkpoint for its own kernels: whose names, shapes and order are thereby tested. Numbers
are those of the OCP Microscaling specification 1.0, sections 5.3 and 6.
"""

import json
import sys
from pathlib import Path

import torch
from harness import engine, served_model, vllm_logprobs
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.mxfp4.base import MxFp4LinearKernel
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsMxfp4
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, modelopt, mxfp4
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_mxfp4 as compressed_tensors,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4 as nvfp4_experts,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a4_nvfp4 as nvfp4
from vllm.model_executor.layers.quantization.quark import quark, quark_moe
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Dynamic
from vllm.platforms.interface import PlatformEnum


BLOCK = 32
#: What quantizes the inputs of layers here where its config says so. vLLM's compressed-tensors asks for it in any case;
#: it does not get it, as on GPUs that have no FP4 units.
_QUANTIZES_INPUTS = ("QuarkOCP_MX", "QuarkOCP_MX_MoEMethod")


def decode_mxfp4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers of MXFP4: codes uint8 ``[..., K / 2]``, the lower four bits first, scale bytes ``[..., K / 32]``;
    float32 ``[..., K]``."""
    return _scaled(codes, torch.exp2(scales.float() - 127))


def decode_nvfp4(codes: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The numbers of NVFP4: codes as in MXFP4, E4M3 scales ``[..., K / 16]`` and a factor for all."""
    return _scaled(codes, scales.float() * factor)


def _scaled(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([magnitudes, -magnitudes])
    pairs = torch.stack([values[(codes & 15).long()], values[(codes >> 4).long()]], dim=-1).flatten(-2)
    return (pairs.unflatten(-1, (scales.shape[-1], -1)) * scales.unsqueeze(-1)).flatten(-2)


def to_mxfp4(x: torch.Tensor) -> torch.Tensor:
    """``x`` ``[..., K]`` with the values of its blocks of 32 rounded to MXFP4, ties to even. The largest of a block is
    rounded to one fractional bit before its exponent counts, which is Quark's `scale_calculation_mode: even`."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    fraction, exponent = torch.frexp(blocks.abs().amax(dim=-1, keepdim=True))  # the fraction in [.5, 1)
    scale = torch.exp2((exponent - 1 + (fraction >= 0.875).int() - 2).clamp(-127, 127).float())
    values = (blocks / scale).clamp(-6, 6)
    step = torch.exp2(values.abs().clamp(min=1).log2().floor() - 1)
    return ((values / step).round() * step * scale).flatten(-2).to(x.dtype)


def add_mxfp4_kernels() -> None:
    """Have vLLM choose the decoding kernels, and let its methods compute in float32, in which differences between
    orders of summation are small."""
    linear._POSSIBLE_MXFP4_KERNELS[PlatformEnum.CPU] = [DecodingKernel]
    for module in (mxfp4, quark_moe):
        module.select_mxfp4_moe_backend = lambda *_, **__: (Mxfp4MoeBackend.CPU, CPUExpertsMxfp4)
    for method in (
        mxfp4.GptOssMxfp4MoEMethod,
        quark_moe.QuarkOCP_MX_MoEMethod,
        compressed_tensors.CompressedTensorsW4A4Mxfp4MoEMethod,
        nvfp4_experts.CompressedTensorsW4A4Nvfp4MoEMethod,
        modelopt.ModelOptNvFp4FusedMoE,
    ):
        method.process_weights_after_loading = _decode_experts
        method.apply = _apply_experts
    for module in (nvfp4, modelopt):
        module.init_nvfp4_linear_kernel = lambda use_a16: DecodingNvFp4Kernel(NvFp4LinearLayerConfig())
    for method in (nvfp4_experts.CompressedTensorsW4A4Nvfp4MoEMethod, modelopt.ModelOptNvFp4FusedMoE):
        method.get_fused_moe_quant_config = lambda *_: None
    for module in (nvfp4_experts, modelopt):
        module.select_nvfp4_moe_backend = lambda **_: (NvFp4MoeBackend.EMULATION, CPUExpertsMxfp4)
    for config in (mxfp4.GptOssMxfp4Config, quark.QuarkConfig, modelopt.ModelOptNvFp4Config):
        config.get_supported_act_dtypes = lambda *_: [torch.float32]


class DecodingKernel(MxFp4LinearKernel):
    @classmethod
    def is_supported(cls, compute_capability=None):
        return True, None

    @classmethod
    def can_implement(cls, config):
        return config.activation_quant_key in (None, kMxfp4Dynamic), "decodes MXFP4"

    def process_weights_after_loading(self, layer):
        layer.decoded = torch.nn.Parameter(decode_mxfp4(layer.weight.data, layer.weight_scale.data), False)
        del layer.weight

    def apply_weights(self, layer, x, bias=None):
        inputs = _inputs_of(layer.scheme, self.config.activation_quant_key)
        return torch.nn.functional.linear(inputs(x), layer.decoded.to(x.dtype), bias)


class DecodingNvFp4Kernel(NvFp4LinearKernel):
    """Weights only. The method that calls it has joined the tensor scales, and made factors of them."""

    @classmethod
    def is_supported(cls, compute_capability=None):
        return True, None

    @classmethod
    def can_implement(cls, config):
        return True, "decodes NVFP4"

    def process_weights_after_loading(self, layer):
        values = decode_nvfp4(layer.weight.data, layer.weight_scale.data, layer.weight_global_scale.data)
        layer.decoded = torch.nn.Parameter(values, False)
        del layer.weight

    def apply_weights(self, layer, x, bias=None):
        return torch.nn.functional.linear(x, layer.decoded.to(x.dtype), bias)


def _inputs_of(reader, key):
    """What is done to the inputs of a layer."""
    return to_mxfp4 if key == kMxfp4Dynamic and type(reader).__name__ in _QUANTIZES_INPUTS else lambda x: x


def _decode_experts(self, layer):
    """``w13`` and ``w2`` of all experts, from codes and scales ``[E, N, ...]``."""
    for own in ("w13", "w2"):
        name = f"{own}_weight" if hasattr(layer, f"{own}_weight") else f"{own}_weight_packed"
        codes = getattr(layer, name).data
        scales = getattr(layer, f"{own}_weight_scale").data
        divisor, factor = (getattr(layer, f"{own}_weight_{end}", None) for end in ("global_scale", "scale_2"))
        if divisor is None and factor is None:
            values = decode_mxfp4(codes, scales)
        else:  # of gate and up, which vLLM expects to be one
            factor = (1 / divisor.data if factor is None else factor.data).view(len(codes), -1)
            assert torch.equal(factor[:, 0], factor[:, -1])
            values = decode_nvfp4(codes, scales, factor[:, :1, None])
        layer.register_parameter(f"{own}_decoded", torch.nn.Parameter(values, False))
        delattr(layer, name)


def _apply_experts(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
    """One expert at a time, on tokens ``x`` ``[T, hidden]`` with the chosen ``topk_ids`` ``[T, k]``."""
    inputs = _inputs_of(self, getattr(self, "activation_quant_key", None))
    biases = [getattr(layer, f"{own}_bias", None) for own in ("w13", "w2")]
    output = torch.zeros_like(x)
    for expert in topk_ids.unique().tolist():
        token, place = (topk_ids == expert).nonzero(as_tuple=True)
        first, second = (None if bias is None else bias[expert].to(x.dtype) for bias in biases)
        hidden = torch.nn.functional.linear(inputs(x[token]), layer.w13_decoded[expert], first)
        hidden = torch.nn.functional.linear(inputs(_activation(layer, hidden)), layer.w2_decoded[expert], second)
        output.index_add_(0, token, hidden * topk_weights[token, place, None].to(x.dtype))
    return output


def _activation(layer, hidden):
    """Of gate and up: halves, or every other row in gpt-oss, whose function has its own bounds."""
    if layer.activation == MoEActivation.SILU:
        gate, up = hidden.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
    assert layer.activation == MoEActivation.SWIGLUOAI
    gate = hidden[:, ::2].clamp(max=7.0)
    up = hidden[:, 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


# ---- serving --------------------------------------------------------------------------------------------------------


def served(folder: str) -> dict:
    """What vLLM makes of one folder; the engine ends with the function."""
    with engine(folder) as llm:
        methods = [m.quant_method for m in served_model(llm).modules() if getattr(m, "quant_method", None)]
        schemes = [m.scheme for m in served_model(llm).modules() if hasattr(m, "scheme")]
        kernels = [getattr(scheme, "ocp_mx_linear", None) or getattr(scheme, "kernel", None) for scheme in schemes]
        return {
            "readers": sorted({type(reader).__name__ for reader in methods + schemes}),
            "inputs": sorted({str(getattr(kernel.config, "activation_quant_key", None)) for kernel in kernels}),
            "logprobs": vllm_logprobs(llm).tolist(),
        }


def main(out: str, *folders: str) -> None:
    sys.modules["hf_mxfp4"] = None  # importing it is an error from here on
    add_mxfp4_kernels()
    found = {folder: served(folder) for folder in folders}
    assert "mxfp4_rl" not in QUANTIZATION_METHODS
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
