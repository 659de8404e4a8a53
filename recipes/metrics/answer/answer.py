# SPDX-License-Identifier: Apache-2.0
"""Final answers as an `evaluate` metric: numbers in the format of GSM8K, or free-form mathematics."""

import datasets
import evaluate

from hf_mxfp4.rl.math_answers import is_boxed_correct, is_math_correct
from hf_mxfp4.rl.rewards import is_flexible_correct, is_strict_correct


_DESCRIPTION = """
Share of texts whose final answer is the gold answer, read in two ways that measure different things.

Configuration `number`: numbers, compared as exact decimals, with currency signs, thousands separators and LaTeX around
them. `strict` is the one after the last `####` (the format of the GSM8K solutions), `flexible` the last one anywhere.

Configuration `math`: fractions, tuples, sets, intervals, matrices and expressions, compared by math-verify. `boxed` is
the content of the last `\\boxed{...}`, `flexible` that or, without one, the last formula or number.
"""
_INPUTS = """
Args:
    predictions, references: lists of str, completions and gold answers.
    verdicts: bool, whether to return a bool for each text too.
Returns:
    strict or boxed, flexible: float, shares from 0 to 1.
    verdicts: with verdicts=True, a list of bool for each of the two.
"""
_SCORES = {
    "number": {"strict": is_strict_correct, "flexible": is_flexible_correct},
    "math": {"boxed": is_boxed_correct, "flexible": is_math_correct},
}


class Answer(evaluate.Metric):
    """Share of answers that are right, as each score reads them."""

    def _info(self):
        if self.config_name not in _SCORES:
            raise ValueError(f"name a configuration: evaluate.load(..., {' or '.join(map(repr, _SCORES))})")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="arXiv 2110.14168 (GSM8K); https://github.com/huggingface/math-verify",
            inputs_description=_INPUTS,
            features=datasets.Features(dict.fromkeys(("predictions", "references"), datasets.Value("string"))),
        )

    def _compute(self, predictions, references, verdicts=False):
        scores = _SCORES[self.config_name].items()
        found = {name: list(map(score, predictions, references)) for name, score in scores}
        shares = {name: sum(flags) / len(flags) for name, flags in found.items()}
        return {**shares, "verdicts": found} if verdicts else shares
