# SPDX-License-Identifier: Apache-2.0
"""The tables that tests choose from, and how products of options are thinned."""

import itertools

from tables import MACROS, RULES, pairwise

from hf_mxfp4.numerics import QuantScheme, ScaleRule


def pairs(cases):
    return {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}


def test_every_pair_is_met_by_few_cases():
    options = RULES, MACROS, (None, 0.5, 1.0), (1, 32), ("nearest", "stochastic"), ("float32", "bfloat16", "float16")
    cases = pairwise(*options)
    assert pairs(cases) == pairs(itertools.product(*options))
    assert 4 * 10 <= len(cases) <= 55 and len(set(cases)) == len(cases)
    assert cases == pairwise(*options)


def test_the_tables_have_every_rule_and_legal_scheme():
    assert set(RULES) == {rule.value for rule in ScaleRule}
    for macro, search in MACROS:
        QuantScheme("rceil", macro, search)
