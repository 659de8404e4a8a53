# SPDX-License-Identifier: Apache-2.0
"""Whether a term added to distillation brings W4A4 nearer to BF16: KL on held-out texts, for several seeds.

    python -m benchmarks.distillation_terms --model SmolLM2-135M-Instruct \
        --train gsm8k/train.jsonl --text gsm8k/test.jsonl --seeds 0 1 2

All students are in W4A4, smoothed and rotated by H64, and learn the same texts in the same order:

* `plain`: KL(teacher || student), mean over tokens;
* `entropy`: weights ``exp(-H)`` with mean 1, H the teacher's entropy of the token (after arXiv 2606.15682);
* `hidden`: plus the relative squared error of hidden states, mean over layers (after arXiv 2606.05682);
* `bias`: `plain`, and each quantized layer has a trained bias, at ten times the rate.

Adds to `benchmarks/results/distillation_terms.json` a record for each seed and arm as soon as it is measured.
"""

import time
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig
from hf_mxfp4.lab import TextOptions, load

from .held_out import HeldOut, short_name
from .records import made, option_parser, recorded, write


ARMS = ("plain", "entropy", "hidden", "bias")
SCHEME = {
    "mode": "qat",
    "preset": "w4a4",
    "scale_rule": "even",
    "macro_block": 128,
    "macro_search": "block_mantissas",
    "fprop": {"rotation": "deterministic-64"},
    "smooth": True,
}
RATE = 1e-4
BATCH = 4


def main() -> None:
    parser = option_parser(__doc__, "distillation_terms")
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", required=True, help="texts that are learned")
    parser.add_argument("--text", type=Path, required=True, help="held-out texts")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--samples", type=int, default=24, help="held-out texts")
    parser.add_argument("--length", type=int, default=128, help="tokens of a text that is learned, at most")
    options = parser.parse_args()
    original = load(options.model, dtype="float32")
    original.model.requires_grad_(False)
    held_out = HeldOut.read(options.text, original, options.samples)
    source = TextOptions(
        options.train, samples=options.steps * BATCH * (max(options.seeds) + 1), max_length=options.length
    )
    texts = source.tokens(original.tokenizer, source.read())
    for seed in options.seeds:
        for arm in options.arms:
            records = recorded(options.out)
            if any((record["name"], record["seed"]) == (arm, seed) for record in records):
                continue
            began = time.monotonic()
            mine = texts[seed * options.steps * BATCH :][: options.steps * BATCH]
            before, row, tokens = distil(options.model, arm, seed, mine, original.model, held_out)
            seconds = round(time.monotonic() - began, 1)
            record = {
                "name": arm,
                "seed": seed,
                "shape": f"{options.steps} steps of {BATCH} texts of at most {options.length} tokens; {tokens} tokens",
                "value": row.kl.value,
                "unit": "KL, nats per token",
                "baseline": before.kl.value,
                "ratio": row.kl.value / before.kl.value,
                "ceiling_fraction": None,
                "standard_error": row.kl.error,
                "perplexity": row.perplexity,
                "same_top": row.same_top,
                "same_top_before": before.same_top,
                "model": Path(options.model).name,
                "train": short_name(Path(options.train)),
                "text": held_out.name,
                "texts": len(held_out.batches),
                "seconds": seconds,
            } | made(
                f"python -m benchmarks.distillation_terms --model {Path(options.model).name} --train "
                f"{short_name(Path(options.train))} --text {held_out.name} --steps {options.steps} "
                f"--samples {options.samples} --length {options.length}",
                ("torch", "transformers"),
            )
            write([*records, record], options.out)
            print(arm, seed, f"{before.kl.value:.4f} -> {row.kl.value:.4f}", seconds, flush=True)


def distil(name: str, arm: str, seed: int, texts: list[torch.Tensor], teacher: nn.Module, held_out: HeldOut):
    """Return the result on held-out texts before and after, and the number of tokens that were learned."""
    torch.manual_seed(seed)
    student = AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.float32, attn_implementation="eager", quantization_config=MXFP4RLConfig(**SCHEME)
    )
    layers = [module for module in student.modules() if isinstance(module, MXFP4Linear)]
    student.requires_grad_(False)
    groups = [{"params": [], "lr": RATE}, {"params": [], "lr": 10 * RATE}]
    for layer in layers:
        groups[0]["params"].append(layer.weight.requires_grad_(True))
        if arm == "bias":
            layer.bias = nn.Parameter(torch.zeros(layer.out_features))
            groups[1]["params"].append(layer.bias)
    with torch.autocast("cpu", torch.bfloat16):
        before = held_out.row("before", student.eval())
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], weight_decay=0.0)
    steps = len(texts) // BATCH
    schedule = get_cosine_schedule_with_warmup(optimizer, 5, steps)
    tokens = 0
    for step in range(steps):
        ids, mask = padded(texts[step * BATCH : (step + 1) * BATCH])
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                goal = teacher(input_ids=ids, attention_mask=mask, output_hidden_states=arm == "hidden")
            found = student(input_ids=ids, attention_mask=mask, output_hidden_states=arm == "hidden")
        loss = loss_of(arm, goal, found, mask[:, :-1].bool())
        loss.backward()
        nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        tokens += int(mask.sum())
        if step % 10 == 0:
            print("   ", arm, seed, step, round(loss.item(), 4), flush=True)
    with torch.autocast("cpu", torch.bfloat16):
        return before, held_out.row(arm, student), tokens


def padded(texts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask ``[B, T]`` of texts ``[1, tokens]``."""
    rows = [text[0] for text in texts]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return ids, mask


def loss_of(arm: str, goal, found, learned: torch.Tensor) -> torch.Tensor:
    """Return the loss of an arm over tokens ``learned`` ``[B, T - 1]``."""
    target = goal.logits[:, :-1][learned].float().log_softmax(-1)
    predicted = found.logits[:, :-1][learned].float().log_softmax(-1)
    kl = (target.exp() * (target - predicted)).sum(-1)
    if arm == "entropy":
        weight = (target.exp() * target).sum(-1).exp()  # exp(-H)
        kl = kl * weight / weight.mean()
    loss = kl.mean()
    if arm == "hidden":
        pairs = list(zip(goal.hidden_states, found.hidden_states, strict=True))[1:]
        errors = []
        for wanted, hidden in pairs:
            wanted, hidden = wanted[:, :-1][learned].float(), hidden[:, :-1][learned].float()
            errors.append((hidden - wanted).square().sum() / wanted.square().sum())
        loss = loss + torch.stack(errors).mean()
    return loss


if __name__ == "__main__":
    main()
