# SPDX-License-Identifier: Apache-2.0
"""Schemes as text."""

import itertools

import pytest

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.lab import PAPER_SCHEMES
from hf_mxfp4.numerics import QuantScheme, parse_scheme


def every_scheme():
    macros = [
        (None, "static"),
        *itertools.product((32, 64, 128, 256, "row"), ("static", "dynamic")),
        (128, "blockwise"),
    ]
    fallbacks = [(None, None), (0.5, None), (1.0, None), (0.25, 0.1)]
    for rule, (size, search), (alpha, rate), rounding, rows in itertools.product(
        ("rceil", "floor", "even", "mse"), macros, fallbacks, ("nearest", "stochastic"), (1, 32)
    ):
        yield QuantScheme(rule, size, search, alpha, rounding, rows, rate)


def test_the_string_of_every_scheme_reads_back():
    schemes = list(every_scheme())
    assert len(schemes) == 4 * 12 * 4 * 2 * 2
    for scheme in schemes:
        assert parse_scheme(str(scheme)) == scheme
        assert parse_scheme(str(scheme).removeprefix("mxfp4+")) == scheme


@pytest.mark.parametrize(
    ("text", "scheme"),
    [
        ("rceil", QuantScheme()),
        (" mxfp4+even ", QuantScheme("even")),
        ("rceil+mbs128", QuantScheme("rceil", 128, "static")),
        ("rceil+of0.5+mbs128-dynamic", QuantScheme("rceil", 128, "dynamic", 0.5)),
        ("rceil+mbsrow-static", QuantScheme("rceil", "row")),
        ("rceil+nearest+1x32", QuantScheme()),
        ("even+of1@0.25", QuantScheme("even", None, "static", 1.0, fallback_rate=0.25)),
    ],
)
def test_shorthands(text, scheme):
    assert parse_scheme(text) == scheme


def test_schemes_of_a_config():
    config = MXFP4RLConfig()
    assert parse_scheme("even+mbs128-blockwise+of1") == config.weight_scheme == config.activation_scheme
    assert parse_scheme(PAPER_SCHEMES[2]) == MXFP4RLConfig(preset="paper_a").activation_scheme


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no scale rule"),
        ("mxfp4", "names no scale rule"),
        ("rciel", "no scale rule 'rciel'; did you mean 'rceil'"),
        ("int8", "no scale rule 'int8'; known are rceil, floor, even, mse"),
        ("rceil+mbs100-static", "macro blocks have 32, 64, 128, 256 elements or 'row', not 100"),
        ("rceil+mbs128-statik", "no macro search 'statik'; did you mean 'static'"),
        ("rceil+mbs64-blockwise", "needs macro_block=128"),
        ("rceil+of2", "outlier_fallback=2.0 must be None or a number in"),
        ("rceil+ofhalf", "'half' is not a number"),
        ("rceil+of0.5@2", "fallback_rate=2.0"),
        ("rceil+mbs128+mbs64", "gives macro_block twice"),
        ("rceil+stochastik", "'stochastik' is no part of a scheme; did you mean 'stochastic'"),
        ("rceil+", "'' is no part of a scheme"),
    ],
)
def test_messages(text, message):
    with pytest.raises(ValueError, match="scheme") as error:
        parse_scheme(text)
    assert message in str(error.value)
