# SPDX-License-Identifier: Apache-2.0
"""Experts in vLLM: on packed weights, or with quantized inputs, by a product of our own; on dequantized weights alone
by vLLM's kernels for 16-bit experts."""

from types import MethodType
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.utils import set_weight_attrs

from ...config import MXFP4RLConfig
from ...gemm import packed_shapes, reads_packed_on_gpus
from ...numerics import QuantScheme
from .experts_product import ACTIVATIONS, INTERLEAVED, experts_operator
from .experts_storage import VLLM_NAMES, ExpertsTarget, packed_parameters, parameter_name, write
from .linears import check_share
from .weight_loading import ExpectedLayers, check_complete


def experts_method(layer: Any, scheme: MXFP4RLConfig, expected: ExpectedLayers, name: str) -> Any:
    """Return the method that computes quantized experts, and add them to ``expected``.

    Raises `ValueError` for what it could not compute, before any weight is read.
    """
    method = MXFP4RLExpertsMethod
    if not expected.is_packed and scheme.activation_scheme is None:
        method = MXFP4RLDenseExpertsMethod
    else:
        _check_supported(layer, name)
    # vLLM's, while it makes layers.
    expected.device, expected.dtype = torch.get_default_device(), torch.get_default_dtype()
    expected.projection_names = layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name
    target = expected.experts[name] = _target(layer, scheme, name)
    if expected.is_packed:
        target.layer = layer
    return method(layer.moe_config, scheme, expected, target)


class _FromOurCheckpoint:
    """Mixin that refuses weights which were not converted."""

    def __init__(self, moe: Any, scheme: MXFP4RLConfig, expected: ExpectedLayers, target: ExpertsTarget):
        super().__init__(moe)
        self.scheme, self.expected, self.target = scheme, expected, target

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Raise `ValueError` unless both projections came, all of them, through the plugin."""
        check_complete([name for projection in VLLM_NAMES for name in self.target.missing(projection)])
        self.expected.is_loaded = True
        super().process_weights_after_loading(layer)


class MXFP4RLDenseExpertsMethod(_FromOurCheckpoint, UnquantizedFusedMoEMethod):
    """vLLM's method for 16-bit experts, on weights that were dequantized on their way."""


class MXFP4RLExpertsMethod(_FromOurCheckpoint, FusedMoEMethodBase):
    """Experts as the policy computes them: both inputs quantized where the scheme does that, on packed weights or on
    dequantized ones ([`mxfp4_rl::experts`](experts_product.py)).

    Parameters of the layer with packed weights, for good, filled in place: ``w13_weight`` and ``w2_weight`` uint8
    ``[E, N, K / 2]``, ``w13_weight_scale``, ``w13_weight_macro`` and so on, those that the scheme has.
    """

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Parameters for the experts of this process.

        Raises `ValueError` when tensor parallelism would cut a block, or the kernels do not read the scheme.
        """
        target, weights, inputs = self.target, self.scheme.weight_scheme, self.scheme.activation_scheme
        columns, schemes = target.sizes["down_proj"][1], (weights if target.is_packed else None, inputs)
        name, advice = f"{target.name}.down_proj", "enable_expert_parallel=True"
        check_share(name, columns // target.size, columns, schemes, advice)
        if target.is_packed:
            _check_graphs(target.name, weights, self.scheme.backend)
        for projection, (rows, columns) in target.own_sizes().items():
            prefix = VLLM_NAMES[projection]
            if target.is_packed:
                own = {"weight_loader": MethodType(write, layer)}
                for part, shape in packed_shapes(rows, columns, weights).items():
                    _register(layer, parameter_name(projection, part), (num_experts, *shape), torch.uint8, own)
            else:
                shape = num_experts, rows, columns
                _register(layer, f"{prefix}_weight", shape, params_dtype, extra_weight_attrs)
            if self.moe.has_bias:
                _register(layer, f"{prefix}_bias", (num_experts, rows), params_dtype, extra_weight_attrs)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None  # of vLLM's kernels, which are not used

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        gate_up, down = (packed_parameters(layer, projection) for projection in VLLM_NAMES)
        biases = [layer.w13_bias, layer.w2_bias] if self.moe.has_bias else []
        weights, inputs = self.scheme.weight_scheme, self.scheme.activation_scheme
        return experts_operator(
            x,
            topk_weights,
            topk_ids,
            layer.expert_map,
            gate_up,
            down,
            biases,
            str(weights) if self.target.is_packed else "",
            "" if inputs is None else str(inputs),
            layer.activation.value,
            self.scheme.backend,
        )


def _register(
    layer: torch.nn.Module, name: str, shape: tuple[int, ...], dtype: torch.dtype, attributes: dict[str, Any]
) -> None:
    parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
    layer.register_parameter(name, parameter)
    set_weight_attrs(parameter, attributes)


def _target(layer: Any, scheme: MXFP4RLConfig, name: str) -> ExpertsTarget:
    moe, manager = layer.moe_config, layer.expert_map_manager
    parallel = moe.moe_parallel_config
    columns = moe.intermediate_size
    return ExpertsTarget(
        name,
        scheme.weight_scheme,
        {"gate_up_proj": (2 * columns, moe.hidden_dim), "down_proj": (moe.hidden_dim, columns)},
        moe.num_experts,
        tuple(manager.get_local_expert_ids()),
        parallel.tp_rank,
        parallel.tp_size,
        moe.activation.value in INTERLEAVED,
    )


def _check_supported(layer: Any, name: str) -> None:
    """Raise `ValueError` for experts that [`experts_operator`] would compute otherwise than vLLM."""
    moe = layer.moe_config
    parallel, lora = moe.moe_parallel_config, get_current_vllm_config().lora_config
    reason = None
    if moe.activation.value not in ACTIVATIONS:
        reason = f"their activation is {moe.activation.value!r}; known are {', '.join(ACTIVATIONS)}"
    elif moe.swiglu_limit is not None:
        reason = "their activation has a limit (swiglu_limit)"
    elif layer.apply_router_weight_on_input:
        reason = "their inputs are multiplied by the router's weights"
    elif parallel.dp_size > 1 or parallel.pcp_size > 1 or parallel.is_sequence_parallel:
        reason = "they are spread over processes that have tokens of their own (data or sequence parallelism)"
    elif parallel.enable_eplb:
        reason = "vLLM would move them among processes (enable_eplb)"
    elif lora is not None and (lora.target_modules is None or name.rpartition(".")[2] in lora.target_modules):
        reason = "vLLM's LoRA of experts is part of its own kernels; name other modules in lora_target_modules"
    if reason:
        raise ValueError(
            f"{name}: these experts cannot be computed from packed weights, or with quantized inputs, in vLLM: "
            f"{reason}; with preset='w4a16' they can be dequantized: quantization_config[\"vllm\"] = "
            '{"weights": "dense"} in config.json'
        )


def _check_graphs(name: str, weights: QuantScheme, backend: str) -> None:
    """Raise `ValueError` when CUDA graphs are to hold a product in which the host reads where rows of experts end."""
    if torch.get_default_device().type != "cuda" or reads_packed_on_gpus(weights, backend):
        return
    if not get_current_vllm_config().model_config.enforce_eager:
        raise ValueError(
            f"{name}: no kernel multiplies with experts packed by {weights} (backend={backend!r}), and one after the "
            'other they cannot be in a CUDA graph; set enforce_eager=True, or quantization_config["vllm"] = '
            '{"weights": "dense"} in config.json'
        )
