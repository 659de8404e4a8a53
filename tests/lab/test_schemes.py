# SPDX-License-Identifier: Apache-2.0
"""Schemes as text, and as a user names them for a model."""

import itertools
import json

import pytest
from tables import MACROS, RULES

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.lab import PAPER_SCHEMES, SourceError, read_schemes
from hf_mxfp4.numerics import QuantScheme, parse_scheme


def test_the_string_of_every_scheme_reads_back():
    fallbacks = [(None, None), (0.5, None), (1.0, None), (1 / 3, 0.1 / 3)]
    every = itertools.product(RULES, MACROS, fallbacks, ("nearest", "stochastic"), (1, 32))
    for rule, (size, search), (alpha, rate), rounding, rows in every:
        scheme = QuantScheme(rule, size, search, alpha, rounding, rows, rate)
        assert parse_scheme(str(scheme)) == scheme
        assert parse_scheme(str(scheme).removeprefix("mxfp4+")) == scheme


def test_schemes_of_a_config():
    config = MXFP4RLConfig()
    assert parse_scheme("rceil+mbs128") == QuantScheme("rceil", 128, "static")
    assert parse_scheme("rceil+of0.5+mbs128-dynamic") == QuantScheme("rceil", 128, "dynamic", 0.5)
    assert parse_scheme(" mxfp4+rceil+nearest+1x32 ") == QuantScheme()
    assert parse_scheme("even+mbs128-blockwise+of1") == config.weight_scheme == config.activation_scheme
    assert parse_scheme(PAPER_SCHEMES[2]) == MXFP4RLConfig(preset="paper_a").activation_scheme


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no scale rule"),
        ("mxfp4", "names no scale rule"),
        ("rciel", "no scale rule 'rciel'; did you mean 'rceil'"),
        ("int8", "no scale rule 'int8'; known are rceil, floor, even, mse"),
        ("rceil+mbs100-static", "macro_block=100 is not supported; choose one of None, 32, 64, 128, 256, 'row'"),
        ("rceil+mbs128-statik", "macro_search='statik' is not supported; choose one of 'static', 'dynamic'"),
        ("rceil+mbs64-blockwise", "needs macro_block=128"),
        ("rceil+mbs64-blockwise_fp8", "macro_search='block_mantissas_fp8' needs macro_block=128"),
        ("rceil+mbs128-blockwise_fp4", "macro_search='blockwise_fp4' is not supported"),
        ("rceil+of2", "outlier_fallback=2.0 must be None or a number in"),
        ("rceil+ofhalf", "'ofhalf' is no part of a scheme; known are"),
        ("rceil+of0.5@2", "fallback_rate=2.0"),
        ("rceil+mbs128+mbs64", "macro_block is given twice"),
        ("rceil+stochastik", "'stochastik' is no part of a scheme; did you mean 'stochastic'"),
        ("rceil+", "'' is no part of a scheme"),
    ],
)
def test_messages(text, message):
    with pytest.raises(ValueError, match="scheme") as error:
        parse_scheme(text)
    assert message in str(error.value)


FULL = "full precision"


@pytest.mark.parametrize(
    ("text", "weights", "activations", "bits"),
    [
        ("w4a16:rceil", "mxfp4+rceil", FULL, (4.25, None, 4.25)),
        ("w4a4:even+mbs128-blockwise", *["mxfp4+even+mbs128-blockwise"] * 2, (4.3125, 4.3125, 4.3125)),
        ("even+mbs128-block_mantissas_fp8", *["mxfp4+even+mbs128-blockwise_fp8"] * 2, (4.3125, 4.3125, 4.3125)),
        ("w4a8:rceil", "mxfp4+rceil", "fp8", (4.25, 8.0, 6.125)),
        ("w4a8", "mxfp4+even+mbs128-blockwise_fp8", "fp8", (4.3125, 8.0, 6.15625)),
        ("rceil+of0.5", *["mxfp4+rceil+of0.5"] * 2, (8.5, 8.5, 8.5)),
        ("even+of1@0.25", *["mxfp4+even+of1@0.25"] * 2, (5.3125, 5.3125, 5.3125)),
        ("rceil+mbs128-hybrid", "mxfp4+rceil+mbs128-dynamic", "mxfp4+rceil+mbs128-static", (4.3125, 4.3125, 4.3125)),
        ("rceil+32x32", "mxfp4+rceil+32x32", "mxfp4+rceil", (4.25, 4.25, 4.25)),
        ("w4a4:even/rceil+of1", "mxfp4+even", "mxfp4+rceil+of1", (4.25, 8.5, 6.375)),
        ("even/full", "mxfp4+even", FULL, (4.25, None, 4.25)),
        ("default", "mxfp4+even+mbs128-blockwise+of1", "mxfp4+even+mbs128-blockwise+of1", (8.5625, 8.5625, 8.5625)),
        ("w4a16", "mxfp4+even+mbs128-blockwise+of1", FULL, (8.5625, None, 8.5625)),
        ("w8a8", "fp8", "fp8", (8.0, 8.0, 8.0)),
        ("nvfp4", "nvfp4", "nvfp4", (4.5, 4.5, 4.5)),
        ("w4a8:nvfp4", "nvfp4", "fp8", (4.5, 8.0, 6.25)),
        ("paper_b", "mxfp4+floor+32x32", "mxfp4+floor", (4.25, 4.25, 4.25)),
    ],
)
def test_what_a_text_means(text, weights, activations, bits):
    (scheme,) = read_schemes([f" {text} "])
    fprop = scheme.config.gemms().fprop
    assert (scheme.name, str(fprop.right), str(fprop.left)) == (text, weights, activations)
    assert (scheme.weight_bits, scheme.activation_bits, scheme.bits) == bits
    assert scheme.config.mode == "qat" and not scheme.config.dither_ties


def test_options_from_files_and_the_checkpoint(tmp_path):
    options = {"scale_rule": "even", "macro_block": None, "outlier_fallback": None}
    (tmp_path / "own.json").write_text(json.dumps(options))
    (tmp_path / "own.yaml").write_text("scale_rule: even\nmacro_block: null\noutlier_fallback: null\npreset: w4a16\n")
    packed = MXFP4RLConfig(mode="packed", modules_to_not_convert=["layers.0"], stochastic_seed=0)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": packed.to_dict()}))
    texts = [f"config:{tmp_path / name}" for name in ("own.json", "own.yaml", "config.json")]
    first, second, third = (scheme.config for scheme in read_schemes(texts))
    assert str(first.gemms().fprop.left) == str(first.weight_scheme) == "mxfp4+even"
    assert second.activation_scheme is None and str(second.weight_scheme) == "mxfp4+even"
    assert (third.mode, third.activation_scheme) == ("qat", None)
    assert third.weight_scheme == packed.weight_scheme and third.modules_to_not_convert == ("layers.0",)
    # The layers that a checkpoint leaves alone are left alone by other schemes too; what says the same counts once.
    own = MXFP4RLConfig(modules_to_not_convert=["mlp"], stochastic_seed=3)
    found = read_schemes(["own", "rceil", "default", f"config:{tmp_path / 'own.json'}"], own)
    assert [scheme.name for scheme in found] == ["own", "rceil", f"config:{tmp_path / 'own.json'}"]
    assert [scheme.config.modules_to_not_convert for scheme in found] == [("mlp",), ("mlp",), None]
    assert found[0].config.stochastic_seed == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rciel", "--scheme rciel: .*did you mean 'rceil'.*known are 'default'"),
        ("w4a4:", "names no scale rule"),
        ("w4a16:rceil/even", "w4a16 quantizes weights alone in MXFP4; give one scheme"),
        ("w4a4:rceil/even+32x32", "tiles of 32x32 are for weights"),
        ("w4a4:full/rceil", "no scale rule 'full'"),
        ("own", "no scheme of its own"),
        ("config:gone.json", "gone.json cannot be read"),
        ("config:{}/list.yaml", "does not hold options of MXFP4RLConfig"),
        ("config:{}/wrong.json", "did you mean 'scale_rule'"),
    ],
)
def test_what_cannot_be_read(tmp_path, text, message):
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "wrong.json").write_text('{"scale_rul": "even"}')
    with pytest.raises(SourceError, match=message):
        read_schemes([text.format(tmp_path)])
