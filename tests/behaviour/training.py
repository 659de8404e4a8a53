# SPDX-License-Identifier: Apache-2.0
"""Section ``training``: GRPO runs of a few steps, whole and resumed: logs, completions, weights and reports."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, PrinterCallback

from hf_mxfp4 import MXFP4GRPOConfig, MXFP4GRPOTrainer, MXFP4RLConfig

from .inputs import make_tokenizer, save_base
from .models import DENSE, MOE, RANDOM
from .record import Record, visible_text


#: Keys of logs that hold times, or what is made of them.
_TIMES = re.compile(r"time|runtime|per_second|flos|memory|gpu|hours")
_TWO_ITERATIONS = {
    "num_iterations": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 2, "gradient_checkpointing": True,
    "per_device_train_batch_size": 4,
}  # fmt: skip
#: Name: family, scheme, whether LoRA is trained, options of the trainer.
RUNS: dict[str, tuple[str, dict, bool, dict]] = {
    "dense": (DENSE, {}, False, {"save_steps": 2, "report_every": 2}),
    "dense random": (DENSE, RANDOM, False, {"save_steps": 3}),
    "lora": (DENSE, {"mode": "packed", "preset": "w4a4", "outlier_fallback": 0.5}, True, {"save_steps": 2}),
    "lora qat": (DENSE, {}, True, {}),
    "experts": (MOE, {}, False, {"router_replay": True, "report_every": 2}),
    "experts lora": (MOE, {"mode": "packed"}, True, {}),
    "without noise": (DENSE, {}, False, {"aqn": False, "beta": 0.05}),
    "two iterations": (DENSE, {}, False, _TWO_ITERATIONS),
    "sampling": (DENSE, {}, False, {"error_every": 1}),
}


def record(record: Record) -> None:
    """Record everything of this section."""
    for name, (family, scheme, lora, options) in RUNS.items():
        base = save_base(family, record.workplace / family, hidden_size=32, intermediate_size=48, head_dim=16)
        folder = record.workplace / name
        with record.errors(name):
            _train(record, name, base, folder, scheme, lora, options)
            if "save_steps" in options:
                again = record.workplace / f"{name} resumed"
                start = folder / f"checkpoint-{options['save_steps']}"
                _train(record, f"{name}/resumed", base, again, scheme, lora, options, start)


def _train(record: Record, name: str, base: Path, out: Path, scheme: Mapping, lora: bool, options: Mapping, start=None):
    """Train 4 steps of 2 prompts with 4 completions of 4 tokens each."""
    settings: dict[str, Any] = {
        "output_dir": str(out), "save_strategy": "steps" if "save_steps" in options else "no",
        "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 4, "max_steps": 4,
        "learning_rate": 1e-3, "logging_steps": 1, "report_to": "none", "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False, "disable_tqdm": True, "aqn_num_stages": 4, "error_every": 2,
        "report_every": 0, "seed": 7,
    }  # fmt: skip
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(8)]
    seen: list[Sequence[str]] = []

    def even_digits(completions: Sequence[str], answer: Sequence[str], **kwargs: Any) -> list[float]:
        seen.append(list(completions))
        right = [text.startswith(gold) for text, gold in zip(completions, answer, strict=True)]
        return [sum(c in "02468" for c in text) / 4 + good for text, good in zip(completions, right, strict=True)]

    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_pretrained(base, quantization_config=MXFP4RLConfig(**scheme))
    adapters = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "o_proj"]) if lora else None
    trained = {"args": MXFP4GRPOConfig(**{**settings, **options}), "train_dataset": Dataset.from_list(rows)}
    trainer = MXFP4GRPOTrainer(policy, even_digits, **trained, processing_class=make_tokenizer(), peft_config=adapters)
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=start and str(start))
    for number, log in enumerate(trainer.state.log_history):
        record.value(f"{name}/log/{number}", {key: value for key, value in log.items() if not _TIMES.search(key)})
    record.value(f"{name}/completions", seen)
    for key, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            record.tensor(f"{name}/weights/{key}", parameter)
    for path in sorted(out.glob("*.html")):
        record.text(f"{name}/{path.name}", visible_text(path.read_text()))
