# SPDX-License-Identifier: Apache-2.0
"""OpenAI's gpt-oss checkpoints (`quant_method: mxfp4`): transformers, vLLM, and whatever else runs those models.

Experts are MXFP4, all else is bfloat16. Blocks of 32 codes lie together: `[experts, N, K/32, 16]`, which are our bytes
`[experts, N, K/2]`. Rows of gate and up alternate, as in the model.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ...config import MXFP4RLConfig
from ...numerics import BLOCK_SIZE
from ..folder import CheckpointError, CheckpointFolder, StoredTensor
from ..names import LayerShape
from .base import Format, ImportableFormat, Names, Packed, Read
from .compressed_tensors import has_experts


#: Of OpenAI's own checkpoints.
_NOT_CONVERTED = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")


class GptOssFormat(ImportableFormat):
    """The checkpoints of gpt-oss, with MXFP4 experts."""

    name = "gpt-oss"
    quant_method = "mxfp4"

    def for_checkpoint(self, folder: CheckpointFolder, model: torch.nn.Module, quantizes_inputs: bool) -> Format:
        if (kind := model.config.model_type) != "gpt_oss":
            raise CheckpointError(
                f"format 'gpt-oss' cannot hold {folder.path}: it is for the architecture 'gpt_oss', not {kind!r}"
            )
        return self

    def leaves_out(self, shape: LayerShape) -> str | None:
        return "only experts are MXFP4 in this format" if shape.experts is None else None

    def plain_name(self, name: str) -> str:
        return name.removesuffix("_blocks")

    def marks(self, tensor: StoredTensor) -> bool:
        return tensor.name.endswith("_scales")

    def tensors(self, layer: str, shape: LayerShape, packed: Packed) -> dict[str, torch.Tensor]:
        blocks = packed["weight"].unflatten(-1, (-1, BLOCK_SIZE // 2))
        return {f"{layer}_blocks": blocks, f"{layer}_scales": packed["weight_scale"]}

    def read(self, layer: str, shape: LayerShape, expert: int | None, read: Read) -> dict[str, torch.Tensor]:
        return {
            "weight": read(f"{layer}_blocks", expert).flatten(-2),
            "weight_scale": read(f"{layer}_scales", expert),
        }

    def quantization_config(self, config: MXFP4RLConfig, ignored: Names, quantized: Names = ()) -> dict[str, Any]:
        experts = [name for name in ignored if has_experts([name])]
        return {"quant_method": self.quant_method, "modules_to_not_convert": [*_NOT_CONVERTED, *experts]}

    def read_config(self, options: Mapping[str, Any]) -> tuple[MXFP4RLConfig, list[str]]:
        known = {"quant_method", "modules_to_not_convert", "dequantize"}
        if unknown := sorted(options.keys() - known):
            raise CheckpointError(f"quantization_config has {unknown[0]!r}, which this package has no equal of")
        # Which rule made the scales is not recorded. When adapters are merged into weights on the grid, `even` loses
        # least: an element that grows from 6 does not double the scale of its block.
        config = MXFP4RLConfig(mode="packed", preset="w4a16", scale_rule="even", macro_block=None)
        return config, ["The scales are taken as they are; when adapters are merged, weights are quantized by 'even'."]
