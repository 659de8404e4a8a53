# SPDX-License-Identifier: Apache-2.0
"""vLLM's view of `quant_method: mxfp4_rl`, through its documented interface for methods that it does not know.

Packed weights of linear layers are read under their own names and dequantized once, after loading; those of experts
are dequantized as they arrive (`arriving.py`). Products are vLLM's own on the dequantized weights. So the numbers are
those of the packed model, and the memory is that of a 16-bit one. To have vLLM compute on 4 bits, export the checkpoint
to a format that it has kernels for.
"""

import json
import math
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.parameter import ModelWeightParameter

from ..backends.select import dequantize
from ..config import QUANT_METHOD, MXFP4RLConfig
from ..gemm.storage.packed_weight import packed_shapes, packed_tensor
from ..module_names import ALWAYS_SKIPPED, name_matches
from ..numerics import BLOCK_SIZE
from .activations import quantize_input
from .expected import ExpectedLayers


class MXFP4RLVLLMConfig(QuantizationConfig):
    """The scheme of a packed checkpoint, or of one of master weights, as vLLM asks for it.

    Raises `ValueError` for master weights whose quantized values are not what the policy computes with, and for schemes
    whose activations vLLM cannot quantize.
    """

    def __init__(self, scheme: MXFP4RLConfig):
        super().__init__()
        reason = _masters_unsupported_reason(scheme) if scheme.mode == "qat" else None
        if reason:
            raise ValueError(
                f"this checkpoint has mode={scheme.mode!r}, full-precision master weights, and vLLM cannot compute "
                f"with their quantized values: {reason}"
            )
        if scheme.activation_scheme is not None and scheme.activation_scheme.fallback_rate is not None:
            raise ValueError(
                f"outlier_fallback_rate={scheme.outlier_fallback_rate} selects blocks of activations by a threshold "
                "that is learned while a model trains and is not part of a checkpoint; pack with preset='w4a16' for "
                "vLLM"
            )
        self.scheme = scheme
        self.expected = ExpectedLayers()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.scheme.describe()})"

    @classmethod
    def get_name(cls) -> str:
        return QUANT_METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 70  # ordinary products; vLLM itself decides what a GPU can do

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # the scheme stands in config.json

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "MXFP4RLVLLMConfig":
        return cls(MXFP4RLConfig.from_dict(config))

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Learn from the config of the model how vLLM reads its experts."""
        self.expected.is_transposed = getattr(hf_config, "model_type", None) == "gpt_oss"

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, LinearBase):
            if self._skips(prefix):
                return UnquantizedLinearMethod()
            if self.scheme.mode == "packed":
                return MXFP4RLLinearMethod(self.scheme, prefix)
            self.expected.device = torch.get_default_device()  # vLLM's, while it makes layers
            self.expected.linears.update(self._parts(prefix))
            return MXFP4RLMasterLinearMethod(self.scheme, prefix, self.expected, self._parts(prefix))
        # By name: the class has moved between versions of vLLM.
        is_experts = any(cls.__name__ in ("RoutedExperts", "FusedMoE") for cls in type(layer).__mro__)
        if is_experts and ".block_sparse_moe." in prefix:
            self.expected.has_old_names = True
        if not is_experts or self._skips(prefix):
            return None
        reason = self._experts_unsupported_reason()
        if reason:
            raise ValueError(
                f"{prefix}: quantized experts cannot be loaded into vLLM by this plugin: {reason}; export the "
                "checkpoint to a format that vLLM has experts in: hf-mxfp4 export --format compressed-tensors, gpt-oss "
                "or bf16"
            )
        from .experts import experts_method

        return experts_method(layer, self.scheme, self.expected, prefix, self.has_packed_storage)

    @property
    def has_packed_storage(self) -> bool:
        return True

    def _experts_unsupported_reason(self) -> str | None:
        if not hasattr(QuantizationConfig, "get_checkpoint_weight_mapper"):
            return "this version of vLLM does not let a plugin convert weights on their way; 0.32 does"
        return None

    def get_checkpoint_weight_mapper(self) -> Any:
        """What vLLM sends all weights through before it loads them."""
        from .arriving import Converter, ConvertingMapper

        return ConvertingMapper(Converter(self.scheme, self.expected), super().get_checkpoint_weight_mapper())

    def _parts(self, prefix: str) -> list[str]:
        """The layers that vLLM has joined under ``prefix``, by the names that they have in checkpoints."""
        prefix = prefix.replace(".block_sparse_moe.", ".mlp.")  # Mixtral: vLLM has the older names
        if self.expected.is_transposed:  # gpt-oss: vLLM has names of its own
            prefix = prefix.replace(".attn.", ".self_attn.")
        parent, _, last = prefix.rpartition(".")
        return [f"{parent}.{part}".lstrip(".") for part in self.packed_modules_mapping.get(last, [last])]

    def _skips(self, prefix: str) -> bool:
        """Whether the layers that vLLM has joined under ``prefix`` are in full precision; they must agree."""
        names = self._parts(prefix)
        patterns = (*ALWAYS_SKIPPED, *(self.scheme.modules_to_not_convert or ()))
        skipped = {name: any(name_matches(name, pattern) for pattern in patterns) for name in names}
        if len(set(skipped.values())) > 1:
            raise ValueError(
                f"vLLM joins {', '.join(names)} into one layer, but modules_to_not_convert="
                f"{list(self.scheme.modules_to_not_convert or ())} skips only some of them"
            )
        return all(skipped.values())


class MXFP4RLLinearMethod(LinearMethodBase):
    """Loads packed tensors, then computes ``Q(x) Q(W)^T + b`` on the dequantized weight."""

    def __init__(self, scheme: MXFP4RLConfig, name: str = ""):
        self.scheme, self.name = scheme, name
        self._json = json.dumps(scheme.to_dict())
        self._plain = UnquantizedLinearMethod()

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """uint8 parameters of the shapes on disk; of a layer that is split by columns, the share of this process.

        Raises `ValueError` when a share would cut a block or macro block.
        """
        weights = self.scheme.weight_scheme
        if input_size_per_partition != input_size:
            macro_block = weights.macro_block or BLOCK_SIZE
            unit = input_size if macro_block == "row" else math.lcm(BLOCK_SIZE, macro_block)
            if input_size_per_partition % unit:
                raise ValueError(
                    f"{self.name}: tensor parallelism gives each process {input_size_per_partition} of {input_size} "
                    f"columns, which cuts blocks of {unit}; choose a smaller tensor_parallel_size"
                )
        shapes = packed_shapes(sum(output_partition_sizes), input_size_per_partition, weights)
        for name, shape in shapes.items():
            parameter = ModelWeightParameter(
                data=torch.empty(shape, dtype=torch.uint8),
                input_dim=1,
                output_dim=0,
                weight_loader=extra_weight_attrs["weight_loader"],
            )
            layer.register_parameter(name, parameter)
        layer.mxfp4_columns, layer.mxfp4_dtype = input_size_per_partition, params_dtype
        layer.mxfp4_weight_loader = extra_weight_attrs["weight_loader"]

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Put the dequantized weight in the place of the packed tensors, with the loader that they had: trainers push
        full-precision weights later, and those are loaded as they are."""
        if layer.weight.dtype != torch.uint8:  # pushed ones are processed again
            self._plain.process_weights_after_loading(layer)
            return
        weights = self.scheme.weight_scheme
        names = packed_shapes(1, layer.mxfp4_columns, weights)
        packed = {name: getattr(layer, name).data for name in names}
        tensor = packed_tensor(packed, layer.mxfp4_columns, weights, layer.mxfp4_dtype)
        weight = dequantize(tensor, layer.mxfp4_dtype, self.scheme.backend)
        for name in names:
            delattr(layer, name)
        parameter = ModelWeightParameter(
            data=weight, input_dim=1, output_dim=0, weight_loader=layer.mxfp4_weight_loader
        )
        layer.register_parameter("weight", parameter)
        self._plain.process_weights_after_loading(layer)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.scheme.activation_scheme is not None:
            x = quantize_input(x, self._json)
        return self._plain.apply(layer, x, bias)


class MXFP4RLMasterLinearMethod(MXFP4RLLinearMethod):
    """Loads ``Q(W)`` of master weights, quantized on their way, then computes as the packed layer does."""

    def __init__(self, scheme: MXFP4RLConfig, name: str, expected: ExpectedLayers, parts: list[str]):
        super().__init__(scheme, name)
        self.expected, self.parts = expected, parts

    def create_weights(self, layer: torch.nn.Module, *sizes: Any, **options: Any) -> None:
        """The weight of a layer that is not quantized: masters are quantized before it is split among processes."""
        self._plain.create_weights(layer, *sizes, **options)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Raise `RuntimeError` unless all that vLLM has joined here was quantized."""
        missing = [part for part in self.parts if part not in self.expected.arrived]
        if missing:
            raise RuntimeError(
                f"{', '.join(missing)}: master weights were not quantized, since vLLM loads this model's weights past "
                "the plugin; pack them: hf_mxfp4.pack(model), then save_pretrained, and load that folder"
            )
        self.expected.is_loaded = True
        self._plain.process_weights_after_loading(layer)


def _masters_unsupported_reason(scheme: MXFP4RLConfig) -> str | None:
    """Why vLLM cannot load master weights as the quantized values that the policy computes with; `None` if it can."""
    if not hasattr(QuantizationConfig, "get_checkpoint_weight_mapper"):
        return (
            "this version of vLLM does not let a plugin convert weights on their way (0.32 does); pack them: "
            "hf_mxfp4.pack(model), then save_pretrained, and load that folder"
        )
    if scheme.layer_overrides:
        return "layer_overrides gives layers schemes of their own"
    return scheme.packing_unsupported_reason


def register_method() -> None:
    register_quantization_config(QUANT_METHOD)(MXFP4RLVLLMConfig)
