# SPDX-License-Identifier: Apache-2.0
"""What runs of RL say of claims: whether one holds, does not hold, is not resolved, or was not run."""

from dataclasses import dataclass

from hf_mxfp4.lab.evaluation.intervals import welch_interval, with_interval

from ..records import table
from .runs import runs_of


#: A cell reaches another when it ends less than this below (a share, as accuracies).
MARGIN = 0.02


@dataclass(frozen=True)
class Claim:
    """That the accuracy after RL of one cell is above another cell's, or reaches it: ends less than `MARGIN` below."""

    text: str
    cell: str
    other: str
    reaches: bool = True


CLAIMS = (
    Claim("W4A8, smoothed, reaches BF16 (ours)", "w4a8_smoothed", "bf16"),
    Claim("W4A8, smoothed and distilled, reaches BF16 (ours)", "w4a8_distilled", "bf16"),
    Claim("BF16, then W4A8 by smoothing and GPTQ, reaches BF16", "bf16_then_gptq", "bf16"),
    Claim("W4A4 with residuals, 8.56 bits, reaches BF16 (ours)", "w4a4_residuals", "bf16"),
    Claim("W4A4 distilled for H64 reaches BF16 (ours)", "w4a4_h64_distilled", "bf16"),
    Claim("MXFP4 with MBS and OF, unsmoothed, reaches BF16 (arXiv 2605.20402)", "paper_a", "bf16"),
    Claim("MXFP4 with MBS, OF and AQN, unsmoothed, reaches BF16 (arXiv 2605.20402)", "paper_a_aqn", "bf16"),
    Claim("MBS and OF improve plain MXFP4 (arXiv 2605.20402)", "paper_a", "mxfp4", reaches=False),
    Claim("AQN improves MBS and OF (arXiv 2605.20402)", "paper_a_aqn", "paper_a", reaches=False),
    Claim("AQN on smoothed norms improves smoothed W4A8", "w4a8_smoothed_aqn", "w4a8_smoothed", reaches=False),
    Claim("Distillation improves smoothed W4A8 (ours)", "w4a8_distilled", "w4a8_smoothed", reaches=False),
    Claim(
        "Smoothed W4A8 is better than BF16 sampled under W4A8 (ours)",
        "w4a8_smoothed",
        "bf16_sampled_w4a8",
        reaches=False,
    ),
    Claim("Distilled W4A8 is better than BF16, then GPTQ (ours)", "w4a8_distilled", "bf16_then_gptq", reaches=False),
    Claim("Smoothed W4A8 is better than BF16, then GPTQ (ours)", "w4a8_smoothed", "bf16_then_gptq", reaches=False),
    Claim("LoRA on packed W4A8, smoothed, reaches LoRA in BF16 (ours)", "w4a8_lora", "bf16_lora"),
    Claim("The same, rounded by GPTQ, reaches LoRA in BF16 (ours)", "w4a8_lora_gptq", "bf16_lora"),
    Claim("FP8 reaches BF16", "w8a8", "bf16"),
)


def verdicts() -> str:
    """Return a row for each claim: what the 95 % interval of the difference says, and of how many runs it is."""
    rows = []
    for claim in CLAIMS:
        values, others = ([run["value"] for run in runs_of(cell)] for cell in (claim.cell, claim.other))
        if min(len(values), len(others)) > 1:
            difference = welch_interval(others, values)
            counted = f"{len(values)} and {len(others)}"
            rows.append([claim.text, _verdict(claim, difference), with_interval(difference, 100, 1), counted])
        else:
            rows.append([claim.text, "not run", "", "fewer than two runs"])
    return table(["claim", "verdict", "difference, points", "runs"], rows)


def _verdict(claim: Claim, difference: dict) -> str:
    low, high = difference["interval"]
    least = -MARGIN if claim.reaches else 0.0
    if low > least:
        return "**holds**"
    if high < least:
        return "**does not hold**"
    return "not resolved"
