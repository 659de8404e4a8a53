# SPDX-License-Identifier: Apache-2.0
"""Models with random weights for whole runs: nothing is downloaded, and what a step costs does not depend on values."""

from dataclasses import replace
from types import ModuleType

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.integrations.transformers.swap import quantize_linears

from .machine import Machine
from .peers import need
from .shapes import QWEN_1_5B, TINY


#: Of Qwen2.5. The tokenizer of the runs below has fewer tokens and reads the others as nothing.
VOCABULARY = 151_936
LORA_RANK = 16


def build(machine: Machine, dtype: torch.dtype, seed: int = 0) -> Qwen2ForCausalLM:
    """A Qwen2.5-1.5B of random weights on the device, tied embeddings as in the original; with --tiny two blocks of a
    few thousand."""
    shape = TINY if machine.tiny else QWEN_1_5B
    config = Qwen2Config(
        vocab_size=320 if machine.tiny else VOCABULARY,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        dtype=dtype,
    )
    before = torch.get_default_dtype()
    torch.manual_seed(seed)
    torch.set_default_dtype(dtype)
    try:
        with machine.device:
            model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def quantized(model: Qwen2ForCausalLM, config: MXFP4RLConfig, machine: Machine) -> Qwen2ForCausalLM:
    """``model`` with our layers in place of its linear ones, as `from_pretrained` makes it. Interpreted, the kernels of
    GPUs run where the CPU's would, and without macro blocks, to be done in seconds."""
    if machine.interpreted:
        backend = "triton" if config.backend == "auto" else config.backend
        config = replace(config, backend=backend, macro_block=None, macro_search="hybrid")
    quantize_linears(model, config)
    model.config.quantization_config = config
    return model


def nf4(model: Qwen2ForCausalLM, machine: Machine) -> Qwen2ForCausalLM:
    """``model`` with the layers of QLoRA in place of the same linear ones. Raises `Absent` without bitsandbytes."""
    bnb = need("bitsandbytes")
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head":
            owner, _, own = name.rpartition(".")
            setattr(model.get_submodule(owner), own, _nf4_layer(bnb, layer, machine))
    # What transformers sets on models that it loads so, and PEFT looks for.
    model.is_loaded_in_4bit = True
    return model


def _nf4_layer(bnb: ModuleType, linear: nn.Linear, machine: Machine) -> nn.Module:
    features = linear.in_features, linear.out_features
    options = {"bias": linear.bias is not None, "compute_dtype": torch.bfloat16, "quant_type": "nf4"}
    layer = bnb.nn.Linear4bit(*features, **options, device="meta")
    layer.weight = bnb.nn.Params4bit(linear.weight.detach().cpu(), requires_grad=False, quant_type="nf4")
    layer.bias = linear.bias
    layer.weight = layer.weight.to(machine.device)  # which quantizes it
    return layer


@torch.no_grad()
def logits(model: Qwen2ForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).logits.float()


def tokenizer() -> PreTrainedTokenizerFast:
    """A token per byte; made here, so that nothing is downloaded."""
    from recipes.tasks.tiny_model import build_byte_tokenizer

    return build_byte_tokenizer()


def prompts(count: int):
    """A dataset of prompts of one length."""
    from datasets import Dataset

    return Dataset.from_list([{"prompt": f"{i:3d} + {2 * i:3d} = "} for i in range(count)])
