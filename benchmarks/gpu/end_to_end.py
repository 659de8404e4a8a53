# SPDX-License-Identifier: Apache-2.0
"""Whole models of the sizes of Qwen2.5 with random weights: `generate`, linear layers in a CUDA graph, GRPO steps, and
continuous batching."""

import contextlib
import io
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    PreTrainedModel,
    Qwen2Config,
    TrainerCallback,
)

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.integrations.transformers.swap import quantize_linears

from .bench import (
    Absent,
    Bench,
    Call,
    Sample,
    WrongResult,
    compared,
    expect_close,
    interleaved,
    kernel_table,
    kernels_of,
    reason_of,
    wall_seconds,
)
from .cases import random_matrix


#: Arms: the model as it is, in NF4, and two of ours.
BF16 = "BF16"
NF4 = "bitsandbytes NF4"
PACKED = "packed w4a16"
QAT = "QAT w4a8"
OURS = {PACKED: MXFP4RLConfig(mode="packed"), QAT: MXFP4RLConfig(preset="w4a8")}
#: Sizes of Qwen2.5, and tiny ones.
SIZES = {
    "1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
    },
    "7B": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
    },
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


def build(
    bench: Bench, arm: str, dtype: torch.dtype = torch.bfloat16, backend: str = "triton", size: str = "1.5B"
) -> PreTrainedModel:
    """Return the model of an arm, the same weights each time. Raises [`Absent`] without bitsandbytes."""
    sizes = TINY if bench.tiny else SIZES[size]
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = Qwen2Config(**sizes, **tokens, tie_word_embeddings=True)
    torch.manual_seed(0)
    with bench.device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(dtype).eval()
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


# ---- generate -------------------------------------------------------------------------------------------------------


def generate(bench: Bench) -> None:
    """Record `generate` in BF16, packed, in NF4, and as a rollout of QAT: prefill, and wall time, kernels and guards of
    a step; with a static cache, which transformers compiles and replays as CUDA graphs, and without."""
    batch, prompt, new = (2, 3, 3) if bench.tiny else (16, 128, 33)
    ids = torch.randint(2, 300, (batch, prompt), generator=torch.Generator().manual_seed(1)).to(bench.device)
    models: dict[str, PreTrainedModel] = {}

    def model_of(arm: str) -> PreTrainedModel:
        if arm not in models:
            models[arm] = _checked_model(bench, arm, ids)
        return models[arm]

    def measured(arm: str, cache: str | None) -> dict[str, Any]:
        calls = {arm: partial(_generated, model_of(arm), ids, cache=cache, new=new)}
        if arm != BF16:
            calls[BF16] = partial(_generated, model_of(BF16), ids, cache=cache, new=new)
        for call in calls.values():
            if call().shape != (batch, prompt + new):
                raise WrongResult(f"generate did not make {new} tokens")
        variants = _by_guards(calls[arm]) if cache is not None else {}
        steps = _steps(bench, calls | variants, new)
        found = compared({name: steps[name]["samples"]["whole"] for name in calls})
        found |= {"value": batch * new / found["seconds"], "unit": "tokens/s", "steps": steps}
        found["kernels of a step"] = _kernels_of_a_step(bench, calls[arm], new)
        return found

    arms: list[tuple[str, str | None]] = [(BF16, "static"), (PACKED, "static"), (BF16, None), (PACKED, None)]
    arms += [(NF4, "static"), (NF4, None), (QAT, None)]
    for arm, cache in arms:
        what = arm if cache is None else f"{arm}, {cache} cache"
        bench.record("generate", what, [batch, prompt, new], partial(measured, arm, cache))


def _checked_model(bench: Bench, arm: str, ids: torch.Tensor) -> PreTrainedModel:
    """Return the model of an arm, whose logits are right."""
    model = build(bench, arm)
    if arm in OURS:
        with torch.no_grad():
            expected = build(bench, arm, backend="eager")(ids).logits
            expect_close(f"{arm}: logits", model(ids).logits, expected, TOLERANCES[arm])
    return model


def _generated(model: PreTrainedModel, ids: torch.Tensor, cache: str | None, new: int, **options: Any) -> torch.Tensor:
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        cache_implementation=cache,
        min_new_tokens=new,
        max_new_tokens=new,
        **options,
    )


class _Unchanged(LogitsProcessor):
    """Code of a user between two steps, with which no guard is skipped."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def _by_guards(call: Callable[..., torch.Tensor]) -> dict[str, Callable[..., torch.Tensor]]:
    """Return calls that check all guards of compiled code, and none of those that have always held."""

    def skipped(**options: Any) -> torch.Tensor:
        with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
            return call(**options)

    return {"guards checked": partial(call, logits_processor=[_Unchanged()]), "guards skipped": skipped}


def _steps(bench: Bench, calls: Mapping[str, Callable[..., torch.Tensor]], new: int) -> dict[str, Any]:
    """Return seconds of the prefill, and of a step after it, of each call; or why there are none."""
    found: dict[str, Any] = {}
    samples: dict[tuple[str, int], Sample] = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            found[name] = {"reason": reason_of(error)}
            continue
        for length in (1, new):
            samples[name, length] = partial(wall_seconds, partial(call, new=length), bench.device)
    taken = interleaved(samples, bench.rounds)
    for name, length in taken:
        if length == new:
            prefill, whole = (statistics.median(taken[name, n]) for n in (1, new))
            found[name] = {
                "prefill": prefill,
                "seconds": (whole - prefill) / (new - 1),
                "samples": {"prefill": taken[name, 1], "whole": taken[name, new]},
            }
    return found


def _kernels_of_a_step(bench: Bench, call: Callable[..., Any], new: int) -> dict[str, Any]:
    """Return the kernels of a mean step: those of some tokens without those of the first one."""
    steps = min(new - 1, 8)
    prefill = kernels_of(partial(call, new=1), bench.device)
    all_kernels = kernels_of(partial(call, new=1 + steps), bench.device)
    of_a_step = {}
    for name, (count, seconds) in all_kernels.items():
        first_count, first_seconds = prefill.get(name, (0, 0.0))
        if count > first_count:
            of_a_step[name] = ((count - first_count) / steps, (seconds - first_seconds) / steps)
    return kernel_table(of_a_step)


# ---- decoding in raw CUDA graphs ------------------------------------------------------------------------------------


#: Packed layers that never get the input of another one.
SEPARATE = "packed, separate products"


def decode(bench: Bench) -> None:
    """Record the linear layers of a model in one CUDA graph: packed ones, whose products of the same input may be
    joined, packed ones that are never joined, and BF16."""
    for size in ("tiny",) if bench.tiny else SIZES:
        models: dict[str, PreTrainedModel] = {}
        for rows in (1,) if bench.tiny else (1, 16):
            sizes = TINY if bench.tiny else SIZES[size]
            shape = [sizes["num_hidden_layers"], sizes["hidden_size"], sizes["intermediate_size"]]
            bench.record("decode", f"{size}, {rows} rows", shape, partial(_decoded, bench, size, rows, models))


@torch.no_grad()
def _decoded(bench: Bench, size: str, rows: int, models: dict[str, PreTrainedModel]) -> dict[str, Any]:
    for name, arm in ((PACKED, PACKED), (BF16, BF16), (SEPARATE, PACKED)):
        if name not in models:
            models[name] = build(bench, arm, size=size)
    config = models[BF16].config
    lengths = [config.hidden_size] * 3 + [config.intermediate_size]
    inputs = [random_matrix(bench.device, rows, length) for length in lengths]
    calls: dict[str, Call] = {
        name: partial(_all_linears, model, inputs, same=name != SEPARATE) for name, model in models.items()
    }
    expected = _all_dequantized(models[SEPARATE], inputs)
    for name in (PACKED, SEPARATE):
        expect_close(name, calls[name](), expected, 2e-2)
    found = bench.compare({name: bench.prepare(call, "graph") for name, call in calls.items()}, "graph")
    launches = {name: kernel_table(kernels_of(call, bench.device))["launches"] for name, call in calls.items()}
    return found | {"value": 1e3 * found["seconds"], "unit": "ms", "launches": launches}


def _linears(model: PreTrainedModel) -> Iterator[tuple[nn.Module, int]]:
    """Yield linear layers in their order, and which input each of them gets."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for module in (attention.q_proj, attention.k_proj, attention.v_proj):
            yield module, 0
        yield attention.o_proj, 1
        yield mlp.gate_proj, 2
        yield mlp.up_proj, 2
        yield mlp.down_proj, 3


def _all_linears(model: PreTrainedModel, inputs: list[torch.Tensor], same: bool) -> list[torch.Tensor]:
    """Return all products. With ``same``, layers of the same input get the same object; otherwise views of it."""
    outs = []
    for module, index in _linears(model):
        x = inputs[index]
        outs.append(module(x if same else x.view_as(x)))
    return outs


def _all_dequantized(model: PreTrainedModel, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return products of the values that packed weights stand for, with their biases."""
    outs = []
    for module, index in _linears(model):
        outs.append(nn.functional.linear(inputs[index], module.dequantized_weight(torch.bfloat16), module.bias))
    return outs


# ---- a GRPO step ----------------------------------------------------------------------------------------------------

#: Arm of a step: the model, whether adapters are trained, and the arm to compare with.
STEPS = {
    "TRL BF16 + LoRA": (BF16, True, None),
    "packed w4a16 + LoRA": (PACKED, True, "TRL BF16 + LoRA"),
    "TRL BF16": (BF16, False, None),
    "QAT w4a8": (QAT, False, "TRL BF16"),
    "QLoRA NF4": (NF4, True, "TRL BF16 + LoRA"),
}


def grpo_step(bench: Bench) -> None:
    """Record seconds and peak memory of a step of our trainer, and of TRL's on the same model in BF16 and NF4."""
    count, length, steps = (4, 3, 1) if bench.tiny else (32, 64, 2)
    seconds: dict[str, float] = {}

    def measured(name: str) -> dict[str, Any]:
        arm, adapters, baseline = STEPS[name]
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            trainer = _trainer(bench, folder, arm, adapters, (count, length, steps))
            clock = _Clock(bench.device)
            trainer.add_callback(clock)
            if bench.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(bench.device)
            trainer.train()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        if len(logs) != steps + 1 or not all(_is_right(entry, length) for entry in logs):
            raise WrongResult(f"not {steps + 1} steps with a gradient and completions of {length} tokens: {logs}")
        # The first step warms up.
        samples = clock.seconds[1:]
        seconds[name] = statistics.median(samples)
        ratio = None
        if baseline in seconds:
            ratio = seconds[baseline] / seconds[name]
        peak = None
        if bench.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(bench.device) / 2**30
        return {
            "value": seconds[name],
            "unit": "s per step",
            "baseline": baseline,
            "ratio": ratio,
            "peak_gib": peak,
            "first_step": clock.seconds[0],
            "samples": {name: samples},
        }

    for name in STEPS:
        bench.record("grpo_step", name, [count, length], partial(measured, name))


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
    try:
        from datasets import Dataset
        from peft import LoraConfig
        from trl import GRPOConfig, GRPOTrainer

        from hf_mxfp4 import MXFP4GRPOConfig, MXFP4GRPOTrainer
    except ImportError as error:
        raise Absent(reason_of(error)) from error
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


# ---- continuous batching --------------------------------------------------------------------------------------------


def generate_batch(bench: Bench) -> None:
    """Record tokens per second of continuous batching, in CUDA graphs on a GPU, in BF16 and packed."""
    batch, prompt, new = (2, 3, 2) if bench.tiny else (32, 128, 64)
    ids = torch.randint(2, 300, (batch, prompt), generator=torch.Generator().manual_seed(1))
    options = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    models: dict[str, PreTrainedModel] = {}

    def batched(arm: str) -> torch.Tensor:
        from transformers import ContinuousBatchingConfig

        batching = ContinuousBatchingConfig(
            use_cuda_graph=bench.device.type == "cuda", max_memory_percent=0.3, num_blocks=16 if bench.tiny else None
        )
        # The manager keeps its graphs, so that samples are without the time to capture them.
        found = models[arm].generate_batch(
            ids.tolist(), generation_config=options, continuous_batching_config=batching, persistent_manager=True
        )
        return torch.tensor([output.generated_tokens for output in found.values()])

    def measured(arm: str) -> dict[str, Any]:
        models[arm] = build(bench, arm)
        expected = _generated(models[arm], ids.to(bench.device), cache=None, new=new)[:, prompt:].cpu()
        try:
            tokens = batched(arm)
        except Exception as error:
            raise Absent(reason_of(error)) from error
        if tokens.shape != expected.shape:
            raise WrongResult(f"generate_batch made tokens {list(tokens.shape)}, not {list(expected.shape)}")
        # Attention in another order of sums may choose another token now and then, and all that follow differ.
        agreement = (tokens[:, 0] == expected[:, 0]).double().mean().item()
        if agreement < 0.75:
            raise WrongResult(f"{100 * agreement:.0f} % of first tokens are those of generate")
        names = [arm] if arm == BF16 else [arm, BF16]
        found = bench.compare({name: partial(batched, name) for name in names}, "once")
        return found | {
            "value": batch * new / found["seconds"],
            "unit": "tokens/s",
            "agreement of first tokens": agreement,
        }

    for arm in (BF16, PACKED):
        bench.record("generate_batch", arm, [batch, prompt, new], partial(measured, arm))
