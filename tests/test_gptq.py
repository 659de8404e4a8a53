# SPDX-License-Identifier: Apache-2.0
"""GPTQ of a weight and of a model: against eliminating columns one by one, what stays, and the command."""

import dataclasses
import json

import pytest
import torch
from commands import finish, run, save_with_texts
from tiny_models import make_model
from torch import nn
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.lab import evaluate, read_schemes, round_model, round_weight
from hf_mxfp4.numerics import QuantScheme, Rotation, apply_scheme, parse_scheme, quantize, rotate
from hf_mxfp4.prepare.gptq import DecoderRun
from hf_mxfp4.prepare.rounding import DAMPING, output_error, quantized_again, unsupported_reason


SCHEMES = ("even", "rceil", "floor", "mse", "even+mbs128-blockwise", "even+mbs128-blockwise_fp8", "rceil+32x32")


def case(rows=32, columns=96, tokens=200, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    few = torch.randn(tokens, 12, generator=generator) @ torch.randn(12, columns, generator=generator)
    inputs = few + 0.3 * torch.randn(tokens, columns, generator=generator)
    return weight, inputs.T @ inputs


def by_elimination(weight, moments, block=32):
    """Optimal brain quantization in float64, one column after the other, with scales by the rule `even`."""
    rest = weight.double().clone()
    count = weight.shape[1]
    inverse = torch.linalg.inv(moments.double() + DAMPING * moments.double().diagonal().mean() * torch.eye(count))
    found = torch.empty_like(rest)
    for j in range(count):
        if j % block == 0:
            exponents = quantize(rest[:, j : j + block].float(), scale_rule="even").scale[:, 0]
        scale = torch.exp2(exponents.double() - 127)
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        place = (rest[:, j, None].abs() / scale[:, None] - grid).abs().argmin(1)
        found[:, j] = grid[place] * scale * rest[:, j].sign()
        error = (rest[:, j] - found[:, j]) / inverse[j, j]
        rest -= torch.outer(error, inverse[j])
        inverse = inverse - torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
        inverse[j, j] = 1  # it is done with
    return found.float()


@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_elimination_of_one_column_after_the_other(seed):
    weight, moments = case(rows=8, seed=seed)
    found = round_weight(weight, moments, QuantScheme("even"))
    # Where float32 is on the other side of a boundary, all that follows in the row is another solution.
    same = (found == by_elimination(weight, moments)).all(1)
    assert same.sum() >= 7
    nearest = apply_scheme(weight, QuantScheme("even"))
    assert output_error(found - weight, moments) < 0.5 * output_error(nearest - weight, moments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_again_the_values_stay(scheme, dtype):
    weight, moments = case(columns=160)
    scheme = parse_scheme(scheme)
    found = round_weight(weight.to(dtype), moments, scheme)
    assert found.dtype == dtype
    assert torch.equal(quantize(found, **dataclasses.asdict(scheme)).dequantize(), found)
    nearest = apply_scheme(weight.to(dtype), scheme)
    assert output_error((found - weight).float(), moments) < 0.6 * output_error((nearest - weight).float(), moments)


@pytest.mark.parametrize("rotation", [None, Rotation(32)], ids=str)
@pytest.mark.parametrize(
    "scheme", ["even+mbs128-blockwise_fp8+of1", "even+mbs128-blockwise+of1", "even+of1", "rceil+of1"]
)
def test_residuals_are_rounded_too(scheme, rotation):
    weight, moments = case(rows=64, columns=128)
    scheme = parse_scheme(scheme)
    found = round_weight(weight.bfloat16(), moments, scheme, rotation)
    values, nearest = (quantized_again(each, scheme, rotation) for each in (found, weight))
    assert output_error(values - weight, moments) < 0.6 * output_error(nearest - weight, moments)
    one_pass = dataclasses.replace(scheme, outlier_fallback=None)
    plain = round_weight(weight.bfloat16(), moments, one_pass, rotation)
    assert output_error(values - weight, moments) < 0.9 * output_error(plain.float() - weight, moments)


def test_residuals_by_hand():
    """Inputs that are not alike leave the nearest values and their residuals, where these are kept."""
    weight = torch.zeros(1, 4, 32)
    weight[..., 0], weight[..., 1] = 6.0, torch.tensor([2.2, 2.4, 2.0, 2.1])
    found = round_weight(weight.view(1, 128), torch.eye(128), parse_scheme("rceil+of1")).view(4, 32)
    # The residuals .2, .4 and .1 of 2.0 in steps of 2**-5, with the scales .2 / 6, .4 / 6 and .1 / 6 rounded up.
    assert found[:, 1].tolist() == [2.1875, 2.375, 2.0, 2.09375]
    assert (found[:, 0] == 6).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotated_values_stay(dtype):
    weight, moments = case(columns=192)
    scheme = parse_scheme("even+mbs128-blockwise")
    rotation = Rotation(64)
    found = round_weight(weight.to(dtype), moments, scheme, rotation)
    again = apply_scheme(rotate(found.float(), 64), scheme)
    assert torch.allclose(rotate(again, 64), found.float(), rtol=0, atol=0.02)
    nearest = rotate(apply_scheme(rotate(weight, 64), scheme), 64)
    assert output_error(found.float() - weight, moments) < 0.6 * output_error(nearest - weight, moments)
    # On the grid before it is rotated it would be worse off.
    plain = rotate(apply_scheme(rotate(round_weight(weight, moments, scheme), 64), scheme), 64)
    assert output_error(found.float() - weight, moments) < output_error(plain - weight, moments)


@pytest.mark.parametrize(
    ("scheme", "rotation", "match"),
    [
        ("rceil+of0.5", None, "a residual times 0.5"),
        ("even+stochastic", None, "stochastic"),
        ("rceil+mbs128-static", None, "block_mantissas_fp8"),
        ("rceil+mbs32-dynamic", None, "block_mantissas_fp8"),
        ("even", Rotation(16, random=True), "deterministic"),
    ],
)
def test_schemes_whose_values_would_not_stay_are_refused(scheme, rotation, match):
    weight, moments = case()
    assert match in unsupported_reason(parse_scheme(scheme), rotation)
    with pytest.raises(ValueError, match=match):
        round_weight(weight, moments, parse_scheme(scheme), rotation)


def test_what_cannot_be_computed_says_so():
    weight, moments = case()
    with pytest.raises(ValueError, match="not finite on these texts"):
        round_weight(weight, moments * float("nan"), QuantScheme("even"))
    with pytest.raises(ValueError, match="the weight is not finite"):
        round_weight(weight / 0, moments, QuantScheme("even"))
    with pytest.raises(ValueError, match="does not divide the 96 inputs"):
        round_weight(weight, moments, QuantScheme("even"), Rotation(64))
    with pytest.raises(ValueError, match="float16 cannot hold"):
        round_weight((weight * 2.0**-23).half(), moments, QuantScheme("even"))


SCHEME = "w4a16:even+mbs128-blockwise"
CONFIG = read_schemes([SCHEME])[0].config
PER_LAYER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def texts(count=8, length=24):
    return list(torch.randint(32, (count, 1, length), generator=torch.Generator().manual_seed(0)))


def test_the_values_stay_and_predictions_are_nearer():
    original = make_model("llama")
    model = make_model("llama")
    found = round_model(model, texts(), CONFIG)
    assert len(found.layers) == 14
    assert not found.left
    assert found.gain_db > 1
    assert [name.rsplit(".", 1)[1] for name in found.layers] == [*PER_LAYER, *PER_LAYER]
    reference, plain, quantized = evaluate(model, texts(), read_schemes([SCHEME]), reference=original)
    assert quantized.kl.value == plain.kl.value > 0
    nearest = evaluate(original, texts(), read_schemes([SCHEME]))[1]
    assert quantized.kl.value < 0.8 * nearest.kl.value


@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen2", torch.float32), ("qwen3", torch.bfloat16), ("gemma", torch.bfloat16)]
)
def test_decoder_layers_run_one_by_one_are_the_model(family, dtype):
    model = make_model(family, dtype=dtype).eval()
    batches = texts(3)
    with torch.no_grad():
        run = DecoderRun(model, batches)
        for index in range(len(run.layers)):
            run.advance(index)
        for states, ids in zip(run._states, batches, strict=True):
            assert torch.equal(model.lm_head(model.model.norm(states)), model(ids).logits)
    assert len(round_model(model, batches, CONFIG).layers) == 14


def test_later_layers_are_rounded_on_what_rounded_ones_give(monkeypatch):
    from hf_mxfp4.prepare import gptq

    seen = []
    original = gptq.round_weight

    def noted(weight, moments, *scheme):
        seen.append(moments.clone())
        return original(weight, moments, *scheme)

    monkeypatch.setattr(gptq, "round_weight", noted)
    model = make_model("llama").eval()
    round_model(model, texts(), CONFIG)
    # Layers that read the same states share their moments, and these are of the model as it is by then.
    assert all(torch.equal(seen[0], seen[i]) for i in (1, 2))
    assert torch.equal(seen[4], seen[5])
    inputs = []
    down = model.model.layers[1].mlp.down_proj
    handle = down.register_forward_pre_hook(lambda _, x: inputs.append(x[0].flatten(0, 1)))
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
    assert len(found.layers) == rounded
    assert found.left == tuple(f"model.layers.{i}.mlp.experts" for i in range(2))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in experts.items())


def test_wrong_arguments_and_layers_that_are_not_run_one_after_the_other_are_noticed():
    with pytest.raises(ValueError, match="needs texts"):
        round_model(make_model("llama"), [], CONFIG)
    with pytest.raises(ValueError, match="0.self_attn.q_proj under mxfp4.rceil.* cannot be rounded to stay"):
        round_model(
            make_model("llama"), texts(), MXFP4RLConfig(mode="packed", scale_rule="rceil", macro_search="hybrid")
        )
    with pytest.raises(ValueError, match="no list of decoder layers"):
        round_model(nn.Sequential(nn.Linear(32, 32)), texts(), CONFIG)
    model = make_model("llama")
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    # This hook lies behind the one that notes what a layer gives.
    model.model.layers[1].register_forward_pre_hook(lambda module, inputs: (inputs[0].clone(),))
    with pytest.raises(ValueError, match="not run one after the other"):
        round_model(model, texts(), CONFIG)


@pytest.fixture
def folder(tmp_path):
    return save_with_texts(tmp_path, make_model("llama", dtype=torch.bfloat16), range(100, 140))


def test_the_command_shows_its_progress(folder, progress_bars):
    done = finish("gptq", folder / "base", folder / "out", "--text", folder / "sums.jsonl")
    assert "Running the model: " in done.stderr
    assert "Rounding weights:   0%|          | 0/14" in done.stderr


def test_packing_what_the_command_writes_loses_nothing(folder):
    done = finish("gptq", folder / "base", folder / "out", "--text", folder / "sums.jsonl", "--json")
    said = json.loads(done.stdout)
    assert len(said["layers"]) == 14
    assert said["left"] == []
    assert said["gain_db"] > 1
    packed = MXFP4RLConfig(mode="packed", preset="w4a16", fprop={"weight": "even+mbs128-blockwise"})
    plain = AutoModelForCausalLM.from_pretrained(folder / "out", dtype="auto")
    quantized = AutoModelForCausalLM.from_pretrained(folder / "out", quantization_config=packed, dtype="auto")
    for i, layer in enumerate(quantized.model.layers):
        weight = plain.model.layers[i].mlp.down_proj.weight
        assert weight.dtype == torch.bfloat16
        assert torch.equal(layer.mlp.down_proj.dequantized_weight(), weight)
    assert run("verify", folder / "out").exit_code == 0


@pytest.mark.parametrize("dtype", [pytest.param("auto", marks=pytest.mark.large), "float32"])
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
    for out, arguments, message in (
        ("out", ("--scheme", "rceil+mbs128-static+of0.5"), "cannot be rounded to stay"),
        ("base", (), "overwrite"),
    ):
        done = run("gptq", folder / "base", folder / out, *texts, *arguments)
        assert done.exit_code == 2
        assert message in done.stderr
        assert not (folder / "out").exists()
