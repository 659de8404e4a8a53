# SPDX-License-Identifier: Apache-2.0
"""vLLM's view of `quant_method: mxfp4_rl`, through its documented interface for methods that it does not know.

Linear layers (`linears.py`) and experts (`experts.py`) keep codes and scales, or dense values where the settings of the
checkpoint say so (`settings.py`). Whatever comes, from disk or from a trainer, is converted on its way
(`arriving.py`): what is packed stays packed, and what is in full precision is quantized.
"""

import os
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from ...config import QUANT_METHOD, MXFP4RLConfig
from ...module_names import ALWAYS_SKIPPED, name_matches
from .expected import ExpectedLayers
from .linears import MXFP4RLDenseLinearMethod, MXFP4RLLinearMethod
from .native import MXFP4RLNativeLinearMethod, unsupported_by_native_kernels
from .settings import SETTINGS_KEY, EngineSettings


class MXFP4RLVLLMConfig(QuantizationConfig):
    """The scheme of a packed checkpoint, or of one of master weights, as vLLM asks for it.

    Raises `ValueError` for master weights whose quantized values are not what the policy computes with, and for
    settings that this version of vLLM cannot keep.
    """

    def __init__(self, scheme: MXFP4RLConfig, settings: EngineSettings | None = None):
        super().__init__()
        settings = settings or EngineSettings()
        reason = _masters_unsupported_reason(scheme) if scheme.mode == "qat" else None
        if reason:
            raise ValueError(
                f"this checkpoint has mode={scheme.mode!r}, full-precision master weights, and vLLM cannot compute "
                f"with their quantized values: {reason}"
            )
        if scheme.weight_rotation is not None and settings.weights != "packed":
            raise ValueError(
                f"{SETTINGS_KEY}.weights={settings.weights!r}: weights that were rotated before they were packed "
                f"({scheme.weight_rotation}) are computed with as they are stored alone; use 'packed'"
            )
        if settings != EngineSettings() and not _CONVERTS:
            raise ValueError(f"{settings}: {_NO_MAPPER}, and only packed checkpoints can be kept, packed")
        reason = unsupported_by_native_kernels(scheme) if settings.weights == "native" else None
        if reason:
            raise ValueError(f"{SETTINGS_KEY}.weights='native': {reason}; use 'packed'")
        self.scheme, self.settings = scheme, settings
        self.expected = ExpectedLayers(settings)

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
        return cls(MXFP4RLConfig.from_dict(config), EngineSettings.read(config.get(SETTINGS_KEY)))

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Learn from the config of the model how vLLM reads its experts, and write the settings into it: vLLM keeps
        compiled graphs by what stands there."""
        self.expected.is_transposed = getattr(hf_config, "model_type", None) == "gpt_oss"
        for config in (hf_config, getattr(hf_config, "text_config", None)):
            stored = getattr(config, "quantization_config", None)
            if isinstance(stored, dict):
                stored[SETTINGS_KEY] = self.settings.to_dict()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, LinearBase):
            if self._skips(prefix):
                return UnquantizedLinearMethod()
            if prefix.endswith(".kv_b_proj") and self.scheme.activation_scheme is not None and not _is_mla_off():
                raise ValueError(
                    f"{prefix}: vLLM multiplies parts of this weight with queries and attention outputs, not with the "
                    "inputs that the scheme quantizes; set VLLM_MLA_DISABLE=1, or use preset='w4a16'"
                )
            parts, expected = self._parts(prefix), self.expected
            expected.linears.update(parts)
            expected.n_layers += 1
            # vLLM's, while it makes layers.
            expected.device, expected.dtype = torch.get_default_device(), torch.get_default_dtype()
            return _LINEAR_METHODS[self.settings.weights](self.scheme, prefix, expected, parts)
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

        return experts_method(layer, self.scheme, self.expected, prefix)

    def _experts_unsupported_reason(self) -> str | None:
        if self.scheme.weight_rotation is not None:
            return f"their inputs are not rotated here ({self.scheme.weight_rotation})"
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
        kept = tuple(f"{module}." for module in self.scheme.full_precision or ())
        skipped = {
            name: f"{name}.".startswith(kept) or any(name_matches(name, pattern) for pattern in patterns)
            for name in names
        }
        if len(set(skipped.values())) > 1:
            raise ValueError(
                f"vLLM joins {', '.join(names)} into one layer, but modules_to_not_convert="
                f"{list(self.scheme.modules_to_not_convert or ())} skips only some of them"
            )
        return all(skipped.values())


_LINEAR_METHODS = {
    "packed": MXFP4RLLinearMethod,
    "dense": MXFP4RLDenseLinearMethod,
    "native": MXFP4RLNativeLinearMethod,
}

#: Whether vLLM sends weights through the quantization method before it loads them.
_CONVERTS = hasattr(QuantizationConfig, "get_checkpoint_weight_mapper")
_NO_MAPPER = "this version of vLLM does not let a plugin convert weights on their way (0.32 does)"


def _is_mla_off() -> bool:
    """Whether vLLM computes latent attention (MLA) by its layers, as it does other attention."""
    return os.environ.get("VLLM_MLA_DISABLE", "0") not in ("", "0")


def _masters_unsupported_reason(scheme: MXFP4RLConfig) -> str | None:
    """Why vLLM cannot load master weights as the quantized values that the policy computes with; `None` if it can."""
    if not _CONVERTS:
        return f"{_NO_MAPPER}; pack them: hf_mxfp4.pack(model), then save_pretrained, and load that folder"
    return scheme.weights_alone_unsupported_reason


def register_method() -> None:
    register_quantization_config(QUANT_METHOD)(MXFP4RLVLLMConfig)
