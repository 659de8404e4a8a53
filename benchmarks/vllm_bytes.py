# SPDX-License-Identifier: Apache-2.0
"""What a push of weights to vLLM takes, in bytes; writes `benchmarks/results/vllm_bytes.json`.

    python -m benchmarks.vllm_bytes

The trainer's own code pushes policies of the shapes of real models, of float32 masters without memory, to a vLLM that
keeps bfloat16: the bytes of its tensors are counted. Beside them stands what the format needs: its bits for quantized
weights and for adapters, and 16 for all others.
"""

from types import SimpleNamespace

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration

from hf_mxfp4 import MXFP4GRPOConfig, MXFP4RLConfig
from hf_mxfp4.gemm.storage.packed_weight import packed_shapes
from hf_mxfp4.layers import TRAINABLE
from hf_mxfp4.quantizer.swap import quantize_linears
from hf_mxfp4.rl.rollout.vllm import VLLMPolicy
from hf_mxfp4.rl.rollout.vllm_held import bytes_in_16_bits
from hf_mxfp4.vllm_plugin.settings import EngineSettings

from .macro_factors import FACTORS, FACTORS_OF
from .records import made, option_parser, write


COMMAND = "python -m benchmarks.vllm_bytes"
RANK = 32

#: Shapes as in the config.json of the models.
_QWEN = {"vocab_size": 151936, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2}
MODELS = {
    "Qwen2.5-3B": (
        "qwen2",
        {**_QWEN, "num_hidden_layers": 36, "intermediate_size": 11008, "tie_word_embeddings": True},
    ),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        {
            **_QWEN,
            "num_hidden_layers": 48,
            "intermediate_size": 6144,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
}
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
SCHEMES = {
    "macro blocks of 128": MXFP4RLConfig(preset="w4a16", outlier_fallback=None, **FACTORS),
    "with outlier fallback": MXFP4RLConfig(**FACTORS_OF),
}


def pushes(model: torch.nn.Module, scheme: MXFP4RLConfig) -> list[int]:
    """Bytes of the first push and of the second."""
    args = MXFP4GRPOConfig(use_cpu=True, bf16=False, use_vllm=True, aqn=False)
    generation = object.__new__(VLLMGeneration)
    generation.mode, generation.enable_sleep_mode = "colocate", False
    generation.model, generation.accelerator = model, Accelerator(cpu=True)
    generation._dist = DistributedBackend(generation.accelerator)
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        quant_config=SimpleNamespace(scheme=scheme, settings=EngineSettings("packed", RANK)),
    )
    generation.llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))
    found = []
    record = lambda name, value: found.append(value) if name == "vllm/sync_bytes" else None  # noqa: E731
    VLLMPolicy(generation, model, args, None, lambda: (0, 0.0), record)
    for _ in range(2):
        for _ in generation._iter_named_params():
            pass
    return found


def needed(model: torch.nn.Module, bits: float) -> float:
    """Bytes of all weights, quantized ones in so many bits each."""
    layers = [module for module in model.modules() if isinstance(module, TRAINABLE)]
    quantized = sum(p.numel() for layer in layers for p in layer.parameters(recurse=False) if p.dim() > 1)
    return bytes_in_16_bits(model) - 2 * quantized + quantized * bits / 8


def measure(name: str, scheme_name: str) -> list[dict]:
    """A record for each kind of push."""
    (family, sizes), scheme = MODELS[name], SCHEMES[scheme_name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes), dtype=torch.float32)
    quantize_linears(model, scheme)
    bits = sum(size for _, size in packed_shapes(1, 4096, scheme.weight_scheme).values()) / 512
    plain = bytes_in_16_bits(model)
    rows = {"QAT": (pushes(model, scheme)[1], needed(model, bits))}
    base = needed(model, bits)
    targets = [*_ATTENTION, *([] if family == "qwen3_moe" else _MLP)]
    adapted = get_peft_model(model, LoraConfig(r=RANK, target_modules=targets, task_type="CAUSAL_LM"))
    adapters = 2 * sum(p.numel() for key, p in adapted.named_parameters() if "lora_" in key)
    first, later = pushes(adapted, scheme)
    rows[f"LoRA of rank {RANK}, the first"] = first, base + adapters
    rows["LoRA, every other"] = later, adapters
    return [
        {
            "name": f"{name}, {scheme_name}: {what}",
            "model": name,
            "scheme": scheme_name,
            "bits": bits,
            "push": what,
            "shape": [plain // 2],
            "value": size / 2**20,
            "unit": "MiB",
            "baseline": plain / 2**20,
            "ratio": size / plain,
            "ceiling_fraction": None,
            "needed": need / 2**20,
            "over_needed": size / need,
            **made(COMMAND, ("torch", "transformers", "trl", "peft"), "meta tensors: sizes alone"),
        }
        for what, (size, need) in rows.items()
    ]


def main() -> None:
    args = option_parser(__doc__, "vllm_bytes").parse_args()
    records = [record for name in MODELS for scheme in SCHEMES for record in measure(name, scheme)]
    for record in records:
        print(f"{record['name']}: {record['value']:,.0f} MiB, {record['over_needed']:.3f} of what is needed")
    write(records, args.out)


if __name__ == "__main__":
    main()
