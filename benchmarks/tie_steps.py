# SPDX-License-Identifier: Apache-2.0
"""Three steps of GRPO at learning rates of 0, 1e-7 and 2e-7 from a checkpoint in 16 bits, without and with
`dither_ties`: how far the policy is from where it began. A part of `benchmarks.tie_dither`.

A prompt of GSM8K and 8 completions of 24 tokens a step, all parameters trained, masters in float32, AdamW.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_mxfp4 import MXFP4GRPOConfig, MXFP4GRPOTrainer, MXFP4RLConfig
from hf_mxfp4.layers import full_precision

from .macro_factors import FACTORS_OF


SCHEMES = {
    "w4a16, rceil, MBS hybrid, fallback 0.5": {"preset": "w4a16", **FACTORS_OF},
    "w4a4, rceil, MBS hybrid, fallback 0.5": FACTORS_OF,
}
#: How many changes of the last bits are tried.
NUDGES = 4
PROMPT = "Question: {question}\nReason step by step.\nAnswer:"


def mean_kl(after: torch.Tensor, before: torch.Tensor) -> float:
    """KL divergence of the first log-probabilities ``[positions, vocabulary]`` from the second, nats per position."""
    return float((after.exp() * (after - before)).sum(dim=-1).mean())


def share_of_digits(completions: list[str], **kwargs: Any) -> list[float]:
    """A reward that completions of 24 tokens differ in; hardly any of them gets to an answer."""
    return [sum(character.isdigit() for character in text) / max(1, len(text)) for text in completions]


@torch.no_grad()
def log_probabilities(model: nn.Module, ids: torch.Tensor, quantized: bool = True) -> torch.Tensor:
    """In float64 ``[positions, vocabulary]``, with or without quantization."""
    training = model.training
    model.eval()
    try:
        if quantized:
            logits = model(ids).logits
        else:
            with full_precision(model):
                logits = model(ids).logits
    finally:
        model.train(training)
    return logits[0].double().log_softmax(dim=-1)


def run_options(out: str) -> dict[str, Any]:
    """The trainer's options: 8 completions of 24 tokens, learning rates of 0, 1e-7 and 2e-7, neither noise nor other
    measurements."""
    return {
        "output_dir": out, "max_steps": 3, "learning_rate": 1e-6, "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 10, "per_device_train_batch_size": 8, "num_generations": 8, "max_completion_length": 24,
        "aqn": False, "bf16": False, "use_cpu": True, "seed": 0, "gradient_checkpointing": False, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "report_every": 0, "error_every": 0, "gradient_gain_every": 0,
        "disable_tqdm": True,
    }  # fmt: skip


def load(folder: Path, dither: bool, options: dict[str, Any]) -> nn.Module:
    config = MXFP4RLConfig(dither_ties=dither, **options)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)


def held_out_tokens(tokenizer: Any, problem: dict) -> tuple[torch.Tensor, int]:
    """A problem with its answer ``[1, positions]``, and the position of the prompt's last token."""
    prompt = PROMPT.format(**problem)
    ids = tokenizer(f"{prompt} {problem['answer']}", return_tensors="pt").input_ids
    return ids, tokenizer(prompt, return_tensors="pt").input_ids.shape[1] - 1


def measure_floor(folder: Path, problems: list[dict]) -> list[dict]:
    """How far policies move by next to nothing: all weights of norms by one float32 number, up or down by chance."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids, last = held_out_tokens(tokenizer, problems[0])
    records = []
    for name, options in SCHEMES.items():
        model = load(folder, True, options)
        norms = {key: p.detach().clone() for key, p in model.named_parameters() if p.dim() == 1}
        found = [log_probabilities(model, ids)]
        for seed in range(NUDGES):
            nudge_norms(model, norms, seed)
            found.append(log_probabilities(model, ids))
        kls = [mean_kl(each, found[0]) for each in found[1:]]
        records.append(
            {
                "name": f"floor / {name}",
                "shape": [NUDGES, *ids.shape],
                "value": sum(kls) / NUDGES,
                "unit": "nats per position, weights of norms moved by one float32 number",
                "baseline": None,
                "ratio": None,
                "each": kls,
                "end_token": [float(each[last, tokenizer.eos_token_id].exp()) for each in found],
            }
        )
        print(f"{records[-1]['name']}: {records[-1]['value']:.4g}", flush=True)
    return records


def measure_steps(folder: Path, problems: list[dict]) -> list[dict]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    held_out, *training = problems
    ids, last = held_out_tokens(tokenizer, held_out)
    prompts = Dataset.from_list([{"prompt": PROMPT.format(**problem)} for problem in training])
    records = []
    for name, options in SCHEMES.items():
        starts = []
        for dither in (False, True):
            model = load(folder, dither, options)
            start = [log_probabilities(model, ids, quantized) for quantized in (True, False)]
            starts.append(start)
            masters = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
            with tempfile.TemporaryDirectory() as out:
                arguments = MXFP4GRPOConfig(**run_options(out))
                trainer = MXFP4GRPOTrainer(model, share_of_digits, arguments, prompts, processing_class=tokenizer)
                trainer.train()
            end = [log_probabilities(model, ids, quantized) for quantized in (True, False)]
            largest = max(float((p.detach() - masters[key]).abs().max()) for key, p in model.named_parameters())
            turn_at_random(model, masters)
            turned = log_probabilities(model, ids)
            history = trainer.state.log_history
            kl = mean_kl(end[0], start[0])
            token = tokenizer.eos_token_id
            records.append(
                {
                    "name": f"steps / {name} / dither {'on' if dither else 'off'}",
                    "shape": list(ids.shape),
                    "value": kl,
                    "unit": "nats per position, policy after three steps from before",
                    "baseline": None,
                    "ratio": None,
                    "kl_full_precision": mean_kl(end[1], start[1]),
                    "kl_random_signs": mean_kl(turned, start[0]),
                    "kl_of_the_dither": mean_kl(starts[-1][0], starts[0][0]) if dither else None,
                    "kl_of_the_dither_full_precision": mean_kl(starts[-1][1], starts[0][1]) if dither else None,
                    "end_token": [float(each[0][last, token].exp()) for each in (start, end)],
                    "end_token_full_precision": [float(each[1][last, token].exp()) for each in (start, end)],
                    "largest_change": largest,
                    "movement": [
                        [line[key] for key in ("step", "movement/total", "movement_se/total", "movement/flipped_share")]
                        for line in history
                        if "movement/total" in line
                    ],
                    "learning_rates": [line["learning_rate"] for line in history if "learning_rate" in line],
                    "rewards": [[line["reward"], line["reward_std"]] for line in history if "reward" in line],
                }
            )
            if dither:
                records[-1]["baseline"], records[-1]["ratio"] = records[-2]["value"], kl / records[-2]["value"]
            print(f"{records[-1]['name']}: {kl:.4g}", flush=True)
    return records


@torch.no_grad()
def turn_at_random(model: nn.Module, masters: dict[str, torch.Tensor]) -> None:
    """Let every parameter have moved as far from ``masters`` as it has, up or down by chance."""
    generator = torch.Generator().manual_seed(0)
    for key, parameter in model.named_parameters():
        signs = 2 * torch.randint(0, 2, parameter.shape, generator=generator) - 1
        parameter.copy_(masters[key] + (parameter - masters[key]) * signs)


@torch.no_grad()
def nudge_norms(model: nn.Module, norms: dict[str, torch.Tensor], seed: int) -> None:
    """Move the parameters named in ``norms`` by one float32 number from the values there, up or down by chance."""
    generator = torch.Generator().manual_seed(seed)
    for key, value in norms.items():
        signs = 2 * torch.randint(0, 2, value.shape, generator=generator) - 1
        model.get_parameter(key).copy_(torch.nextafter(value, signs * torch.inf))
