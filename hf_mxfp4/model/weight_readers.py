# SPDX-License-Identifier: Apache-2.0
"""Modules of transformers that read the weight of a linear layer, instead of calling the layer.

Such code passes ``self.out_proj.weight`` to a fused kernel, or casts to its dtype. Of a quantized layer it would see
master weights or packed bytes, so these layers stay in full precision. Of models that are not listed here, users name
such layers in ``modules_to_not_convert``.
"""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class WeightReader:
    """Code that reads weights of the layers in modules of some classes.

    Attributes:
        classes: names of the classes, also of base classes.
        layers: attributes of such a module.
        method: where the weights are read: a method of the same class, or ``"Class.method"`` of another one.
        option: an attribute without which the code does not run.
    """

    classes: str
    layers: tuple[str, ...]
    method: str = "forward"
    option: str = ""

    def describe(self, owner: str) -> str:
        """Return ``"Class.method"`` for a module of the class ``owner``."""
        return self.method if "." in self.method else f"{owner}.{self.method}"


#: As of transformers 5.24.
_READERS = (
    # Feed-forward layers of encoder-decoders: they cast states to the dtype of the weight.
    WeightReader("T5DenseActDense T5DenseGatedActDense MT5DenseActDense MT5DenseGatedActDense", ("wo",)),
    WeightReader("UMT5DenseActDense UMT5DenseGatedActDense UdopDenseActDense UdopDenseGatedActDense", ("wo",)),
    WeightReader("Pop2PianoDenseActDense Pop2PianoDenseGatedActDense LongT5DenseActDense", ("wo",)),
    WeightReader("Pix2StructTextDenseGatedActDense SwitchTransformersDenseActDense", ("wo",)),
    WeightReader("NllbMoeDenseActDense SeamlessM4TFeedForwardNetwork SeamlessM4Tv2FeedForwardNetwork", ("fc2",)),
    # State-space layers: they pass weights to fused kernels.
    WeightReader("MambaMixer FalconMambaMixer", ("x_proj", "dt_proj", "out_proj")),
    WeightReader("JambaMambaMixer", ("dt_proj",)),
    WeightReader("BambaMixer FalconH1Mixer GraniteMoeHybridMambaLayer Mamba2Mixer", ("out_proj",)),
    WeightReader("NemotronHMamba2Mixer Zamba2MambaMixer", ("out_proj",)),
    # Indexers of sparse attention: they compute in the dtype of the weight.
    WeightReader("AXK2Indexer DeepseekV32Indexer Dots3NoteTextIndexer Glm5NextTextIndexer", ("weights_proj",)),
    WeightReader("GlmMoeDsaIndexer HYV4Indexer HYV4VLIndexer MistralLarge4TextIndexer", ("weights_proj",)),
    # Attention that cuts a weight by heads, or passes it to a function of torch.
    WeightReader("DisentangledSelfAttention", ("in_proj",)),
    WeightReader("LSHSelfAttention", ("query_key",), "_query_per_attn_head"),
    WeightReader("LSHSelfAttention", ("value",), "_value_per_attn_head"),
    WeightReader("WavLMAttention", ("q_proj", "k_proj", "v_proj", "out_proj"), "torch_multi_head_self_attention"),
    # Weights that are changed in place: scaled by depth, or clipped in training.
    WeightReader("RwkvSelfAttention", ("output",), "RwkvModel._rescale_layers"),
    WeightReader("RwkvFeedForward", ("value",), "RwkvModel._rescale_layers"),
    WeightReader("Gemma3nTextAltUp", ("prediction_coefs",), "predict"),
    WeightReader("Gemma3nTextAltUp", ("correction_coefs",), "correct"),
    # Products that are split as tensor parallelism splits them.
    WeightReader("BloomAttention", ("dense",), option="slow_but_exact"),
    WeightReader("BloomMLP", ("dense_4h_to_h",), option="slow_but_exact"),
)


def find_weight_readers(model: nn.Module) -> dict[nn.Module, str]:
    """Return the linear layers of ``model`` whose weight is read outside of them, each with what reads it."""
    readers = {}
    for owner in model.modules():
        bases = [base.__name__ for base in type(owner).__mro__]
        for entry in _READERS:
            name = next((name for name in entry.classes.split() if name in bases), None)
            if name is None or (entry.option and not getattr(owner, entry.option)):
                continue
            for attribute in entry.layers:
                layer = getattr(owner, attribute, None)  # DeBERTa v2 has another class of the name that v1 has
                if isinstance(layer, nn.Module):
                    readers[layer] = entry.describe(name)
    return readers
