# SPDX-License-Identifier: Apache-2.0
"""vLLM on a CPU, as a GPU has it: with weights that can be pushed again, computed by plain torch.

vLLM's CPU backend packs weights for its own products and drops the originals, which no other platform does. The
functions that do this are replaced when this module is imported, before any model is made: in this process, or in that
of a server, whose worker has [`Extension`]. Nothing of this package is imported: exports are served without it, too.
"""

import gc
import itertools
import json
import os
from collections.abc import Callable, Iterator
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
from safetensors.torch import save_file
from tiny_models import make_model
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.layers import utils, vocab_parallel_embedding
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


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

#: Families of models, with what makes their experts small enough; and names for two more.
MODELS = {
    "qwen2 tied": ("qwen2", {"tie": True}),
    "qwen3 tied": ("qwen3", {"tie": True}),
    "qwen3_moe": ("qwen3_moe", {"moe_intermediate_size": 128}),
    "mixtral": ("mixtral", {"intermediate": 128}),
    "gpt_oss": ("gpt_oss", {"intermediate": 128}),
}
EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss")

#: float32 and no compilation: differences are those of two orders of summation.
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
}

#: Options of TRL for vLLM in its own process.
COLOCATED = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 64, "vllm_gpu_memory_utilization": 0.1}

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


def in_float32(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Have TRL start vLLM in float32: it says no dtype, and float32 checkpoints are computed in bfloat16."""
    import trl.generation.vllm_generation as generation

    make = generation.LLM
    options = {"dtype": "float32", "enforce_eager": True, "disable_log_stats": True}
    replace(generation, "LLM", lambda **given: make(**{**given, **options}))


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


def values_inside(inside: dict[str, torch.Tensor], name: str, scheme: Any) -> torch.Tensor:
    """The float32 values of the packed weight of layer ``name`` in what [`served_weights`] found."""
    from hf_mxfp4.ops import packed_shapes, weight_values

    packed = {part: inside[f"{name}.{part}"] for part in packed_shapes(1, 32, scheme)}
    return weight_values(packed, 2 * packed["weight"].shape[1], scheme, torch.float32)


def saved_model(folder: Path, family: str, seed: int = 0, settings: dict | None = None, **scheme: Any) -> tuple:
    """A quantized checkpoint in ``folder / "saved"`` with the plugin's ``settings``; the model, and the full-precision
    one that it is of, in ``folder / "base"``."""
    from transformers import AutoModelForCausalLM

    from hf_mxfp4 import MXFP4RLConfig

    family, options = MODELS.get(family, (family, {}))
    base = tiny_model(family, seed=seed, **options)
    base.save_pretrained(folder / "base")
    config = MXFP4RLConfig(**scheme)
    model = AutoModelForCausalLM.from_pretrained(folder / "base", quantization_config=config)
    model.save_pretrained(folder / "saved")
    if settings:
        with_settings(folder / "saved", **settings)
    return model.eval(), base


def with_settings(folder: Path, **settings: Any) -> Path:
    """Write the plugin's settings into the checkpoint in ``folder``, and return it."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["vllm"] = settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def push(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Load one tensor in each call, by the names of transformers, as TRL does."""
    for name, tensor in tensors.items():
        model.load_weights([(name, tensor.detach())])


def reload(llm: "vllm.LLM", tensors: dict[str, torch.Tensor]) -> None:
    """Load all tensors anew, as vLLM does it."""
    model = served_model(llm)
    initialize_layerwise_reload(model)
    model.load_weights(tensors.items())
    finalize_layerwise_reload(model, llm.llm_engine.vllm_config.model_config)


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


# ---- in the worker of a server ---------------------------------------------------------------------------------------

#: Tensors that are given to the model at once: the packed broadcasts of NCCL have as many as fit into a buffer.
_AT_ONCE = 3


class StoreWeightTransferEngine(NCCLWeightTransferEngine):
    """vLLM's NCCL engine with a TCP store in the place of NCCL: what begins and ends an update is NCCL's."""

    def init_transfer_engine(self, init_info):
        self.group = StatelessProcessGroup.create(
            init_info.master_address,
            init_info.master_port,
            self.parallel_config.rank + init_info.rank_offset,
            init_info.world_size,
        )

    def update_weights(self, update_info):
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info):
        expected = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
        while batch := list(itertools.islice(expected, _AT_ONCE)):
            self.model.load_weights([(name, self._receive(dtype, shape)) for name, dtype, shape in batch])

    def _receive(self, dtype: str, shape: list[int]) -> torch.Tensor:
        tensor = self.group.broadcast_obj(None, src=0)
        if (str(tensor.dtype), list(tensor.shape)) != (f"torch.{dtype}", shape):
            raise ValueError(f"announced {dtype} {shape}, sent {tensor.dtype} {list(tensor.shape)}")
        return tensor

    def shutdown(self):
        self.group = None


WeightTransferEngineFactory.register_engine("store", StoreWeightTransferEngine)


class Extension:
    """Methods of the worker, for the server's `/collective_rpc`."""

    def save_served_weights(self, path: str) -> None:
        """Write the weights of the model as they are now, by the names that transformers has for them."""
        served = served_weights(self.model_runner.get_model())
        save_file({name: tensor.contiguous() for name, tensor in served.items()}, path)
