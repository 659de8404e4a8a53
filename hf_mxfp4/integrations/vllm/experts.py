# SPDX-License-Identifier: Apache-2.0
"""Experts in vLLM: on packed weights, or with quantized inputs, by a product of our own; on dequantized weights alone
by vLLM's kernels for 16-bit experts, in which the input of ``down_proj`` cannot be quantized.

On GPUs each projection of all experts is one grouped kernel that CUDA graphs can hold
([`hf_mxfp4.ops.reads_packed_on_gpus`] says of which schemes); elsewhere experts come one after the other.
"""

import functools
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.utils import set_weight_attrs

from ...config import MXFP4RLConfig
from ...numerics import BLOCK_SIZE, FULL, GemmScheme, LinearScheme, QuantScheme
from ...ops import (
    PACKED_FIELDS,
    GemmSpec,
    Groups,
    PackedState,
    group_by_expert,
    matmul,
    packed_forward,
    packed_shapes,
    quantize_input,
    read_input_scheme,
    read_scheme,
    reads_packed_on_gpus,
)
from ...utils import Mixin
from .linears import check_share
from .weight_loading import VLLM_NAMES, ExpectedLayers, ExpertsTarget, check_complete, parameter_name, write


def experts_method(layer: Any, scheme: MXFP4RLConfig, expected: ExpectedLayers, name: str) -> Any:
    """Return the method that computes quantized experts, added to ``expected``. Raises `ValueError` if none can."""
    if not expected.is_packed and scheme.activation_scheme is None:
        method = MXFP4RLDenseExpertsMethod
    else:
        _check_supported(layer, name)
        method = MXFP4RLExpertsMethod
    expected.projection_names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
    target = _target(layer, scheme, name)
    if expected.is_packed:
        target.layer = layer
    expected.experts[name] = target
    return method(layer.moe_config, scheme, expected, target)


class _FromOurCheckpoint(Mixin):
    """Mixin that refuses weights which were not converted."""

    def __init__(self, moe: Any, scheme: MXFP4RLConfig, expected: ExpectedLayers, target: ExpertsTarget):
        super().__init__(moe)
        self.scheme = scheme
        self.expected = expected
        self.target = target

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Raise `ValueError` unless both projections came, all of them, through the plugin."""
        check_complete([name for projection in VLLM_NAMES for name in self.target.missing(projection)])
        self.expected.is_loaded = True
        super().process_weights_after_loading(layer)


class MXFP4RLDenseExpertsMethod(_FromOurCheckpoint, UnquantizedFusedMoEMethod):
    """vLLM's method for 16-bit experts, on weights that were dequantized on their way."""


class MXFP4RLExpertsMethod(_FromOurCheckpoint, FusedMoEMethodBase):
    """Experts as the policy computes them, by [`experts_operator`].

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
        """Make parameters. Raises `ValueError` where tensor parallelism cuts a block, or no kernel reads the scheme."""
        target = self.target
        weights = self.scheme.weight_scheme
        inputs = self.scheme.activation_scheme

        # Only down_proj is split along the axis of blocks.
        columns = target.sizes["down_proj"][1]
        schemes = (weights if target.is_packed else None, inputs)
        name = f"{target.name}.down_proj"
        check_share(name, columns // target.size, columns, schemes, "enable_expert_parallel=True")
        if target.is_packed:
            _check_graphs(target.name, weights, self.scheme.backend)

        self._names = []  # of the parameters of each projection's weight
        for projection, (rows, columns) in target.own_sizes().items():
            if target.is_packed:
                shapes = packed_shapes(rows, columns, weights)
                dtype = torch.uint8
                attributes = {"weight_loader": MethodType(write, layer)}
            else:
                shapes = {"weight": (rows, columns)}
                dtype = params_dtype
                attributes = extra_weight_attrs
            names = []
            for part, shape in shapes.items():
                name = parameter_name(projection, part)
                _register(layer, name, (num_experts, *shape), dtype, attributes)
                names.append(name)
            self._names.append(names)
            if self.moe.has_bias:
                name = parameter_name(projection, "bias")
                _register(layer, name, (num_experts, rows), params_dtype, extra_weight_attrs)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None  # of vLLM's kernels, which are not used

    def apply(
        self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        # An operator accepts lists of tensors and texts, so that compiled code and CUDA graphs can hold it.
        gate_up_names, down_names = self._names
        biases = []
        if self.moe.has_bias:
            biases = [layer.w13_bias, layer.w2_bias]
        weight_scheme = ""
        if self.target.is_packed:
            weight_scheme = str(self.scheme.weight_scheme)
        return experts_operator(
            x,
            topk_weights,
            topk_ids,
            layer.expert_map,
            [getattr(layer, name) for name in gate_up_names],
            [getattr(layer, name) for name in down_names],
            biases,
            weight_scheme,
            str(self.scheme.activation_scheme or ""),
            layer.activation.value,
            self.scheme.backend,
            self.scheme.matmul_backend,
        )


def _register(layer: Any, name: str, shape: tuple[int, ...], dtype: torch.dtype, attributes: dict[str, Any]) -> None:
    """Add a frozen parameter of zeros to a layer, with the attributes by which vLLM loads it."""
    parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
    layer.register_parameter(name, parameter)
    set_weight_attrs(parameter, attributes)


def _target(layer: Any, scheme: MXFP4RLConfig, name: str) -> ExpertsTarget:
    """Describe experts that vLLM has made."""
    moe = layer.moe_config
    parallel = moe.moe_parallel_config
    is_here = layer.expert_map_manager.is_local_expert
    return ExpertsTarget(
        name,
        scheme.weight_scheme,
        sizes={
            "gate_up_proj": (2 * moe.intermediate_size, moe.hidden_dim),
            "down_proj": (moe.hidden_dim, moe.intermediate_size),
        },
        n_experts=moe.num_experts,
        experts=tuple(expert for expert in range(moe.num_experts) if is_here(expert)),
        rank=parallel.tp_rank,
        size=parallel.tp_size,
        is_interleaved=moe.activation.value in INTERLEAVED,
    )


def _check_supported(layer: Any, name: str) -> None:
    """Raise `ValueError` for experts that [`experts_operator`] would compute otherwise than vLLM."""
    moe = layer.moe_config
    parallel = moe.moe_parallel_config
    lora = get_current_vllm_config().lora_config
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


# ---- the product ----------------------------------------------------------------------------------------------------


def _swiglu(states: torch.Tensor) -> torch.Tensor:
    """Qwen, Mixtral and others: all gate columns come before all up columns."""
    gate, up = states.chunk(2, dim=-1)
    return F.silu(gate) * up


def _swiglu_oai(states: torch.Tensor) -> torch.Tensor:
    """gpt-oss: gate and up columns alternate, and both are clamped."""
    gate = states[..., ::2].clamp(max=7.0)
    up = states[..., 1::2].clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


#: What lies between the projections, ``[S, 2 I]`` to ``[S, I]``, by vLLM's names, with the arithmetic of transformers.
ACTIVATIONS = {"silu": _swiglu, "swigluoai": _swiglu_oai}
#: Those of [`ACTIVATIONS`] for which rows of gate and up alternate in the weight.
INTERLEAVED = ("swigluoai",)


@torch.library.custom_op("mxfp4_rl::experts", mutates_args=())
def experts_operator(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    gate_up: list[torch.Tensor],
    down: list[torch.Tensor],
    biases: list[torch.Tensor],
    weight_scheme: str,
    input_scheme: str,
    activation: str,
    backend: str,
    matmul_backend: str,
) -> torch.Tensor:
    """Return the weighted sum ``[tokens, hidden]`` of the experts of each token, in the dtype of ``x``.

    Args:
        x, topk_weights, topk_ids: ``[tokens, hidden]``, and ``[tokens, k]`` of each of the others.
        expert_map: int ``[experts of the model]``, the place of each among the weights and -1 for those of other
            processes, which add nothing to the sum; `None` when all are here.
        gate_up, down: the weights of all experts here, ``[E, N, ...]``: the packed tensors that the scheme has, in the
            order of [`PACKED_FIELDS`], or one tensor of dequantized values.
        biases: ``[E, N]`` of each projection, or none.
        weight_scheme, input_scheme: as text; ``""`` for dequantized weights, and inputs that are not quantized; inputs
            may be ``"fp8"`` or ``"mxfp8"``.
        activation: one of [`ACTIVATIONS`].
        backend: see [`hf_mxfp4.fake_quantize`].
        matmul_backend: see [`hf_mxfp4.ops.select_matmul`].
    """
    n_tokens, k = topk_ids.shape
    ids, order, groups = _sorted(topk_ids.reshape(-1), expert_map, len(gate_up[0]))
    is_elsewhere = None  # of each row, whether its expert is in another process
    if expert_map is not None:
        is_elsewhere = (ids == groups.n_experts).unsqueeze(-1)
    inputs = read_input_scheme(input_scheme)

    def project(states: torch.Tensor, weight: list[torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
        if bias is not None:
            bias = bias.to(x.dtype)
        if weight_scheme:
            fields = packed_shapes(1, BLOCK_SIZE, read_scheme(weight_scheme))
            by_field = dict(zip(fields, weight, strict=True))
            packed = tuple(by_field.get(name) for name in PACKED_FIELDS)
            state = _state_of(weight_scheme, input_scheme, backend, matmul_backend, tuple(weight[0].shape))
            out = packed_forward(states, packed, bias, state, groups, x.dtype)
        else:
            states = quantize_input(states, x.dtype, inputs, backend)
            if is_elsewhere is None:
                out = matmul(states, weight[0], bias, groups)
            else:
                # A product with a bias needs an expert for every row.
                out = matmul(states, weight[0], None, groups)
                if bias is not None:
                    out = out + bias[ids.clamp(max=len(bias) - 1)]
        if is_elsewhere is not None:
            # No expert has written the rows of other processes.
            out = out.masked_fill(is_elsewhere, 0)
        return out

    gate_up_bias, down_bias = biases or (None, None)
    states = project(x[order // k], gate_up, gate_up_bias)
    states = ACTIVATIONS[activation](states)
    states = project(states, down, down_bias)
    states = states * topk_weights.reshape(-1)[order].unsqueeze(-1)
    # Back to the order of tokens, whose outputs are then summed in a fixed order.
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device)
    return states[places].view(n_tokens, k, states.shape[-1]).sum(dim=1).to(x.dtype)


@functools.lru_cache(maxsize=64)
def _state_of(weights: str, inputs: str, backend: str, matmul_backend: str, shape: tuple[int, ...]) -> PackedState:
    """Return the state that projections with weights of one shape share."""
    fprop = GemmScheme(read_input_scheme(inputs) or FULL, read_scheme(weights))
    return PackedState(GemmSpec(LinearScheme(fprop), backend, matmul_backend))


@experts_operator.register_fake
def _(x, *others):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _sorted(
    ids: torch.Tensor, expert_map: torch.Tensor | None, n_experts: int
) -> tuple[torch.Tensor | None, torch.Tensor, Groups]:
    """Return places of experts in order (``n_experts``: other processes'), the order that sorts rows so, and groups."""
    if expert_map is None:
        return None, *group_by_expert(ids, n_experts)
    ids = expert_map[ids]
    ids, order = torch.sort(torch.where(ids < 0, n_experts, ids), stable=True)
    ends = torch.searchsorted(ids, torch.arange(n_experts, device=ids.device, dtype=ids.dtype), right=True)
    return ids, order, Groups.of_ends(ends.to(torch.int32), len(ids))
