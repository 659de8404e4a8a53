# SPDX-License-Identifier: Apache-2.0
"""What layers launch on a GPU that is not there, kernels of ours and operators of torch, in order; prints JSON.

python run_launches.py GPU
"""

import contextlib
import json
import sys

import peft
import torch
from torch import nn
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

import hf_mxfp4.integrations.peft  # noqa: F401  (makes PEFT know the layers)
from benchmarks.gpu.model.gpus import GPUS
from benchmarks.gpu.model.stub import cuda_of, stub_gpu
from hf_mxfp4 import MXFP4Linear, MXFP4PackedLinear, MXFP4RLConfig, cached_weights
from hf_mxfp4.gemm import GemmSpec, GemmState, Groups, LayerRng, quantized_linear


#: Trained layers by their names in the table.
TRAINED = {
    "w4a4": {"preset": "w4a4", "macro_block": None, "outlier_fallback": None},
    "w4a4, default": {"preset": "w4a4"},
    "w4a4g8": {"preset": "w4a4g8", "macro_block": None, "outlier_fallback": None},
    "w4a4g8, macro 128": {"preset": "w4a4g8", "macro_search": "hybrid", "outlier_fallback": None},
    "w4a4g8, default": {"preset": "w4a4g8"},
    "w4a4g4": {"preset": "w4a4g4", "macro_block": None, "outlier_fallback": None},
    "w4a4g4, macro 128": {"preset": "w4a4g4", "macro_search": "hybrid", "outlier_fallback": None},
    "w4a4g4, default": {"preset": "w4a4g4"},
    "w4a4, saved fp8": {"preset": "w4a4", "macro_block": None, "outlier_fallback": None, "saved_activations": "fp8"},
    "w4a4, default, saved fp8": {"preset": "w4a4", "saved_activations": "fp8"},
}
#: One projection of experts, by their names in the table.
EXPERTS = ("w4a4g8", "w4a4g8, macro 128", "w4a4g8, default", "w4a4g4")
N_EXPERTS = 8
TOKENS, SIZE = 1024, 512
#: Linear layers of a decoder layer.
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Cache:
    """Keys and values of the tokens before, with those of a new one appended at each call."""

    def __init__(self, keys, values):
        self.keys, self.values = keys, values

    def update(self, keys, values, *_, **__):
        return torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)


class Launches:
    """Calls on one stub; each runs twice, and the second time counts."""

    def __init__(self, steps, device):
        self.steps, self.device = steps, device

    def empty(self, *shape):
        return torch.empty(*shape, dtype=torch.bfloat16, device=self.device)

    def of(self, call):
        call()
        self.steps.clear()
        call()
        return [step.name.removesuffix("_kernel") for step in self.steps]

    def trained(self, options):
        """Forward, and both passes."""
        config = MXFP4RLConfig(**options)
        layer = MXFP4Linear(SIZE, SIZE, bias=False, device=self.device, dtype=torch.bfloat16, config=config)
        x, grad = self.empty(TOKENS, SIZE).requires_grad_(), self.empty(TOKENS, SIZE)
        forward = self.of(lambda: layer(x))
        both = self.of(lambda: torch.autograd.grad(layer(x), (x, layer.weight), grad))
        assert both[: len(forward)] == forward
        return {"forward": forward, "backward": both[len(forward) :]}

    def experts(self, options):
        """Forward, and both passes, of the product of all experts with rows that are sorted."""
        spec = GemmSpec(MXFP4RLConfig(**options).gemms(), gemm_kernel="auto")
        state = GemmState(spec, [LayerRng(0, f"experts.{number}") for number in range(N_EXPERTS)])
        weight = self.empty(N_EXPERTS, SIZE, SIZE).requires_grad_()
        x, grad = self.empty(TOKENS, SIZE).requires_grad_(), self.empty(TOKENS, SIZE)
        ends = torch.empty(N_EXPERTS, dtype=torch.int32, device=self.device)

        def product():
            return quantized_linear(x, weight, None, state, Groups.of_ends(ends, TOKENS))

        forward = self.of(product)
        both = self.of(lambda: torch.autograd.grad(product(), (x, weight), grad))
        return {"forward": forward, "backward": both[len(forward) :]}

    def packed(self, preset):
        config = MXFP4RLConfig(mode="packed", preset=preset)
        return MXFP4PackedLinear(SIZE, SIZE, False, self.device, torch.bfloat16, config=config, name="layer").eval()

    def with_lora(self, layer):
        config = peft.LoraConfig(r=8, target_modules=["layer"])
        return peft.get_peft_model(nn.ModuleDict({"layer": layer}), config).base_model.model["layer"].eval()

    def decoded(self, layer):
        x = self.empty(1, 1, SIZE)
        with torch.no_grad(), cached_weights(layer):
            return self.of(lambda: layer(x))

    def lora_trained(self):
        """Both passes of a packed layer with an adapter, whose factors are the only ones with gradients."""
        layer = self.with_lora(self.packed("w4a16")).to(torch.bfloat16)
        factors = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        x, grad = self.empty(TOKENS, SIZE).requires_grad_(), self.empty(TOKENS, SIZE)
        return self.of(lambda: torch.autograd.grad(layer(x), (x, *factors), grad))

    def decoder_layer(self, kind):
        """A token through a decoder layer of Qwen2: in bfloat16, packed, with adapters, or quantized as it is."""
        config = Qwen2Config(
            hidden_size=SIZE,
            intermediate_size=2 * SIZE,
            num_attention_heads=8,
            num_key_value_heads=4,
            num_hidden_layers=1,
            attn_implementation="sdpa",
        )
        layer = Qwen2DecoderLayer(config, 0).to(device=self.device, dtype=torch.bfloat16).eval()
        for name, linear in list(layer.named_modules()):
            if name.rpartition(".")[2] in LINEARS and kind != "bf16":
                layer.set_submodule(name, self._quantized(linear, f"layers.0.{name}", kind))
        if kind == "packed + LoRA":
            target = peft.LoraConfig(r=8, target_modules=list(LINEARS))
            layer = peft.get_peft_model(nn.ModuleDict({"one": layer}), target).base_model.model["one"].eval()
        x, angles = self.empty(1, 1, SIZE), (self.empty(1, 1, 64), self.empty(1, 1, 64))
        cache = Cache(self.empty(1, 4, 9, 64), self.empty(1, 4, 9, 64))
        with torch.no_grad(), contextlib.nullcontext() if kind == "bf16" else cached_weights(layer):
            return self.of(lambda: layer(x, position_embeddings=angles, past_key_values=cache))

    def _quantized(self, linear, name, kind):
        sizes = linear.in_features, linear.out_features, linear.bias is not None
        if kind == "QAT w4a4":
            config = MXFP4RLConfig(preset="w4a4")
            layer = MXFP4Linear(*sizes, device=self.device, dtype=torch.bfloat16, config=config)
            layer.name = name
            return layer.eval()
        config = MXFP4RLConfig(mode="packed", preset="w4a4" if kind == "packed w4a4" else "w4a16")
        return MXFP4PackedLinear(*sizes, self.device, torch.bfloat16, config=config, name=name).eval()


def launches(gpu):
    with stub_gpu(gpu) as steps:
        run = Launches(steps, cuda_of(gpu))
        found = {name: run.trained(options) for name, options in TRAINED.items()}
        found |= {f"experts, {name}": run.experts(TRAINED[name]) for name in EXPERTS}
        found |= {f"decode, packed {preset}": run.decoded(run.packed(preset)) for preset in ("w4a16", "w4a4")}
        found["decode, packed + LoRA"] = run.decoded(run.with_lora(run.packed("w4a16")))
        found["training, packed + LoRA"] = run.lora_trained()
        for kind in ("bf16", "packed w4a16", "packed w4a4", "QAT w4a4", "packed + LoRA"):
            found[f"token, {kind}"] = run.decoder_layer(kind)
    return found


if __name__ == "__main__":
    print(json.dumps(launches(next(gpu for gpu in GPUS if gpu.name == sys.argv[1]))))
