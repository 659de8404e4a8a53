# SPDX-License-Identifier: Apache-2.0
"""Scales from activations into weights: what is scaled by what, that the model stays the same bit for bit, and that
quantized activations lose less."""

import json

import pytest
import torch
from commands import finish, run, save_with_texts
from safetensors.torch import load_file
from tiny_models import make_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

from hf_mxfp4 import numerics
from hf_mxfp4.lab import smooth_model
from hf_mxfp4.lab.smoothing import Place, _apply, _scale


PER_LAYER = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")


def texts(count=3):
    return list(torch.randint(32, (count, 1, 9), generator=torch.Generator().manual_seed(0)))


def with_outliers(family="llama", **options):
    """A model with one channel of each norm, up projection and value projection that is 64 times as large as the
    others."""
    model = make_model(family, **options)
    with torch.no_grad():
        for layer in model.model.layers:
            for weight in (layer.input_layernorm.weight, layer.self_attn.v_proj.weight):
                weight[5] *= 64
            if hasattr(layer.mlp, "up_proj"):
                layer.post_attention_layernorm.weight[5] *= 64
                layer.mlp.up_proj.weight[5] *= 64
    return model


def logits(model):
    with torch.no_grad():
        return [model(ids).logits for ids in texts()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_model_stays_the_same_bit_for_bit(family, dtype):
    model = with_outliers(family, dtype=dtype)
    before, weights = logits(model), {name: value.clone() for name, value in model.state_dict().items()}
    found = smooth_model(model, texts())
    assert found.places == tuple(f"model.layers.{i}.{name}" for i in range(2) for name in PER_LAYER)
    assert found.n_all == 2 * (64 + 32 + 64 + 96) and 0 < found.n_channels < found.n_all and not found.left
    assert found.exponents[1] >= 2
    for old, new in zip(before, logits(model), strict=True):
        assert torch.equal(old, new)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, weights[name])}
    assert any("up_proj" in name for name in changed) and not any("embed" in name for name in changed)


def test_scales_are_the_definition():
    place_input = torch.tensor([1.0, 16.0, 1.0, 1.0])
    norm, reader = nn.Parameter(place_input.clone()), nn.Linear(4, 2, bias=False)
    with torch.no_grad():
        reader.weight.copy_(torch.tensor([[1.0, 1.0, 1.0, 4.0], [1.0, 1.0, 1.0, 4.0]]))
    place = Place("reader", (norm,), (reader,))
    # log2 of a / w: 0, 4, 0, -2; half of it, less the mean of 1/4: -.25, 1.75, -.25, -1.25.
    scale = _scale(place, place_input.double() ** 2, 0.5)
    assert scale.tolist() == [1, 4, 1, 0.5]
    with torch.no_grad():
        _apply(place, scale)
    assert norm.tolist() == [1, 4, 1, 2]
    assert reader.weight.tolist() == [[1, 4, 1, 2], [1, 4, 1, 2]]
    # All in the activations: less the mean of 1: -1, 3, -1, -1 for strength 1.
    assert _scale(place, place_input.double() ** 2, 1.0).tolist() == [0.5, 8, 0.5, 0.5]


def test_quantized_activations_lose_less():
    def error(model):
        """Of the inputs of the first layer's MLP, quantized, relative to their squares."""
        kept = []
        handle = model.model.layers[0].mlp.gate_proj.register_forward_pre_hook(lambda _, x: kept.append(x[0]))
        logits(model)
        handle.remove()
        x = torch.cat([each.flatten(0, 1) for each in kept])
        return float((numerics.fake_quantize(x, scale_rule="even") - x).square().sum(0).div(x.square().sum(0)).mean())

    model = with_outliers()
    before = error(model)
    smooth_model(model, texts())
    assert error(model) < 0.75 * before


@pytest.mark.parametrize(
    ("family", "places"),
    [("gemma", ("o_proj", "down_proj")), ("qwen3_moe", ("q_proj", "o_proj")), ("mixtral", ("q_proj", "o_proj"))],
)
def test_norms_that_add_one_and_experts_are_passed_over(family, places):
    model = make_model("gemma") if family == "gemma" else with_outliers(family)
    before = logits(model)
    assert {name.rpartition(".")[2] for name in smooth_model(model, texts()).places} == set(places)
    assert all(map(torch.equal, before, logits(model)))


def test_another_arithmetic_is_noticed_and_undone():
    model = with_outliers()
    attention = model.model.layers[0].self_attn
    attention.v_proj.register_forward_hook(lambda module, inputs, output: output.tanh())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="not the arithmetic"):
        smooth_model(model, texts())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_what_a_dtype_cannot_hold_is_left_alone():
    model = with_outliers()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[5, 0] = 2.0**-149  # nothing smaller is a float32
    before = logits(model)
    found = smooth_model(model, texts())
    assert found.left == ("model.layers.0.mlp.down_proj",) and len(found.places) == 7
    assert torch.equal(logits(model)[0], before[0])


@pytest.mark.parametrize(
    ("model", "batches", "strength", "match"),
    [
        (make_model("llama"), [], 0.5, "needs texts"),
        (make_model("llama"), texts(), 1.5, "between 0 and 1"),
        (nn.Linear(2, 2), texts(), 0.5, "no layer in the layout of Llama"),
    ],
)
def test_wrong_arguments(model, batches, strength, match):
    with pytest.raises(ValueError, match=match):
        smooth_model(model, batches, strength)


@pytest.fixture
def folder(tmp_path):
    return save_with_texts(tmp_path, with_outliers(dtype=torch.bfloat16), (1, 22, 304))


def test_the_command_shows_its_progress(folder, progress_bars):
    done = finish("smooth", folder / "base", folder / "out", "--text", folder / "sums.jsonl")
    assert "Measuring activations: " in done.stderr


def test_the_command_writes_a_checkpoint_that_computes_the_same(folder):
    done = finish("smooth", folder / "base", folder / "out", "--text", folder / "sums.jsonl", "--json")
    said = json.loads(done.stdout)
    assert len(said["places"]) == 8 and said["n_channels"] > 0
    old, new = (AutoModelForCausalLM.from_pretrained(folder / name, dtype="auto") for name in ("base", "out"))
    assert torch.equal(logits(old)[0], logits(new)[0]) and new.dtype == torch.bfloat16
    assert not torch.equal(old.model.layers[0].mlp.up_proj.weight, new.model.layers[0].mlp.up_proj.weight)
    assert run("verify", folder / "out").exit_code == 0
    again = run("smooth", folder / "base", folder / "out", "--text", folder / "sums.jsonl")
    assert again.exit_code == 2 and "overwrite" in again.stderr


def test_a_vision_tower_and_side_files_are_kept(folder):
    base, out = folder / "base", folder / "out"
    text = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"head_dim": 32, "vocab_size": 32, "num_key_value_heads": 1}
    text |= {"layer_types": ["full_attention"], "pad_token_id": 0}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision)
    AutoModelForImageTextToText.from_config(config).save_pretrained(base)
    (base / "preprocessor_config.json").write_text("{}")
    (base / "LICENSE").write_text("free")
    done = finish("smooth", base, out, "--text", folder / "sums.jsonl")
    old, new = (load_file(each / "model.safetensors") for each in (base, out))
    assert old.keys() == new.keys() and any("visual" in name for name in new)
    assert {path.name for path in base.iterdir()} - {path.name for path in out.iterdir()} == set()
    t5 = AutoConfig.for_model("t5", vocab_size=32, d_model=32, d_kv=16, num_layers=1)
    AutoModelForSeq2SeqLM.from_config(t5).save_pretrained(base)
    done = run("smooth", base, out, "--text", folder / "sums.jsonl", "--overwrite")
    assert done.exit_code == 2 and "T5ForConditionalGeneration does not predict the next token" in done.stderr
