# SPDX-License-Identifier: Apache-2.0
"""Where the tensors of a model are in a GGUF file: their names there, and which rows of them.

The three differences between a model of transformers and what llama.cpp computes are all ones of rows:

* its rotary embedding of Llama turns neighbouring rows of a head instead of rows half a head apart, so those of ``q``
  and ``k`` are stored in another order (of the other architectures they are not);
* gate and up projections of experts are tensors of their own;
* gpt-oss has their rows by turns in the model.
"""

import re
from dataclasses import dataclass

import torch

from ...io.folder import CheckpointError
from .architectures import Architecture


#: Rows of a model's tensor that are in a tensor of the file, in the order there; of biases elements.
Rows = slice | torch.Tensor
ALL = slice(None)

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_SUFFIX = re.compile(r"(.+?)(?:\.(weight|bias)|_(bias))?")


@dataclass(frozen=True)
class TensorNames:
    """The names for one model: ``heads`` and ``kv_heads`` of its attention, ``head_dim`` rows each."""

    architecture: Architecture
    heads: int
    kv_heads: int
    head_dim: int

    def places(self, name: str, n_rows: int) -> dict[str, Rows]:
        """The tensors of the file that have the rows of ``name``, a tensor of the model with ``n_rows`` of them.

        Raises [`CheckpointError`] for a tensor that llama.cpp has no place for.
        """
        owner, of_layer, of_experts = _SUFFIX.fullmatch(name).groups()
        suffix = of_layer or of_experts or "weight"
        if owner in _TOP:
            return {f"{_TOP[owner]}.{suffix}": ALL}
        match = _IN_LAYER.fullmatch(owner)
        block, own = (f"blk.{match[1]}", match[2].replace("block_sparse_moe", "mlp")) if match else ("", owner)
        if own == "mlp.experts.gate_up_proj":
            gate, up = self._gate_and_up(n_rows)
            return {f"{block}.ffn_gate_exps.{suffix}": gate, f"{block}.ffn_up_exps.{suffix}": up}
        theirs = {**_LAYER, **self.architecture.own_names}.get(own)
        if theirs is None:
            raise CheckpointError(f"{name} has no place in a GGUF file of the architecture {self.architecture.name!r}")
        return {f"{block}.{theirs}.{suffix}": self._order(own)}

    def _gate_and_up(self, n_rows: int) -> tuple[slice, slice]:
        if self.architecture.gate_up_alternate:
            return slice(0, None, 2), slice(1, None, 2)
        return slice(0, n_rows // 2), slice(n_rows // 2, n_rows)

    def _order(self, own: str) -> Rows:
        heads = {"self_attn.q_proj": self.heads, "self_attn.k_proj": self.kv_heads}.get(own)
        if heads is None or not self.architecture.permutes_heads:
            return ALL
        return torch.arange(heads * self.head_dim).view(heads, 2, -1).transpose(1, 2).flatten()
