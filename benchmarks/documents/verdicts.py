# SPDX-License-Identifier: Apache-2.0
"""What runs of RL say of claims: whether one holds, does not hold, is not resolved, or was not run."""

from dataclasses import dataclass

from hf_mxfp4.lab.evaluation.intervals import welch_interval, with_interval

from ..records import table
from .runs import ENDS, runs_of


#: A cell reaches another when it ends less than this below (a share, as accuracies).
MARGIN = 0.02


@dataclass(frozen=True)
class Claim:
    """That the accuracy after RL of one cell of a grid is above another cell's, or reaches it: ends less than `MARGIN`
    below."""

    text: str
    cell: str
    other: str
    reaches: bool = True
    grid: str = "recovery_two_points"


CLAIMS = (
    Claim("W4A8, smoothed, reaches BF16", "w4a8_smoothed", "bf16"),
    Claim("The same with longer answers", "w4a8_smoothed", "bf16", grid="recovery_steps"),
    Claim("The same on Gemma 3 270M", "w4a8_smoothed", "bf16", grid="recovery_gemma"),
    Claim("W4A8, smoothed and distilled, reaches BF16", "w4a8_distilled", "bf16"),
    Claim("The same with longer answers", "w4a8_distilled", "bf16", grid="recovery_steps"),
    Claim("The same on Gemma 3 270M, at the rate of BF16", "w4a8_distilled", "bf16", grid="recovery_gemma"),
    Claim("The same there, each at its best rate", "w4a8_distilled_tuned", "bf16", grid="recovery_gemma"),
    Claim("BF16, then W4A8 by smoothing and GPTQ, reaches BF16", "bf16_then_gptq", "bf16"),
    Claim("W4A4 with residuals, 8.56 bits, reaches BF16", "w4a4_residuals", "bf16"),
    Claim("W4A4 distilled for H64 reaches BF16", "w4a4_h64_distilled", "bf16"),
    Claim("FP8 reaches BF16", "w8a8", "bf16"),
    Claim("MBS + OF reaches BF16", "paper_a", "bf16"),
    Claim("MBS + OF with AQN reaches BF16", "paper_a_aqn", "bf16"),
    Claim("MBS + OF, smoothed, reaches BF16", "paper_a_smoothed", "bf16"),
    Claim("MBS + OF improves plain MXFP4", "paper_a", "mxfp4", reaches=False),
    Claim("AQN improves MBS + OF", "paper_a_aqn", "paper_a", reaches=False),
    Claim("AQN on smoothed norms improves smoothed W4A8", "w4a8_smoothed_aqn", "w4a8_smoothed", reaches=False),
    Claim("Smoothed W4A8 is better than MBS + OF", "w4a8_smoothed", "paper_a", reaches=False),
    Claim("Smoothed W4A8 is better than smoothed MBS + OF", "w4a8_smoothed", "paper_a_smoothed", reaches=False),
    Claim("Distillation improves smoothed W4A8", "w4a8_distilled", "w4a8_smoothed", reaches=False),
    Claim("Smoothed W4A8 is better than BF16 sampled in it", "w4a8_smoothed", "bf16_sampled_w4a8", reaches=False),
    Claim("Distilled W4A8 is better than BF16, then GPTQ", "w4a8_distilled", "bf16_then_gptq", reaches=False),
    Claim("Smoothed W4A8 is better than BF16, then GPTQ", "w4a8_smoothed", "bf16_then_gptq", reaches=False),
    Claim("LoRA on packed W4A8 reaches LoRA in BF16", "w4a8_lora", "bf16_lora"),
    Claim("LoRA on packed W4A8, smoothed, reaches it", "w4a8_lora_smoothed", "bf16_lora"),
    Claim("LoRA on packed W4A8, smoothed and GPTQ, reaches it", "w4a8_lora_gptq", "bf16_lora"),
    Claim("LoRA on packed W4A16, smoothed, reaches it", "w4a16_lora", "bf16_lora"),
    Claim("LoRA on packed W4A16, smoothed and GPTQ, reaches it", "w4a16_lora_gptq", "bf16_lora"),
    Claim("LoRA on packed W4A16, smoothed and distilled, reaches it", "w4a16_lora_distilled", "bf16_lora"),
    Claim("GPTQ improves LoRA on smoothed W4A16", "w4a16_lora_gptq", "w4a16_lora", reaches=False),
    Claim("Distillation improves LoRA on smoothed W4A16", "w4a16_lora_distilled", "w4a16_lora", reaches=False),
    Claim("Smoothing improves LoRA on packed W4A8", "w4a8_lora_smoothed", "w4a8_lora", reaches=False),
)


def verdicts() -> str:
    """Return a row for each claim: what the 95 % intervals of the differences say, at the end and in the mean of the
    curve, and of how many runs they are."""
    rows = []
    for claim in CLAIMS:
        runs, others = (runs_of(cell, claim.grid) for cell in (claim.cell, claim.other))
        row = [claim.text]
        for end in ENDS:
            row += _judged(claim, *([run[end] for run in found] for found in (runs, others)))
        rows.append([*row, f"{len(runs)} and {len(others)}"])
    return table(["claim", "at the end", "points", "mean of curve", "points", "runs"], rows)


def _judged(claim: Claim, values: list[float | None], others: list[float | None]) -> tuple[str, str]:
    """Return the verdict on values of the runs of both cells, and their difference."""
    if None in values or None in others:  # evaluated once
        return "", ""
    if min(len(values), len(others)) < 2:
        return "too few runs", ""
    difference = welch_interval(others, values)
    return _verdict(claim, difference), with_interval(difference, 100, 1)


def _verdict(claim: Claim, difference: dict) -> str:
    low, high = difference["interval"]
    least = -MARGIN if claim.reaches else 0.0
    if low > least:
        return "**holds**"
    if high < least:
        return "**does not hold**"
    return "not resolved"
