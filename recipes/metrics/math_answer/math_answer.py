# SPDX-License-Identifier: Apache-2.0
"""Free-form mathematical answers, compared by math-verify, as an `evaluate` metric."""

import datasets
import evaluate

from hf_mxfp4.rl.math_answers import is_boxed_correct, is_math_correct


_DESCRIPTION = """
Share of texts whose final answer is mathematically equal to the gold answer (fractions, tuples, sets, intervals,
matrices, expressions), as judged by math-verify, read in two ways: `boxed`, the content of the last `\\boxed{...}`, and
`flexible`, that or, without one, the last formula or number that math-verify finds.
"""
_INPUTS = """
Args:
    predictions, references: lists of str, completions and gold answers.
    verdicts: bool, whether to return a bool for each text too.
Returns:
    boxed, flexible: float, shares from 0 to 1.
    verdicts: with verdicts=True, {"boxed": list of bool, "flexible": list of bool}.
"""
_SCORES = {"boxed": is_boxed_correct, "flexible": is_math_correct}


class MathAnswer(evaluate.Metric):
    """Share of answers that are mathematically equal to the reference."""

    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="https://github.com/huggingface/math-verify",
            inputs_description=_INPUTS,
            features=datasets.Features(dict.fromkeys(("predictions", "references"), datasets.Value("string"))),
            reference_urls=["https://github.com/huggingface/math-verify"],
        )

    def _compute(self, predictions, references, verdicts=False):
        found = {name: list(map(score, predictions, references)) for name, score in _SCORES.items()}
        shares = {name: sum(flags) / len(flags) for name, flags in found.items()}
        return {**shares, "verdicts": found} if verdicts else shares
