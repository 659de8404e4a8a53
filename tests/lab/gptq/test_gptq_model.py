# SPDX-License-Identifier: Apache-2.0
"""A model rounded by GPTQ: which layers, on what inputs, that quantizing it again changes nothing, and the command."""

import json
import math

import pytest
import torch
from factors import factors_config
from tiny_models import make_model
from torch import nn
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.cli import app
from hf_mxfp4.lab.gptq import round_model
from hf_mxfp4.lab.gptq.decoder import DecoderRun
from hf_mxfp4.lab.perplexity.evaluate import evaluate
from hf_mxfp4.lab.perplexity.schemes import read_schemes
from hf_mxfp4.lab.perplexity.swapped import swapped
from hf_mxfp4.layers import MXFP4Linear
from hf_mxfp4.numerics import apply_scheme, parse_scheme, rotate
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
    from hf_mxfp4.lab.gptq import rounding

    seen = []
    original = rounding.round_weight

    def noted(weight, moments, *scheme):
        seen.append(moments.clone())
        return original(weight, moments, *scheme)

    monkeypatch.setattr(rounding, "round_weight", noted)
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


QUANTIZED = MXFP4RLConfig(
    preset="w4a4",
    fprop={"weight": "even+mbs128-blockwise", "x": "rceil", "rotation": "deterministic-32"},
    dither_ties=False,
)


def by_hand(model, layer, weight, config):
    """Inputs of a layer as its product takes them, ``[tokens, K]``, while ``model`` is run under ``config``, and the
    error of outputs that are made of these with a weight's quantized values."""
    inputs = []
    with swapped(model, config), torch.no_grad():
        module = model.get_submodule(layer)
        handle = module.register_forward_pre_hook(lambda _, x: inputs.append(x[0].flatten(0, 1)))
        for ids in texts():
            model(ids)
        handle.remove()
    taken = apply_scheme(rotate(torch.cat(inputs), 32), parse_scheme("rceil"))

    def error(values):
        values = apply_scheme(rotate(values, 32), parse_scheme("even+mbs128-blockwise"))
        return float((taken @ (values - rotate(weight, 32)).T).square().sum())

    return taken, error


@pytest.mark.parametrize("layer", ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"])
def test_for_quantized_inputs_the_error_on_these_is_smaller(layer, monkeypatch):
    """And the moments are those of the inputs that the layer really has, behind layers that are rounded already."""
    from hf_mxfp4.lab.gptq import rounding

    seen = {}
    original = rounding._replace

    def noted(linear, moments, *scheme):
        seen[linear.weight] = moments.clone()
        return original(linear, moments, *scheme)

    monkeypatch.setattr(rounding, "_replace", noted)
    plain, model = make_model("llama").eval(), make_model("llama").eval()
    weight = model.get_submodule(layer).weight.detach().clone()
    round_model(plain, texts(), QUANTIZED)
    found = round_model(model, texts(), QUANTIZED, inputs="quantized")
    assert len(found.layers) == 14 and not found.left and found.gain_db > 1
    assert all(type(module) is not MXFP4Linear for module in model.modules())
    taken, error = by_hand(model, layer, weight, QUANTIZED)
    moments = rotate(rotate(seen[model.get_submodule(layer).weight], 32), 32, axis=0)
    torch.testing.assert_close(moments, taken.T @ taken, rtol=1e-4, atol=1e-4)
    rounded, other = (each.get_submodule(layer).weight.detach() for each in (model, plain))
    assert error(rounded) < min(0.97 * error(other), 0.6 * error(weight))
    # What the product takes of the stored weight is what was rounded, and stays.
    again = apply_scheme(rotate(rounded, 32), parse_scheme("even+mbs128-blockwise"))
    torch.testing.assert_close(rotate(again, 32), rounded, rtol=0, atol=1e-3)


def test_blocks_fall_back_as_when_the_rounded_model_is_run(monkeypatch):
    """A layer's threshold starts from the first text that it reads behind rounded layers."""
    from hf_mxfp4.lab.gptq import rounding

    config = read_schemes(["w4a4:even/even+of1@0.25"])[0].config
    layer, seen = "model.layers.1.mlp.down_proj", []
    original = rounding._replace
    monkeypatch.setattr(rounding, "_replace", lambda *given: seen.append(given[1].clone()) or original(*given))
    model = make_model("llama").eval()
    round_model(model, texts(), config, inputs="quantized")
    inputs = []
    with swapped(model, config), torch.no_grad():
        module = model.get_submodule(layer)
        module.register_forward_pre_hook(lambda module, x: inputs.append(module.forward_input(x[0], torch.float32)[0]))
        for ids in texts():
            model(ids)
    taken = torch.cat(inputs)
    torch.testing.assert_close(seen[-1], taken.T @ taken, rtol=1e-4, atol=1e-4)


def test_the_gain_is_of_outputs_on_quantized_inputs():
    model = make_model("llama").eval()
    names = [
        f"model.layers.{i}.{'mlp' if 'gate' in n or 'up' in n or 'down' in n else 'self_attn'}.{n}"
        for i in range(2)
        for n in PER_LAYER
    ]
    weights = {name: model.get_submodule(name).weight.detach().clone() for name in names}
    found = round_model(model, texts(), QUANTIZED, inputs="quantized")
    gains = []
    for name, weight in weights.items():
        _, error = by_hand(model, name, weight, QUANTIZED)
        gains.append(10 * math.log10(error(weight) / error(model.get_submodule(name).weight.detach())))
    assert found.gain_db == pytest.approx(sum(gains) / len(gains), rel=1e-3)


def test_without_a_rotation_quantized_inputs_leave_weights_on_the_grid():
    config = read_schemes(["w4a4:even+mbs128-blockwise/even+of1@0.25"])[0].config
    model = make_model("llama", dtype=torch.bfloat16)
    round_model(model, texts(), config, inputs="quantized")
    for name in ("model.layers.0.self_attn.o_proj", "model.layers.1.mlp.up_proj"):
        weight = model.get_submodule(name).weight.detach()
        assert torch.equal(apply_scheme(weight, parse_scheme("even+mbs128-blockwise")), weight)


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
    with pytest.raises(ValueError, match="inputs='both' must be one of full, quantized"):
        round_model(make_model("llama"), texts(), QUANTIZED, inputs="both")
    with pytest.raises(ValueError, match="model.layers.0.self_attn.q_proj stay in full precision"):
        round_model(make_model("llama"), texts(), CONFIG, inputs="quantized")
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


def test_the_command_rounds_for_quantized_inputs(folder):
    arguments = ("--text", folder / "sums.jsonl", "--scheme", "w4a4:even+mbs128-blockwise/even")
    done = run("gptq", folder / "base", folder / "out", *arguments, "--inputs", "quantized", "--json")
    assert done.exit_code == 0, done.stderr
    assert len(json.loads(done.stdout)["layers"]) == 14
    assert run("gptq", folder / "base", folder / "full", *arguments).exit_code == 0
    weights = [
        AutoModelForCausalLM.from_pretrained(folder / name, dtype="auto").model.layers[1].mlp.down_proj.weight
        for name in ("out", "full")
    ]
    assert not torch.equal(*weights)
    assert all(torch.equal(apply_scheme(each, parse_scheme("even+mbs128-blockwise")), each) for each in weights)


def test_the_command_says_what_it_cannot_do(folder):
    texts = ("--text", folder / "sums.jsonl")
    done = run("gptq", folder / "base", folder / "out", *texts, "--scheme", "w4a16:even", "--inputs", "quantized")
    assert done.exit_code == 2 and "stay in full precision" in done.stderr
    done = run("gptq", folder / "base", folder / "out", *texts, "--scheme", "rceil+mbs128-static+of0.5")
    assert done.exit_code == 2 and "cannot be rounded to stay" in done.stderr and not (folder / "out").exists()
    done = run("gptq", folder / "base", folder / "out", *texts, "--scheme", "nonsense")
    assert done.exit_code == 2 and "nonsense" in done.stderr
    done = run("gptq", folder / "base", folder / "base", *texts)
    assert done.exit_code == 2 and "overwrite" in done.stderr
