# SPDX-License-Identifier: Apache-2.0
"""Numeric answers in the format of GSM8K, read strictly and flexibly, as an `evaluate` metric."""

import datasets
import evaluate

from hf_mxfp4.rl.rewards import is_flexible_correct, is_strict_correct


_DESCRIPTION = """
Share of texts whose final number is the gold number, read in two ways that measure different things: `strict`, the
number after the last `####` (the format of the GSM8K solutions), and `flexible`, the last number anywhere in the text.
Numbers are compared as exact decimals; currency signs, thousands separators and LaTeX around them are understood.
"""
_INPUTS = """
Args:
    predictions, references: lists of str, completions and gold answers.
    verdicts: bool, whether to return a bool for each text too.
Returns:
    strict, flexible: float, shares from 0 to 1.
    verdicts: with verdicts=True, {"strict": list of bool, "flexible": list of bool}.
"""
_SCORES = {"strict": is_strict_correct, "flexible": is_flexible_correct}


class NumberAnswer(evaluate.Metric):
    """Share of answers whose number equals that of the reference."""

    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="arXiv 2110.14168 (GSM8K)",
            inputs_description=_INPUTS,
            features=datasets.Features(dict.fromkeys(("predictions", "references"), datasets.Value("string"))),
            reference_urls=["https://huggingface.co/datasets/openai/gsm8k"],
        )

    def _compute(self, predictions, references, verdicts=False):
        found = {name: list(map(score, predictions, references)) for name, score in _SCORES.items()}
        shares = {name: sum(flags) / len(flags) for name, flags in found.items()}
        return {**shares, "verdicts": found} if verdicts else shares
