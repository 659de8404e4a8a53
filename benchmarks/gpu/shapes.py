# SPDX-License-Identifier: Apache-2.0
"""Sizes of the linear layers of public models, from their `config.json` on the Hub."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Dense:
    """A decoder of the Qwen2 family.

    Attributes are named as in the model's config.
    """

    name: str
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    num_hidden_layers: int
    head_dim: int = 128

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """``(out_features, in_features)`` of the layers of a block, of those alike one."""
        attention, key_value = (self.head_dim * n for n in (self.num_attention_heads, self.num_key_value_heads))
        return {
            "q_proj": (attention, self.hidden_size),
            "k_proj": (key_value, self.hidden_size),
            "gate_proj": (self.intermediate_size, self.hidden_size),
            "down_proj": (self.hidden_size, self.intermediate_size),
        }


@dataclass(frozen=True)
class Experts:
    """The experts of one layer of a mixture; attributes are named as in the model's config."""

    name: str
    hidden_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int


QWEN_1_5B = Dense("Qwen2.5-1.5B", 1536, 8960, 12, 2, 28)
QWEN_3B = Dense("Qwen2.5-3B", 2048, 11008, 16, 2, 36)
QWEN_7B = Dense("Qwen2.5-7B", 3584, 18944, 28, 4, 28)
QWEN_32B = Dense("Qwen2.5-32B", 5120, 27648, 40, 8, 64)
QWEN3_30B_A3B = Experts("Qwen3-30B-A3B", 2048, 768, 128, 8)

#: Stands for all dense models with --tiny; no size is a multiple of another's tile.
TINY = Dense("tiny", 96, 160, 3, 1, 1, head_dim=32)
TINY_EXPERTS = Experts("tiny", 64, 32, 4, 2)
