# SPDX-License-Identifier: Apache-2.0
"""`MXFP4RLConfig`: defaults, refusals, and the forms in which it travels."""

import copy
import dataclasses
import inspect
import json
import pickle
import pydoc

import pytest
from tables import GEMMS
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig, QuantScheme, ScaleRule


DEFAULTS = {
    "quant_method": "mxfp4_rl",
    "format_version": 1,
    "mode": "qat",
    "preset": "w4a4",
    "scale_rule": "even",
    "macro_block": 128,
    "macro_search": "block_mantissas",
    "outlier_fallback": 1.0,
    "outlier_fallback_operands": "both",
    "outlier_fallback_rate": None,
    "weight_block": "1x32",
    "modules_to_not_convert": None,
    "backend": "auto",
}

CONFIGS = {
    "default": {},
    "w4a4g8": {"preset": "w4a4g8"},
    "paper_b": {"preset": "paper_b"},
    "gemms": GEMMS,
    "fprop": {"fprop": {"x": "floor+stochastic", "rotation": "deterministic-128"}, "stochastic_seed": 3},
    "weight-only": {"preset": "w4a16"},
    "plain-ocp": {"scale_rule": "floor", "macro_block": None, "outlier_fallback": None},
    "row-static": {"macro_block": "row", "macro_search": "static", "scale_rule": "mse"},
    "skips": {"modules_to_not_convert": ["layers.0", "re:.*down_proj"], "outlier_fallback_operands": "weights"},
    "tiles": {"weight_block": "32x32", "macro_block": None},
    "selective": {"outlier_fallback": 1.0, "outlier_fallback_rate": 0.1, "outlier_fallback_operands": "activations"},
    "packed": {"mode": "packed"},
    "packed-w4a4": {"mode": "packed", "preset": "w4a4", "outlier_fallback": 0.25, "outlier_fallback_rate": 0.5},
    "packed-plain": {"mode": "packed", "macro_block": None, "modules_to_not_convert": ["layers.1"]},
    "eager": {"backend": "eager", "outlier_fallback": 1, "macro_search": "dynamic", "macro_block": 32},
}


def all_configs():
    return pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)


def test_defaults():
    assert MXFP4RLConfig().to_dict() == DEFAULTS


def test_a_config_file_of_the_first_version_keeps_its_meaning():
    """Files written before there was a second mode, with and without the options that came later."""
    old = {
        "quant_method": "mxfp4_rl",
        "format_version": 1,
        "mode": "qat",
        "preset": "w4a4",
        "scale_rule": "rceil",
        "macro_block": 128,
        "macro_search": "hybrid",
        "outlier_fallback": 0.5,
        "modules_to_not_convert": None,
    }
    scheme = {"scale_rule": "rceil", "macro_search": "hybrid"}
    config = MXFP4RLConfig.from_dict(old)
    assert config == MXFP4RLConfig(**scheme, outlier_fallback=0.5)
    assert config.describe() == (
        "w4a4 [weights mxfp4+rceil+mbs128-dynamic+of0.5, activations mxfp4+rceil+mbs128-static+of0.5]"
    )
    assert MXFP4RLConfig.from_dict({"quant_method": "mxfp4_rl"}) == MXFP4RLConfig()
    assert MXFP4RLConfig.from_dict({**old, "preset": "w4a16", "outlier_fallback": None}) == MXFP4RLConfig(
        preset="w4a16", outlier_fallback=None, **scheme
    )


IDLE = [
    ({"outlier_fallback_operands": "weights"}, "outlier_fallback_operands='weights'"),
    ({"outlier_fallback_operands": "activations", "preset": "w4a4"}, "outlier_fallback_operands='activations'"),
    ({"macro_block": None, "macro_search": "dynamic"}, "macro_search='dynamic'"),
]


@pytest.mark.parametrize(("options", "named"), IDLE, ids=[named for _, named in IDLE])
def test_options_without_effect_in_packed_mode_are_refused(options, named):
    with pytest.raises(ValueError, match=f"{named} has no effect in mode='packed' .*; leave it out"):
        MXFP4RLConfig(mode="packed", **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"preset": "w4a4", "outlier_fallback": 1.0}),
        ({"preset": "w4a16", "outlier_fallback": None}, {}),
        ({"outlier_fallback": None, "outlier_fallback_operands": "weights"}, {"preset": "w4a4"}),
    ],
    ids=["default", "weight-only", "idle-operands"],
)
def test_the_packed_twin_of_a_trainable_config(options, expected):
    config = MXFP4RLConfig(**options)
    twin = config.packed()
    assert twin == MXFP4RLConfig(mode="packed", **expected)
    assert (twin.weight_scheme, twin.activation_scheme) == (config.weight_scheme, config.activation_scheme)
    assert twin.packed() == twin


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("scale_rul", "scale_rule"),
        ("macroblock", "macro_block"),
        ("outlier_falback", "outlier_fallback"),
        ("modules_to_not_covert", "modules_to_not_convert"),
        ("pre_set", "preset"),
    ],
)
def test_misspelt_option_names_the_nearest(key, suggestion):
    for build in (lambda: MXFP4RLConfig(**{key: None}), lambda: MXFP4RLConfig.from_dict({key: None})):
        with pytest.raises(TypeError, match=f"^MXFP4RLConfig has no option '{key}'; did you mean .*'{suggestion}'"):
            build()


def test_an_option_that_is_gone_names_what_to_use_and_old_files_are_read():
    entries = [{"modules": "layers.0", "dgrad": {"grad": "full"}}]
    with pytest.raises(TypeError, match="no longer has the option 'layer_overrides': all layers share dgrad"):
        MXFP4RLConfig(layer_overrides=entries)
    assert MXFP4RLConfig.from_dict({"preset": "w4a4g4", "layer_overrides": entries}) == MXFP4RLConfig(preset="w4a4g4")


def test_unknown_option_without_a_near_name_lists_the_options():
    with pytest.raises(TypeError) as error:
        MXFP4RLConfig(zzz=1)
    for option in DEFAULTS.keys() - {"quant_method"}:
        assert option in str(error.value)


def test_the_signature_and_help_list_every_option():
    parameters = inspect.signature(MXFP4RLConfig).parameters
    options = {option.name: option for option in dataclasses.fields(MXFP4RLConfig) if option.init}
    assert list(parameters) == list(options)
    assert {name: found.default for name, found in parameters.items()} == {n: o.default for n, o in options.items()}
    words = " ".join(pydoc.render_doc(MXFP4RLConfig, renderer=pydoc.plaintext).replace("|", " ").split())
    for name, option in options.items():
        assert f"{name} (" in words and " ".join(option.metadata["help"].replace("|", " ").split()) in words


def test_the_old_name_of_block_mantissas_is_read():
    old = "blockwise"
    config = MXFP4RLConfig(macro_search="block_mantissas")
    for other in (MXFP4RLConfig(macro_search=old), MXFP4RLConfig.from_dict({**config.to_dict(), "macro_search": old})):
        assert other == config and hash(other) == hash(config) and other.to_dict() == config.to_dict()
    assert QuantScheme("even", 128, "block_mantissas") == QuantScheme("even", 128, old)
    assert "mbs128-blockwise" in config.describe()


#: Values that no option of this name has.
INVALID = {
    "mode": ["train", None],
    "preset": ["w4a8", "W4A4", None, ["w4a4"]],
    "scale_rule": ["ceil", None],
    "macro_block": [0, 16, 512, -128, True, 128.0, "rows"],
    "macro_search": ["both", None],
    "outlier_fallback": [0, -0.5, 1.5, float("nan"), float("inf"), "0.5", True],
    "outlier_fallback_operands": ["activation", None],
    "outlier_fallback_rate": [0, 1, -0.1, float("nan"), "0.1", True],
    "weight_block": ["32x1", 32, None],
    "modules_to_not_convert": ["lm_head", ["layers.0", 3], [""], 5],
    "backend": ["cuda", None],
    "format_version": [2, "1", True, None],
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_values_are_named(name):
    for value in INVALID[name]:
        for build in (lambda v: MXFP4RLConfig(**{name: v}), lambda v: MXFP4RLConfig.from_dict({name: v})):
            with pytest.raises(ValueError) as error:
                build(value)
            assert f"{name}={value!r}" in str(error.value)


@pytest.mark.parametrize("method", ["mxfp4", "bitsandbytes", "MXFP4_RL"])
def test_the_config_of_another_method_is_refused(method):
    with pytest.raises(ValueError, match=f"'{method}'.*'mxfp4_rl'"):
        MXFP4RLConfig.from_dict({"quant_method": method})


def test_enum_and_numeric_strings_are_normalised():
    config = MXFP4RLConfig(scale_rule=ScaleRule.EVEN, macro_block="64")
    assert config == MXFP4RLConfig(scale_rule="even", macro_block=64)
    assert json.loads(config.to_json_string())["macro_block"] == 64
    assert type(config.scale_rule) is str


@all_configs()
def test_dictionary_and_json_round_trips(options, tmp_path):
    config = MXFP4RLConfig(**options)
    assert MXFP4RLConfig.from_dict(config.to_dict()) == config
    assert MXFP4RLConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert MXFP4RLConfig.from_dict(json.loads(config.to_json_string())) == config
    assert MXFP4RLConfig.from_dict(dict(config)) == config
    for name in ("fprop", "dgrad", "wgrad", "stochastic_seed"):
        assert config.to_dict().get(name) == options.get(name)
    config.to_json_file(tmp_path / "scheme.json")
    assert MXFP4RLConfig.from_dict(json.loads((tmp_path / "scheme.json").read_text())) == config


@all_configs()
def test_copies_are_equal_frozen_and_hash_alike(options):
    config = MXFP4RLConfig(**options)
    copies = [
        MXFP4RLConfig(**options),
        copy.copy(config),
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        eval(repr(config)),
        dataclasses.replace(config),
    ]
    for other in copies:
        assert other == config
        assert hash(other) == hash(config) and other.gemms() == config.gemms()
        with pytest.raises(dataclasses.FrozenInstanceError):
            other.preset = "w4a16"
    assert {config, *copies} == {config}


def test_dictionary_form_is_accepted_by_from_pretrained(checkpoint):
    folder = checkpoint()
    as_dict = {"quant_method": "mxfp4_rl", "preset": "w4a16", "macro_block": None, "outlier_fallback": None}
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=as_dict)
    assert model.quantization_report.n_quantized == 14
    assert model.hf_quantizer.quantization_config == MXFP4RLConfig(
        preset="w4a16", macro_block=None, outlier_fallback=None
    )


# macro_search -> what it means for weights and for activations.
SEARCHES = {
    "static": ("static", "static"),
    "dynamic": ("dynamic", "dynamic"),
    "hybrid": ("dynamic", "static"),
    "blockwise": ("blockwise", "blockwise"),
}
# outlier_fallback_operands -> alpha of weights and of activations.
FALLBACKS = {"both": (1.0, 1.0), "weights": (1.0, None), "activations": (None, 1.0)}


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize(
    ("preset", "operands"),
    [("w4a4", "both"), ("w4a4", "weights"), ("w4a4", "activations"), ("w4a16", "both"), ("w4a16", "weights")],
)
def test_schemes_of_the_operands(preset, operands, search):
    config = MXFP4RLConfig(preset=preset, macro_search=search, outlier_fallback_operands=operands)
    rule = ScaleRule.EVEN
    assert config.weight_scheme == QuantScheme(rule, 128, SEARCHES[search][0], FALLBACKS[operands][0], "nearest")
    expected = QuantScheme(rule, 128, SEARCHES[search][1], FALLBACKS[operands][1], "nearest")
    assert config.activation_scheme == (expected if preset == "w4a4" else None)


@pytest.mark.parametrize(
    ("operands", "rates"), [("both", (0.1, 0.1)), ("weights", (0.1, None)), ("activations", (None, 0.1))]
)
def test_the_fallback_rate_goes_where_fallback_goes(operands, rates):
    config = MXFP4RLConfig(outlier_fallback_rate=0.1, outlier_fallback_operands=operands)
    assert (config.weight_scheme.fallback_rate, config.activation_scheme.fallback_rate) == rates
    weight_only = MXFP4RLConfig(outlier_fallback_rate=0.1, preset="w4a16")
    assert weight_only.weight_scheme.fallback_rate == 0.1 and weight_only.activation_scheme is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {},
            "w4a4 [weights mxfp4+even+mbs128-blockwise+of1, activations mxfp4+even+mbs128-blockwise+of1]",
        ),
        ({"preset": "w4a16"}, "w4a16 [weights mxfp4+even+mbs128-blockwise+of1, activations full precision]"),
        (
            {"scale_rule": "floor", "macro_block": None, "outlier_fallback": None},
            "w4a4 [weights mxfp4+floor, activations mxfp4+floor]",
        ),
        (
            {"macro_block": "row", "macro_search": "static", "outlier_fallback_operands": "activations"},
            "w4a4 [weights mxfp4+even+mbsrow-static, activations mxfp4+even+mbsrow-static+of1]",
        ),
        (
            {"weight_block": "32x32", "outlier_fallback_rate": 0.1, "macro_block": None, "scale_rule": "even"},
            "w4a4 [weights mxfp4+even+of1@0.1+32x32, activations mxfp4+even+of1@0.1]",
        ),
    ],
    ids=["default", "weight-only", "plain", "row", "tiles-selective"],
)
def test_describe(options, expected):
    assert MXFP4RLConfig(**options).describe() == expected


def test_an_engine_of_earlier_versions_is_still_read():
    assert MXFP4RLConfig.from_dict({"engine": "mxfp4"}) == MXFP4RLConfig()
