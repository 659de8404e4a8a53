# SPDX-License-Identifier: Apache-2.0
"""vLLM's view of `quant_method: mxfp4_rl`, through its documented interface for methods that it does not know.

Linear layers (`linears.py`) and experts (`experts.py`) keep codes and scales, or dense values where the settings of the
checkpoint say so. Whatever is loaded, from disk or from a trainer, is converted on its way (`weight_loading.py`).
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.models.utils import WeightsMapper

from ...config import QUANT_METHOD, MXFP4RLConfig
from ...model.layer_names import ALWAYS_SKIPPED, NamePatterns
from . import SETTINGS_KEY, EngineSettings
from .linears import MXFP4RLDenseLinearMethod, MXFP4RLLinearMethod
from .weight_loading import ExpectedLayers, WeightConverter, Weights


class ConvertingMapper(WeightsMapper):
    """Converts weights, then maps their names as other mappers do. vLLM sends every stream of weights through it."""

    def __init__(self, convert: Callable[[Weights], Weights], others: WeightsMapper | None = None):
        super().__init__()
        self.convert = convert
        self.others = others or WeightsMapper()

    def __or__(self, other: WeightsMapper) -> "ConvertingMapper":
        return ConvertingMapper(self.convert, self.others | other)

    def __ror__(self, other: WeightsMapper) -> "ConvertingMapper":
        return ConvertingMapper(self.convert, other | self.others)

    def _map_name_with_shard(self, key: str):
        return self.others._map_name_with_shard(key)

    def apply(self, weights: Weights) -> Weights:
        return self.others.apply(self.convert(weights))


class MXFP4RLVLLMConfig(QuantizationConfig):
    """Scheme of a packed checkpoint, or of one of master weights, as vLLM asks for it.

    Raises `ValueError` for master weights whose quantized values are not what the policy computes with, and for
    versions of vLLM that do not let a plugin convert weights.
    """

    def __init__(self, scheme: MXFP4RLConfig, settings: EngineSettings | None = None):
        super().__init__()
        settings = settings or EngineSettings()
        if not hasattr(QuantizationConfig, "get_checkpoint_weight_mapper"):
            raise ValueError("this version of vLLM does not let a plugin convert weights: install vLLM 0.31 or newer")
        reason = scheme.weights_alone_unsupported_reason
        if scheme.mode == "qat" and reason is not None:
            raise ValueError(
                f"this checkpoint has mode={scheme.mode!r}, full-precision master weights, and vLLM cannot compute "
                f"with their quantized values: {reason}"
            )
        if scheme.weight_rotation is not None and settings.weights != "packed":
            raise ValueError(
                f"{SETTINGS_KEY}.weights={settings.weights!r}: weights that were rotated before they were packed "
                f"({scheme.weight_rotation}) can only be kept as they are stored; use 'packed'"
            )
        self.scheme = scheme
        self.settings = settings
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
        return []  # the scheme is in config.json

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "MXFP4RLVLLMConfig":
        return cls(MXFP4RLConfig.from_dict(config), EngineSettings.read(config.get(SETTINGS_KEY)))

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Learn from the config of the model how vLLM reads its experts."""
        self.expected.is_transposed = getattr(hf_config, "model_type", None) == "gpt_oss"

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return what computes a layer that vLLM has made under the name ``prefix``; `None` for its own method."""
        # The defaults are those of the model while vLLM makes layers.
        self.expected.device = torch.get_default_device()
        self.expected.dtype = torch.get_default_dtype()
        if isinstance(layer, LinearBase):
            return self._linear_method(prefix)
        # By name: the class has moved between versions of vLLM.
        if any(cls.__name__ in ("RoutedExperts", "FusedMoE") for cls in type(layer).__mro__):
            return self._experts_method(layer, prefix)
        return None

    def _linear_method(self, prefix: str) -> Any:
        """Return what computes a linear layer."""
        if self._skips(prefix):
            return UnquantizedLinearMethod()
        has_mla = prefix.endswith(".kv_b_proj") and os.environ.get("VLLM_MLA_DISABLE", "0") in ("", "0")
        if has_mla and self.scheme.activation_scheme is not None:
            raise ValueError(
                f"{prefix}: vLLM multiplies parts of this weight with queries and attention outputs, not with the "
                "inputs that the scheme quantizes; set VLLM_MLA_DISABLE=1, or use preset='w4a16'"
            )
        parts = self._parts(prefix)
        self.expected.linears.update(parts)
        method = MXFP4RLLinearMethod if self.expected.is_packed else MXFP4RLDenseLinearMethod
        return method(self.scheme, prefix, self.expected, parts)

    def _experts_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return what computes the experts of a layer; `None` for vLLM's own method."""
        if ".block_sparse_moe." in prefix:
            self.expected.has_old_names = True
        if self._skips(prefix):
            return None
        if self.scheme.weight_rotation is not None:
            raise ValueError(
                f"{prefix}: inputs of experts are not rotated by this plugin ({self.scheme.weight_rotation}); export "
                "the checkpoint with hf-mxfp4 export --format bf16"
            )
        from .experts import experts_method

        return experts_method(layer, self.scheme, self.expected, prefix)

    def get_checkpoint_weight_mapper(self) -> ConvertingMapper:
        """Return what vLLM sends all weights through before it loads them."""
        convert = WeightConverter(self.scheme, self.expected)
        return ConvertingMapper(convert, super().get_checkpoint_weight_mapper())

    def _parts(self, prefix: str) -> list[str]:
        """Return the layers that vLLM has joined under ``prefix``, by the names that they have in checkpoints."""
        prefix = prefix.replace(".block_sparse_moe.", ".mlp.")  # Mixtral: vLLM has the older names
        if self.expected.is_transposed:  # gpt-oss: vLLM has names of its own
            prefix = prefix.replace(".attn.", ".self_attn.")
        parent, _, last = prefix.rpartition(".")
        return [f"{parent}.{part}".lstrip(".") for part in self.packed_modules_mapping.get(last, [last])]

    def _skips(self, prefix: str) -> bool:
        """Return whether the layers that vLLM has joined under ``prefix`` are in full precision; they must agree."""
        names = self._parts(prefix)
        given = list(self.scheme.modules_to_not_convert or ())
        kept = tuple(f"{name}." for name in self.scheme.full_precision or ())
        patterns = NamePatterns((*ALWAYS_SKIPPED, *given))
        skipped = {f"{name}.".startswith(kept) or patterns.match(name) for name in names}
        if len(skipped) > 1:
            raise ValueError(
                f"vLLM joins {', '.join(names)} into one layer, but modules_to_not_convert={given} skips only some of "
                "them"
            )
        return skipped.pop()
