# SPDX-License-Identifier: Apache-2.0
"""A model rounded by GPTQ: which layers, on what inputs, that quantizing it again changes nothing, and the command."""

import json

import pytest
import torch
from factors import factors_config
from tiny_models import make_model
from torch import nn
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.cli import app
from hf_mxfp4.lab import evaluate, read_schemes, round_model
from hf_mxfp4.lab.gptq import DecoderRun
from recipes.tasks.tiny_model import build_char_tokenizer


SCHEME = "w4a16:even+mbs128-blockwise"
CONFIG = read_schemes([SCHEME])[0].config
PER_LAYER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ALPHABET = "0123456789+= ?\n"


def texts(count=8, length=24):
    return list(torch.randint(32, (count, 1, length), generator=torch.Generator().manual_seed(0)))


def test_the_values_stay_and_predictions_are_nearer():
    original, model = make_model("llama"), make_model("llama")
    found = round_model(model, texts(), CONFIG)
    assert len(found.layers) == 14 and not found.left and found.gain_db > 1
    assert [name.rsplit(".", 1)[1] for name in found.layers] == [*PER_LAYER, *PER_LAYER]
    reference, plain, quantized = evaluate(model, texts(), read_schemes([SCHEME]), reference=original)
    assert quantized.kl.value == plain.kl.value > 0
    nearest = evaluate(original, texts(), read_schemes([SCHEME]))[1]
    assert quantized.kl.value < 0.8 * nearest.kl.value


def test_rotated_products_are_nearer_too():
    options = {"weight": "even+mbs128-blockwise", "rotation": "deterministic-32"}
    config = MXFP4RLConfig(preset="w4a16", fprop=options, dither_ties=False)
    scheme = [type(read_schemes(["default"])[0])("rotated", config)]
    original, model = make_model("llama"), make_model("llama")
    found = round_model(model, texts(), config)
    assert len(found.layers) == 14
    nearest, rounded = (
        evaluate(each, texts(), scheme, reference=original)[2].kl.value for each in (make_model("llama"), model)
    )
    assert rounded < 0.8 * nearest


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoder_layers_run_one_by_one_are_the_model(family, dtype):
    model, batches = make_model(family, dtype=dtype).eval(), texts(3)
    with torch.no_grad():
        run = DecoderRun(model, batches)
        for index in range(len(run.layers)):
            run.advance(index)
        for states, ids in zip(run._states, batches, strict=True):
            assert torch.equal(model.lm_head(model.model.norm(states)), model(ids).logits)
    assert run.names == ["model.layers.0", "model.layers.1"]
    assert len(round_model(model, batches, CONFIG).layers) == 14


def test_later_layers_are_rounded_on_what_rounded_ones_give(monkeypatch):
    from hf_mxfp4.lab import gptq

    seen = []
    original = gptq.round_weight

    def noted(weight, moments, *scheme):
        seen.append(moments.clone())
        return original(weight, moments, *scheme)

    monkeypatch.setattr(gptq, "round_weight", noted)
    model = make_model("llama").eval()
    round_model(model, texts(), CONFIG)
    # Layers that read the same states share their moments, and these are of the model as it is by then.
    assert all(torch.equal(seen[0], seen[i]) for i in (1, 2)) and torch.equal(seen[4], seen[5])
    inputs = []
    handle = model.model.layers[1].mlp.down_proj.register_forward_pre_hook(
        lambda _, x: inputs.append(x[0].flatten(0, 1))
    )
    with torch.no_grad():
        for ids in texts():
            model(ids)
    handle.remove()
    states = torch.cat(inputs)
    torch.testing.assert_close(seen[-1], states.T @ states, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("family", "rounded"), [("qwen3_moe", 8), ("qwen2_moe", 14)])
def test_experts_are_left_alone_and_named(family, rounded):
    model = make_model(family)
    experts = {name: value.clone() for name, value in model.state_dict().items() if ".experts." in name}
    found = round_model(model, texts(), CONFIG)
    assert len(found.layers) == rounded and found.left == tuple(f"model.layers.{i}.mlp.experts" for i in range(2))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in experts.items())


def test_layers_that_are_not_converted_stay():
    model = make_model("llama")
    before = model.model.layers[0].mlp.down_proj.weight.clone()
    config = MXFP4RLConfig(
        preset="w4a16", fprop={"weight": "even"}, dither_ties=False, modules_to_not_convert=["layers.0.mlp.down_proj"]
    )
    found = round_model(model, texts(), config)
    assert len(found.layers) == 13 and torch.equal(model.model.layers[0].mlp.down_proj.weight, before)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="needs texts"):
        round_model(make_model("llama"), [], CONFIG)
    with pytest.raises(
        ValueError, match="model.layers.0.self_attn.q_proj under mxfp4.rceil.* cannot be rounded to stay"
    ):
        round_model(make_model("llama"), texts(), factors_config(mode="packed", preset="w4a16"))
    with pytest.raises(ValueError, match="no list of decoder layers"):
        round_model(nn.Sequential(nn.Linear(32, 32)), texts(), CONFIG)


def test_layers_that_are_not_run_one_after_the_other_are_noticed():
    model = make_model("llama")
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(ValueError, match="not run one after the other"):
        # The hook lies behind the one that notes what a layer gives.
        handle = model.model.layers[1].register_forward_pre_hook(lambda module, inputs: (inputs[0].clone(),))
        try:
            round_model(model, texts(), CONFIG)
        finally:
            handle.remove()


@pytest.fixture
def folder(tmp_path):
    make_model("llama", dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    build_char_tokenizer(ALPHABET).save_pretrained(tmp_path / "base")
    rows = [{"text": f"{i}+{i}={2 * i}\n"} for i in range(100, 140)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def run(command, *arguments):
    return CliRunner().invoke(app, [command, *map(str, arguments)])


def test_packing_what_the_command_writes_loses_nothing(folder):
    done = run("gptq", folder / "base", folder / "out", "--text", folder / "sums.jsonl", "--json")
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout)
    assert len(said["layers"]) == 14 and said["left"] == [] and said["gain_db"] > 1
    assert "rounded model.layers.1.mlp.down_proj" in done.stderr
    packed = MXFP4RLConfig(mode="packed", preset="w4a16", fprop={"weight": "even+mbs128-blockwise"})
    plain = AutoModelForCausalLM.from_pretrained(folder / "out", dtype="auto")
    quantized = AutoModelForCausalLM.from_pretrained(folder / "out", quantization_config=packed, dtype="auto")
    for i, layer in enumerate(quantized.model.layers):
        weight = plain.model.layers[i].mlp.down_proj.weight
        assert weight.dtype == torch.bfloat16 and torch.equal(layer.mlp.down_proj.dequantized_weight(), weight)
    assert run("verify", folder / "out").exit_code == 0


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_masters_on_the_grid_are_told_of_when_they_are_loaded_to_train(folder, caplog, dtype):
    config = MXFP4RLConfig(preset="w4a4", fprop={"weight": "even+mbs128-blockwise"})
    assert run("gptq", folder / "base", folder / "out", "--text", folder / "sums.jsonl").exit_code == 0
    for name, warned in (("base", False), ("out", True)):
        caplog.clear()
        model = AutoModelForCausalLM.from_pretrained(folder / name, quantization_config=config, dtype=dtype)
        assert model.quantization_report.masters_on_grid == warned
        assert ("lie on the grid" in caplog.text) == warned


def test_the_command_says_what_it_cannot_do(folder):
    texts = ("--text", folder / "sums.jsonl")
    done = run("gptq", folder / "base", folder / "out", *texts, "--inputs", "quantized")
    assert done.exit_code == 2 and "--inputs was removed: weights are rounded for" in done.stderr
    done = run("gptq", folder / "base", folder / "out", *texts, "--scheme", "rceil+mbs128-static+of0.5")
    assert done.exit_code == 2 and "cannot be rounded to stay" in done.stderr and not (folder / "out").exists()
    done = run("gptq", folder / "base", folder / "out", *texts, "--scheme", "nonsense")
    assert done.exit_code == 2 and "nonsense" in done.stderr
    done = run("gptq", folder / "base", folder / "base", *texts)
    assert done.exit_code == 2 and "overwrite" in done.stderr
