# SPDX-License-Identifier: Apache-2.0
"""vLLM on a CPU, as a GPU has it: with weights that can be pushed again, computed by plain torch.

vLLM's CPU backend packs weights for its own products and drops the originals, which no other platform does. The
functions that do this are replaced when this module is imported, before any model is made.
"""

import gc
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine in this process, where its weights can be looked at
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
)

import torch
import vllm
from tiny_models import make_model
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.layers import utils, vocab_parallel_embedding
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts


def _plain_linear(layer: torch.nn.Module, remove_weight: bool = True) -> None:
    """Multiply by the weight that the layer has now; in place of vLLM's, which packs the present one for good."""
    layer.cpu_linear = torch.nn.functional.linear


for _module in (utils, vocab_parallel_embedding):
    _module.dispatch_cpu_unquantized_gemm = _plain_linear

_experts_apply = CPUUnquantizedExperts.apply


def _keep_experts(self: CPUUnquantizedExperts, layer: torch.nn.Module) -> None:
    """Leave the weights as they are; sizes of tests need no padding."""
    self._use_zentorch = False


def _apply_experts(self: CPUUnquantizedExperts, *, w1: torch.Tensor, w2: torch.Tensor, **others: Any) -> None:
    """Compute as vLLM does, with the weights of now packed for this product alone."""
    packed = [cpu_prepack_moe_weight(weight, self.isa) for weight in (w1, w2)]
    _experts_apply(self, w1=packed[0], w2=packed[1], **others)


CPUUnquantizedExperts.process_weights_after_loading = _keep_experts
CPUUnquantizedExperts.apply = _apply_experts

#: Sizes for which vLLM's CPU attention has kernels, and columns that macro blocks of 128 divide.
SIZES = {"hidden": 256, "intermediate": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}

#: float32 and no compilation: differences are those of two orders of summation.
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
}

#: Prompts, no token of them special.
PROMPTS = torch.randint(2, 32, (3, 24), generator=torch.Generator().manual_seed(0)).tolist()


def tiny_model(family: str = "qwen2", **options: Any) -> torch.nn.Module:
    """A random decoder of two layers that vLLM can run on a CPU, whose tokens are far from equally likely."""
    model = make_model(family, **{**SIZES, **options})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0 if "embed" in name else 2.0)
    return model


@contextmanager
def engine(folder: str | Path, **options: Any) -> Iterator["vllm.LLM"]:
    """vLLM with the checkpoint in ``folder``; its memory is given back at the end.

    One at a time, and nothing of it may be held when the next is made: an engine that is collected later takes down the
    process groups of the one that is running."""
    llm = None
    try:
        llm = vllm.LLM(str(folder), **{**OPTIONS, **options})
        yield llm
    finally:
        del llm
        give_back()


def give_back() -> None:
    """Take down the process groups of an engine and collect what it has left."""
    gc.collect()
    cleanup_dist_env_and_memory()


def served_model(llm: "vllm.LLM") -> torch.nn.Module:
    """The model inside of an engine that runs in this process."""
    return llm.llm_engine.model_executor.driver_worker.model_runner.model


def served_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the weights of a served model, by the names that transformers has for them: joined layers are split."""
    joined = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    found = {}
    for name, parameter in model.named_parameters():
        parent, _, own = name.rpartition(".")
        owner, _, last = parent.rpartition(".")
        parts = joined.get(last)
        sizes = model.get_submodule(parent).output_sizes if parts else [len(parameter)]
        for part, value in zip(parts or [last], parameter.detach().split(sizes), strict=True):
            found[f"{owner}.{part}.{own}".lstrip(".")] = value.clone()
    return found


def with_settings(folder: Path, **settings: Any) -> Path:
    """Write the plugin's settings into the checkpoint in ``folder``, and return it."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["vllm"] = settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def vllm_logprobs(llm: "vllm.LLM", prompts: list[list[int]] = PROMPTS, **options: Any) -> torch.Tensor:
    """Log-probabilities ``[prompts, length - 1]`` of the tokens of the prompts, by vLLM."""
    parameters = vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False, **options)
    rows = [
        [chosen[token].logprob for token, chosen in zip(ids[1:], out.prompt_logprobs[1:], strict=True)]
        for ids, out in zip(prompts, outputs, strict=True)
    ]
    return torch.tensor(rows)


@torch.no_grad()
def model_logprobs(model: torch.nn.Module, prompts: list[list[int]] = PROMPTS) -> torch.Tensor:
    """The same by a model of transformers."""
    ids = torch.tensor(prompts)
    logits = model.eval()(ids).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
