# SPDX-License-Identifier: Apache-2.0
"""Section ``models``: what tiny models compute, and the gradients of all their parameters."""

import contextlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_mxfp4
from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.rl import NormNoise

from .inputs import save_base, token_ids
from .record import Record


PRESETS = {
    "qat": ("w4a16", "w4a8", "w4a8g8", "w4a4", "w4a4g4", "paper_a", "paper_b"),
    "packed": ("w4a16", "w4a4"),
}
RANDOM = {
    "preset": "w4a4g4",
    "fprop": {"weight": "rceil+stochastic"},
    "dgrad": {"grad": "rceil+stochastic"},
    "wgrad": {"grad": "rceil+stochastic", "rotation": "random-16"},
    "stochastic_seed": 11,
}
#: Schemes beside the presets: mode, and options.
VARIANTS = {
    "plain": ("qat", {"preset": "w4a4", "macro_block": None}),
    "random": ("qat", RANDOM),
    "activations only": ("qat", {"preset": "w4a4", "fprop": {"x": "even+mbsrow-static+of1"}}),
    "mse tiles": ("qat", {"preset": "w4a4", "fprop": {"weight": "mse+mbs32-dynamic+32x32"}}),
    "skipped": ("qat", {"modules_to_not_convert": ["layers.0", "re:.*v_proj"], "dither_ties": False}),
    "gradients": ("qat", {"preset": "w4a8g8", "dgrad": {"grad": "full"}}),
    "forward rotation": ("qat", {"fprop": {"rotation": "deterministic-16"}}),
    "packed fallback": ("packed", {"preset": "w4a4", "outlier_fallback": 0.5}),
    "packed plain": ("packed", {"macro_block": None}),
    "packed blockwise": ("packed", {"macro_search": "block_mantissas", "preset": "w4a16"}),
}
DENSE, MOE = "qwen2", "qwen3_moe"


def load(base: Path, mode: str = "qat", dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    """The quantized model of a folder."""
    config = MXFP4RLConfig(mode=mode, **options)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_pretrained(base, dtype=dtype, quantization_config=config)


def record_steps(
    record: Record, name: str, model: torch.nn.Module, steps: int = 2, call: Any = None, length: int = 9
) -> None:
    """Record logits and losses of ``steps`` passes, and the gradients of the first and last of them."""
    model.train()
    for step in range(steps):
        if step:
            with contextlib.suppress(ValueError):  # no layer draws random numbers
                hf_mxfp4.set_quantization_step(model, step)
        model.zero_grad(set_to_none=True)
        ids = token_ids(length=length, seed=step)
        output = (model if call is None else call)(input_ids=ids, labels=ids, use_cache=False)
        record.tensor(f"{name}/step {step}/logits", output.logits)
        record.tensor(f"{name}/step {step}/loss", output.loss)
        trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
        if not trained:
            continue
        output.loss.backward()
        if step in (0, steps - 1):
            for key, parameter in trained.items():
                record.tensor(f"{name}/step {step}/gradient/{key}", parameter.grad)


def record_generation(record: Record, name: str, model: PreTrainedModel) -> None:
    """Record greedy tokens with their scores, and the logits of evaluation."""
    model.eval()
    with torch.no_grad():
        ids = token_ids()
        record.tensor(f"{name}/logits", model(ids).logits)
        options = {"max_new_tokens": 5, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
        generated = model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **options)
        record.tensor(f"{name}/tokens", generated.sequences)
        record.tensor(f"{name}/scores", torch.stack(generated.scores))


def _record_model(
    record: Record, name: str, family: str, mode: str, options: Mapping[str, Any], dtype: torch.dtype = torch.float32
) -> None:
    with record.errors(name):
        base = save_base(family, record.workplace / f"{family}-{dtype}", dtype)
        model = load(base, mode, dtype, **options)
        record.text(f"{name}/report", str(model.quantization_report))
        record_steps(record, name, model)
        if mode == "packed":
            for key, tensor in model.state_dict().items():
                record.tensor(f"{name}/stored/{key}", tensor)
        if options.get("backend") != "eager":
            record_generation(record, f"{name}/generation", model)


def record(record: Record) -> None:
    """Record everything of this section."""
    for mode, family, backend in itertools.product(PRESETS, (DENSE, MOE), ("eager", "cpu")):
        for preset in PRESETS[mode]:
            options = {"preset": preset, "backend": backend}
            _record_model(record, f"{mode}/{family}/{backend}/{preset}", family, mode, options)
    for (name, (mode, options)), family in itertools.product(VARIANTS.items(), (DENSE, MOE)):
        _record_model(record, f"variant/{family}/{name}", family, mode, options)
    for family, (mode, preset) in itertools.product(
        ("llama", "gpt_oss"), (("qat", "w4a4"), ("qat", "w4a4g4"), ("packed", "w4a16"))
    ):
        _record_model(record, f"bfloat16/{family}/{mode}-{preset}", family, mode, {"preset": preset}, torch.bfloat16)
    for family in (DENSE, MOE):
        base = save_base(family, record.workplace / f"{family}-{torch.float32}")
        for mode in PRESETS:
            _record_adapters(record, f"lora/{family}/{mode}", load(base, mode), family)
            with record.errors(f"noise/{family}/{mode}"):
                model = load(base, mode)
                with NormNoise(model, 3).active(2, 0.05):
                    record_generation(record, f"noise/{family}/{mode}/on", model)
                record_generation(record, f"noise/{family}/{mode}/off", model)
        _record_modes(record, family, base)


def with_adapters(model: PreTrainedModel, family: str) -> torch.nn.Module:
    """LoRA of rank 4 on all linears, and on the experts of a packed mixture of them."""
    torch.manual_seed(1)
    packed = model.config.quantization_config.mode == "packed"
    targets = ["q_proj", "o_proj", "experts"] if family == MOE and packed else "all-linear"
    options = {"r": 4, "lora_alpha": 8, "target_modules": targets, "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))


def _record_adapters(record: Record, name: str, model: PreTrainedModel, family: str) -> None:
    with record.errors(name):
        model = with_adapters(model, family)
        record_steps(record, name, model)
    with record.errors(f"{name}/merged"):
        merged = hf_mxfp4.merge_adapters(model)
        for key, tensor in (merged if isinstance(merged, torch.nn.Module) else model).state_dict().items():
            record.tensor(f"{name}/merged/{key}", tensor)


def _record_modes(record: Record, family: str, base: Path) -> None:
    """Cached and uncached weights, checkpointing, compiled code, dithered masters."""
    half = save_base(family, record.workplace / f"{family}-{torch.bfloat16}", torch.bfloat16)
    with record.errors(f"modes/{family}/cached"):
        model = load(base)
        with hf_mxfp4.cached_weights(model):
            record_generation(record, f"modes/{family}/cached", model)
        with hf_mxfp4.uncached_weights(model):
            record_generation(record, f"modes/{family}/uncached", model)
    with record.errors(f"modes/{family}/checkpointing"):
        model = load(base, preset="w4a4g4", wgrad={"x": "reuse"})
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        record_steps(record, f"modes/{family}/checkpointing", model)
    with record.errors(f"modes/{family}/dithered"):
        for key, tensor in load(half).state_dict().items():
            record.tensor(f"modes/{family}/dithered/{key}", tensor)
    for mode, preset in (("qat", "w4a4g4"), ("packed", "w4a4")):
        name = f"modes/{family}/compiled-{mode}"
        with record.errors(name):
            torch._dynamo.reset()
            model = load(base, mode, preset=preset)
            record_steps(record, name, model, steps=1, call=torch.compile(model, backend="aot_eager"))
    with record.errors(f"modes/{family}/packed later"):
        model = load(base)
        hf_mxfp4.pack(model)
        record_steps(record, f"modes/{family}/packed later", model, steps=1)
