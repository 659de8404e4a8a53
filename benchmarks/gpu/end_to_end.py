# SPDX-License-Identifier: Apache-2.0
"""Whole runs on a model of the size of Qwen2.5-1.5B with random weights: `generate`, and a GRPO step."""

import contextlib
import io
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, TrainerCallback

from hf_mxfp4 import MXFP4RLConfig, cached_weights
from hf_mxfp4.integrations.transformers.swap import quantize_linears

from .bench import Absent, Bench, WrongResult, expect_close, seconds_of


#: Arms: the model as it is, in NF4, and two of ours.
BF16 = "BF16"
NF4 = "bitsandbytes NF4"
PACKED = "packed w4a16"
QAT = "QAT w4a4g4"
OURS = {PACKED: MXFP4RLConfig(mode="packed"), QAT: MXFP4RLConfig(preset="w4a4g4")}
#: Sizes of Qwen2.5-1.5B, and tiny ones.
SIZES = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
}
TINY = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "vocab_size": 320,
}
#: Of logits against those of the eager backend, both in bfloat16. Where activations are quantized, values that sums in
#: another order move across a rounding boundary move by a whole step.
TOLERANCES = {PACKED: 5e-2, QAT: 2e-1}


def build(bench: Bench, arm: str, dtype: torch.dtype = torch.bfloat16, backend: str = "triton") -> PreTrainedModel:
    """Return the model of an arm, the same weights each time. Raises [`Absent`] without bitsandbytes."""
    sizes = TINY if bench.tiny else SIZES
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = Qwen2Config(**sizes, **tokens, tie_word_embeddings=True)
    torch.manual_seed(0)
    with bench.device:
        model = Qwen2ForCausalLM(config).to(dtype).eval()
    if arm in OURS:
        if bench.tiny and backend == "triton":
            backend = "cpu"  # in the interpreter a step would take minutes
        config = replace(OURS[arm], backend=backend)
        quantize_linears(model, config)
        model.config.quantization_config = config
    elif arm == NF4:
        _to_nf4(model, bench.device)
    return model


def _to_nf4(model: nn.Module, device: torch.device) -> None:
    """Put the layers of QLoRA in place of the linear ones."""
    try:
        import bitsandbytes as bnb
    except ImportError as error:
        raise Absent("bitsandbytes is not installed") from error
    for name, linear in list(model.named_modules()):
        if isinstance(linear, nn.Linear) and name != "lm_head":
            options = {"bias": linear.bias is not None, "compute_dtype": torch.bfloat16, "quant_type": "nf4"}
            layer = bnb.nn.Linear4bit(linear.in_features, linear.out_features, **options, device="meta")
            weight = bnb.nn.Params4bit(linear.weight.detach().cpu(), requires_grad=False, quant_type="nf4")
            layer.weight = weight.to(device)  # which quantizes it
            layer.bias = linear.bias
            model.set_submodule(name, layer)
    model.is_loaded_in_4bit = True  # as transformers sets it, for PEFT


def generate(bench: Bench) -> None:
    """Record tokens per second of greedy `generate` in BF16, packed, as a QAT rollout, and in NF4."""
    batch, prompt, new = (2, 3, 2) if bench.tiny else (16, 128, 64)
    ids = torch.randint(2, 300, (batch, prompt), generator=torch.Generator().manual_seed(1)).to(bench.device)
    seconds: dict[tuple[str, str | None], float] = {}

    def measured(arm: str, cache: str | None) -> dict[str, Any]:
        model = build(bench, arm)
        # As in a rollout of ours: each weight is quantized once.
        kept: contextlib.AbstractContextManager = contextlib.nullcontext()
        if arm in OURS:
            kept = cached_weights(model)
        with torch.no_grad(), kept:
            if arm in OURS:
                expected = build(bench, arm, backend="eager")(ids).logits
                expect_close(f"{arm}: logits", model(ids).logits, expected, TOLERANCES[arm])
            options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "cache_implementation": cache}

            def call() -> torch.Tensor:
                return model.generate(ids, **options, min_new_tokens=new, max_new_tokens=new)

            if call().shape != (batch, prompt + new):
                raise WrongResult(f"generate did not make {new} tokens")
            taken = seconds_of(call, bench.device)
        seconds[arm, cache] = taken
        ratio = None
        if (BF16, cache) in seconds:
            ratio = seconds[BF16, cache] / taken
        return {
            "value": batch * new / taken,
            "unit": "tokens/s",
            "seconds": taken,
            "baseline": BF16,
            "ratio": ratio,
        }

    # With a static cache, transformers compiles the model and replays CUDA graphs.
    arms: list[tuple[str, str | None]] = [(BF16, "static"), (PACKED, "static")]
    arms += [(arm, None) for arm in (BF16, PACKED, QAT, NF4)]
    for arm, cache in arms:
        what = arm
        if cache is not None:
            what = f"{arm}, {cache} cache"
        bench.record("generate", what, [batch, prompt, new], lambda arm=arm, cache=cache: measured(arm, cache))


# ---- a GRPO step ----------------------------------------------------------------------------------------------------

#: Arm of a step: the model, whether adapters are trained, and the arm to compare with.
STEPS = {
    "TRL BF16": (BF16, False, None),
    "QLoRA NF4": (NF4, True, "TRL BF16"),
    "packed w4a16 + LoRA": (PACKED, True, "QLoRA NF4"),
    "QAT w4a4g4": (QAT, False, "TRL BF16"),
}


def grpo_step(bench: Bench) -> None:
    """Record seconds of a step of our trainer, and of TRL's on the same model in BF16 and NF4."""
    count, length, steps = (4, 3, 1) if bench.tiny else (32, 64, 2)
    seconds: dict[str, float] = {}

    def measured(name: str) -> dict[str, Any]:
        arm, adapters, baseline = STEPS[name]
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            trainer = _trainer(bench, folder, arm, adapters, (count, length, steps))
            clock = _Clock(bench.device)
            trainer.add_callback(clock)
            trainer.train()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        if len(logs) != steps + 1 or not all(_is_right(entry, length) for entry in logs):
            raise WrongResult(f"not {steps + 1} steps with a gradient and completions of {length} tokens: {logs}")
        # The first step warms up.
        seconds[name] = statistics.median(clock.seconds[1:])
        ratio = None
        if baseline in seconds:
            ratio = seconds[baseline] / seconds[name]
        return {"value": seconds[name], "unit": "s per step", "baseline": baseline, "ratio": ratio}

    for name in STEPS:
        bench.record("grpo_step", name, [count, length], lambda name=name: measured(name))


class _Clock(TrainerCallback):
    """Seconds of each step, its rollout included: that comes after the event of its beginning."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds: list[float] = []
        self._begun = 0.0

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._begun = self._now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(self._now() - self._begun)


def _is_right(log: dict[str, float], length: int) -> bool:
    finite = math.isfinite(log["loss"]) and math.isfinite(log["grad_norm"])
    return finite and log["grad_norm"] > 0 and log["completions/mean_length"] == length


def _trainer(bench: Bench, folder: str, arm: str, adapters: bool, sizes: tuple[int, int, int]) -> Any:
    """Make the trainer of an arm. Full weights are float32 under bfloat16 autocast; frozen ones are in bfloat16."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    from hf_mxfp4 import MXFP4GRPOConfig, MXFP4GRPOTrainer
    from hf_mxfp4.recipes.tasks import build_byte_tokenizer

    count, length, steps = sizes
    on_gpu = bench.device.type == "cuda"
    options = {
        "output_dir": folder,
        "per_device_train_batch_size": count,
        "num_generations": 2 if bench.tiny else 8,
        "max_completion_length": length,
        "generation_kwargs": {"min_new_tokens": length},
        "max_steps": steps + 1,
        "learning_rate": 1e-6,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }
    if arm in OURS:
        make_trainer: Callable[..., Any] = MXFP4GRPOTrainer
        args = MXFP4GRPOConfig(**options, aqn=False, error_every=0)
    else:
        make_trainer = GRPOTrainer
        args = GRPOConfig(**options)
    dtype = torch.float32
    peft_config = None
    if adapters:
        dtype = torch.bfloat16
        peft_config = LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear")
    return make_trainer(
        build(bench, arm, dtype),
        _reward,
        args,
        Dataset.from_list([{"prompt": f"{i:3d} + {2 * i:3d} = "} for i in range(4 * count)]),
        processing_class=build_byte_tokenizer(),
        peft_config=peft_config,
    )


def _reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Differ between completions of random tokens, so that there is a gradient."""
    return [sum(ids) / (1000 * len(ids)) for ids in completion_ids]
