# SPDX-License-Identifier: Apache-2.0
"""The tables that tests choose from, and how products of options are thinned."""

import itertools

import pytest
from tables import CONFIGS, MACROS, RULES, TENSOR_SCHEMES, pairwise, pairwise_params

from hf_mxfp4.numerics import QuantScheme, ScaleRule, parse_scheme
from hf_mxfp4.presets import PRESETS


def pairs(cases):
    return {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}


def test_every_pair_is_met_by_few_cases():
    options = RULES, MACROS, (None, 0.5, 1.0), (1, 32), ("nearest", "stochastic"), ("float32", "bfloat16", "float16")
    cases = pairwise(*options)
    assert pairs(cases) == pairs(itertools.product(*options))
    assert 4 * 10 <= len(cases) <= 55 and len(set(cases)) == len(cases)
    assert cases == pairwise(*options)


def test_parameters_are_the_product_with_the_rest_in_the_long_run():
    options = ([], {}), (0, 1), (0, 1)  # values need no hash
    params = pairwise_params(*options)
    assert [param.values for param in params] == list(itertools.product(*options))
    assert [param.values for param in params if not param.marks] == pairwise(*options)
    assert {mark.name for param in params for mark in param.marks} == {"large"}


def test_the_tables_have_every_rule_preset_and_legal_scheme():
    assert set(RULES) == {rule.value for rule in ScaleRule}
    assert set(PRESETS) <= set(CONFIGS)
    for macro, search in MACROS:
        QuantScheme("rceil", macro, search)


@pytest.mark.parametrize("words", TENSOR_SCHEMES)
def test_schemes_are_named_by_their_words(words):
    assert parse_scheme(words) == TENSOR_SCHEMES[words]
