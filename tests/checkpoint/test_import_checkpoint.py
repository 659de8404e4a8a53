# SPDX-License-Identifier: Apache-2.0
"""Import of other engines' checkpoints: bit for bit, or a clear refusal."""

import copy
from pathlib import Path

import pytest
import torch
from export_files import config_in, header_and_data, save_packed, save_plain
from moe_models import make_moe
from safetensors.torch import save_file
from same_bits import IDS, assert_same, layers_of, tensors_in
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4Experts, MXFP4RLConfig, pack
from hf_mxfp4.checkpoint import FORMATS, CheckpointError, export, import_checkpoint
from hf_mxfp4.files import write_json
from hf_mxfp4.layers import MXFP4PackedExperts


#: Attention, shared experts and dense MLPs.
ALL_BUT_EXPERTS = r"re:(?!.*\.experts\b).*"
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("format", ["compressed-tensors", "quark"])
@pytest.mark.parametrize(
    ("family", "options"),
    [("qwen2", {"tie": True}), ("llama", {}), ("qwen3_moe", {"config": {"modules_to_not_convert": ["experts"]}})],
    ids=["qwen2", "llama", "qwen3_moe"],
)
def test_there_and_back_gives_the_same_files(family, options, format, tmp_path):
    source = save_packed(tmp_path / "packed", family, **options)
    export(source, tmp_path / "out", format)
    import_checkpoint(tmp_path / "out", tmp_path / "back")
    files = {file.name for file in source.iterdir()} - {"pack_report.json"}
    assert {file.name for file in (tmp_path / "back").iterdir()} == files
    for name in files - {"model.safetensors", "config.json", "mxfp4_manifest.json", "README.md"}:
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    one, other = (header_and_data(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert one[1] == other[1]
    before = config_in(source)
    after = config_in(tmp_path / "back")
    if family == "qwen3_moe":  # the same layers, told by their full names
        experts = after["quantization_config"].pop("modules_to_not_convert")
        assert experts == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
        del before["quantization_config"]["modules_to_not_convert"]
    assert before == after
    model, original = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "back", source))
    assert torch.equal(model(IDS).logits, original(IDS).logits)


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
def test_routed_experts_alone_are_released_in_4_bits_and_trained_again(family, tmp_path):
    """Kimi K3's scheme. Released, the checkpoint names what is not quantized by patterns, and says nothing of MXFP8."""
    make_moe(family).bfloat16().save_pretrained(tmp_path / "plain")
    scheme = {"scale_rule": "even", "macro_block": None, "fprop": {"x": "mxfp8"}}
    trained = MXFP4RLConfig(preset="w4a8", smooth=False, **scheme, modules_to_not_convert=[ALL_BUT_EXPERTS])

    def load(folder, **options):
        return AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32, **options).eval()

    policy = load("plain", quantization_config=trained)
    assert {name.rpartition(".")[2] for name in layers_of(policy, MXFP4Experts)} == {"experts"}
    policy.save_pretrained(tmp_path / "policy")
    report = export(tmp_path / "policy", tmp_path / "released", "compressed-tensors")
    assert report.notes[0].startswith("Activations were quantized (mxfp8); the exported model says that they are not")
    tensors = tensors_in(tmp_path / "released")
    config = config_in(tmp_path / "released")
    quantized = {name for name, tensor in tensors.items() if tensor.dtype == torch.uint8}
    assert quantized == {name for name in tensors if ".experts." in name}
    kept = {name.removesuffix(".weight") for name in tensors if tensors[name].dim() == 2 and name not in quantized}
    options = config["quantization_config"]
    assert set(options["ignore"]) == kept - {"model.embed_tokens"}
    options["ignore"] = [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_expert.*",
        r"re:.*mlp\.(gate|up|down|gate_up)_proj.*",
    ]
    write_json(tmp_path / "released" / "config.json", config)
    import_checkpoint(tmp_path / "released", tmp_path / "packed", activations="mxfp8")
    export(tmp_path / "packed", tmp_path / "values", "bf16")
    packed = load("packed")
    again = load("values", quantization_config=trained)
    assert str(packed.config.quantization_config.activation_scheme) == "mxfp8"
    for model in (pack(policy), pack(again)):
        for name, layer in layers_of(packed, MXFP4PackedExperts).items():
            assert_same(dict(layer.named_parameters()), dict(model.get_submodule(name).named_parameters()))
        torch.testing.assert_close(model(IDS).logits, packed(IDS).logits)


def test_activations_are_given_where_a_checkpoint_does_not_say_them(tmp_path):
    source = save_packed(tmp_path / "packed", layers=1, config={"preset": "w4a4"})
    export(source, tmp_path / "out", "quark")
    with pytest.raises(ValueError, match="activations='fp8': .*out says itself that they are mxfp4"):
        import_checkpoint(tmp_path / "out", tmp_path / "back", activations="fp8")
    export(source, tmp_path / "plain", "compressed-tensors")
    with pytest.raises(ValueError, match="no scale rule 'mxfp9'"):
        import_checkpoint(tmp_path / "plain", tmp_path / "back", activations="mxfp9")
    assert not (tmp_path / "back").exists()


def foreign(folder, format="compressed-tensors", **options):
    """A checkpoint written by hand, with random bytes for weights."""
    save_plain(folder, layers=1, **options)
    tensors = tensors_in(folder)
    config = config_in(folder)
    torch.manual_seed(1)
    weight = "weight_packed" if format == "compressed-tensors" else "weight"
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = tensors.pop(name).shape
        layer = name.removesuffix(".weight")
        tensors[f"{layer}.{weight}"] = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
        tensors[f"{layer}.weight_scale"] = torch.randint(100, 130, (rows, columns // 32), dtype=torch.uint8)
    config["quantization_config"] = FORMATS[format].quantization_config(MXFP4RLConfig(mode="packed"), ["lm_head"])
    write(folder, tensors, config)
    return Path(folder), tensors, config


def write(folder, tensors, config):
    save_file(tensors, Path(folder) / "model.safetensors", {"format": "pt"})
    write_json(Path(folder) / "config.json", config)


@pytest.mark.parametrize("format", ["compressed-tensors", "quark"])
def test_plain_activation_quantization_becomes_w4a4(format, tmp_path):
    folder, tensors, config = foreign(tmp_path / "foreign", format)
    options = config["quantization_config"]
    if format == "quark":
        scheme = options["global_quant_config"]
        scheme["input_tensors"] = {**scheme["weight"], "is_dynamic": True, "scale_calculation_mode": "floor"}
    else:
        (group,) = options["config_groups"].values()
        group["input_activations"] = {**group["weights"], "dynamic": True}
    write(folder, tensors, config)
    import_checkpoint(folder, tmp_path / "out")
    found = MXFP4RLConfig.from_dict(config_in(tmp_path / "out")["quantization_config"])
    assert found.preset == "w4a4"
    assert str(found.activation_scheme) == ("mxfp4+floor" if format == "quark" else "mxfp4+even")


def change(config, path, value):
    config = copy.deepcopy(config)
    *parents, last = path.split("/")
    options = config["quantization_config"]
    for parent in parents:
        options = options[parent]
    options[last] = value
    return config


WEIGHTS = "config_groups/group_0/weights"
REFUSED = {
    ("compressed-tensors", "config_groups/group_0/format"): ("float-quantized", "format 'float-quantized'"),
    ("compressed-tensors", f"{WEIGHTS}/group_size"): (16, "group_size=16; only 32"),
    ("compressed-tensors", f"{WEIGHTS}/actorder"): ("weight", "actorder='weight'"),
    ("compressed-tensors", "config_groups/group_0/input_activations"): (
        {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True},
        "input_activations has num_bits=8",
    ),
    ("compressed-tensors", "config_groups/group_0/output_activations"): ({"num_bits": 8}, "output_activations="),
    ("compressed-tensors", "config_groups/group_0"): (["Linear"], "only a full scheme"),
    ("compressed-tensors", "kv_cache_scheme"): ({"num_bits": 8}, "kv_cache_scheme"),
    ("compressed-tensors", "transform_config"): ({"config_groups": {"u": {}}}, "transform_config"),
    ("compressed-tensors", "quant_method"): ("gptq", "'gptq'; what can be imported are MXFP4 checkpoints of"),
    ("quark", "global_quant_config/weight/dtype"): ("fp6_e3m2", "dtype='fp6_e3m2'; only 'fp4'"),
    ("quark", "global_quant_config/weight"): ([{}, {}], "not a JSON object"),
    ("quark", "global_quant_config/input_tensors"): ({"dtype": "fp8_e4m3"}, "input_tensors has dtype='fp8_e4m3'"),
    ("quark", "layer_quant_config"): ({"*q_proj": {}}, "layer_quant_config"),
    ("quark", "algo_config"): ([{"name": "rotation"}], "rotation"),
}


@pytest.mark.parametrize(("key", "value"), REFUSED.items(), ids=[f"{f}:{p}" for f, p in REFUSED])
def test_what_has_no_equal_here_is_refused(key, value, tmp_path):
    format, path = key
    folder, tensors, config = foreign(tmp_path / "foreign", format)
    write(folder, tensors, change(config, path, value[0]))
    with pytest.raises(CheckpointError) as refusal:
        import_checkpoint(folder, tmp_path / "out")
    assert value[1] in str(refusal.value)
    assert not (tmp_path / "out").exists()


def byte(*shape):
    return torch.zeros(shape, dtype=torch.uint8)


TENSORS = {
    "head": ({"lm_head.weight_packed": byte(32, 32), "lm_head.weight_scale": byte(32, 2)}, "lm_head, which"),
    "expert": (
        {f"model.layers.0.mlp.experts.0.{n}": byte(4, 4) for n in ("weight_packed", "weight_scale")},
        "quantizes model.layers.0.mlp.experts.0",
    ),
    "scale-dtype": ({f"{Q_PROJ}.weight_scale": torch.ones(64, 2)}, f"{Q_PROJ}.weight_scale is torch.float32"),
    "bytes": ({"model.norm.weight": byte(64)}, "model.norm.weight is torch.uint8 [64]; the model needs floating-point"),
    "weight-missing": ({f"{Q_PROJ}.weight_packed": None}, f"no {Q_PROJ}.weight_packed"),
    "nothing": (None, "nothing in it is quantized"),
}


@pytest.mark.parametrize(("new", "words"), TENSORS.values(), ids=TENSORS)
def test_tensors_that_do_not_fit_are_named(new, words, tmp_path):
    folder, tensors, config = foreign(tmp_path / "foreign")
    if new is None:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("weight_scale")}
    else:
        tensors.update(new)
    write(folder, {name: tensor for name, tensor in tensors.items() if tensor is not None}, config)
    with pytest.raises(CheckpointError) as refusal:
        import_checkpoint(folder, tmp_path / "out")
    assert words in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_a_block_of_nan_is_refused(tmp_path):
    folder, tensors, config = foreign(tmp_path / "foreign")
    tensors[f"{Q_PROJ}.weight_scale"][3, 1] = 255
    write(folder, tensors, config)
    with pytest.raises(CheckpointError, match=f"{Q_PROJ} holds NaN or infinity"):
        import_checkpoint(folder, tmp_path / "out")


def test_damaged_and_unquantized_sources(tmp_path):
    with pytest.raises(CheckpointError, match="is not quantized; there is nothing to import"):
        import_checkpoint(save_plain(tmp_path / "plain", layers=1), tmp_path / "out")
    folder, _, config = foreign(tmp_path / "foreign")
    config["architectures"] = ["MyOwnModel"]
    write_json(folder / "config.json", config)
    with pytest.raises(CheckpointError, match="'MyOwnModel'.*remote code"):
        import_checkpoint(folder, tmp_path / "out")
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json cannot be read"):
        import_checkpoint(folder, tmp_path / "out")
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="config.json is missing"):
        import_checkpoint(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
