# SPDX-License-Identifier: Apache-2.0
"""Scales from activations into weights: what is scaled by what in which family, that the model stays the same bit for
bit, that quantized activations lose less, and what `from_pretrained` does."""

import json

import pytest
import torch
from commands import finish, run, save_with_texts
from safetensors.torch import load_file
from tiny_models import make_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

from hf_mxfp4 import MXFP4RLConfig, pack
from hf_mxfp4.integrations.transformers import quantizer
from hf_mxfp4.lab import smooth_model
from hf_mxfp4.layers import trainable_matrices
from hf_mxfp4.prepare import Place, smooth_loaded
from hf_mxfp4.prepare.smoothing import _exponents, _Scaled


ATTENTION = ("self_attn.q_proj", "self_attn.o_proj")
LLAMA = (*ATTENTION, "mlp.gate_proj", "mlp.down_proj")
EXPERTS = (*ATTENTION, "mlp.experts", "mlp.experts.down_proj")
#: Of each layout, the first layers that read what is scaled.
FAMILIES = {
    "llama": LLAMA,
    "qwen2": LLAMA,  # biases
    "qwen3": LLAMA,  # norms of queries and keys
    "gemma": LLAMA,  # norms that add 1 to their weights
    "gemma2": LLAMA,  # behind the layers too
    "gemma3_text": LLAMA,
    "nemotron": (*ATTENTION, "mlp.up_proj"),  # norms that add 1, with biases
    "olmo2": ("self_attn.o_proj", "mlp.down_proj"),  # norms behind the layers alone
    "phi3": ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"),
    "starcoder2": (*ATTENTION, "mlp.c_fc"),  # norms with biases, no gate
    "cohere": (*ATTENTION, "mlp.down_proj"),  # one norm for attention and MLP
    "qwen3_moe": EXPERTS,
    "mixtral": EXPERTS,
    "qwen2_moe": (*ATTENTION, "mlp.shared_expert.gate_proj", "mlp.shared_expert.down_proj", "mlp.experts.down_proj"),
    "gpt_oss": (*ATTENTION, "mlp.experts"),  # other axes; 1 is added to up projections
}
#: Long enough for each of four experts to be chosen often.
IDS = torch.randint(32, (3, 9), generator=torch.Generator().manual_seed(0))


def with_outliers(family="llama", dtype=torch.float32, **options):
    """A model of 16-bit numbers with one channel of each norm and projection 64 times as large."""
    model = make_model(family, dtype=torch.bfloat16, **options).to(dtype)
    with torch.no_grad():
        for name, parameter in model.model.layers.named_parameters():
            if "layernorm" in name or name.endswith(("v_proj.weight", "up_proj.weight")) and parameter.dim() == 2:
                parameter[5] *= 64
    return model


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def changed(model, before):
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, torch.float32) for family in FAMILIES), ("llama", torch.bfloat16), ("gemma2", torch.bfloat16)],
    ids=str,
)
def test_the_model_stays_the_same_bit_for_bit(family, dtype):
    model = with_outliers(family, dtype, layers=1)
    before = logits(model)
    weights = state(model)
    found = smooth_model(model)
    assert set(found.places) == {f"model.layers.0.{name}" for name in FAMILIES[family]}
    assert 0 < found.n_channels < found.n_all
    assert found.exponents[1] >= 2
    assert not found.undone
    assert torch.equal(logits(model), before)
    # Masters stay numbers of the checkpoint's dtype, which it is saved in again, and vLLM gets.
    names = changed(model, weights)
    assert names
    assert all(torch.equal(v.bfloat16().to(dtype), v) for v in (model.state_dict()[name] for name in names))
    assert not any(name in changed_name for name in ("embed", "lm_head") for changed_name in names)


def test_scales_are_the_definition():
    norm = torch.tensor([1.0, 16.0, 1.0, 1.0])
    weight = torch.tensor([[1.0, 1.0, 1.0, 4.0], [1.0, 1.0, 1.0, 4.0]])
    reader = (weight[None],)
    place = Place("reader", "norms", nn.Identity(), None, (norm[None, None],), reader, reader)
    squares = norm[None].double() ** 2
    # log2 of a / w: 0, 4, 0, -2; half of it, less the mean of 1/4: -.25, 1.75, -.25, -1.25.
    exponents = _exponents(place, squares, 0.5)
    assert exponents.tolist() == [[0, 2, 0, -1]]
    # All in the activations: less the mean of 1: -1, 3, -1, -1 for strength 1.
    assert _exponents(place, squares, 1.0).tolist() == [[-1, 3, -1, -1]]
    scaled = _Scaled(place, exponents)
    assert norm.tolist() == [1, 4, 1, 2]
    assert weight.tolist() == [[1, 4, 1, 2], [1, 4, 1, 2]]
    scaled.undo()
    assert norm.tolist() == [1, 16, 1, 1]


def test_norms_that_add_one_are_divided_where_that_is_exact():
    # (1 + w) / 2 - 1 of the last one has 9 digits, and bfloat16 has 8.
    norm = torch.tensor([2.0**-30, 3.0, -0.5, 0.498046875])
    reader = (torch.ones(1, 2, 4),)
    place = Place("reader", "norms", nn.Identity(), None, (norm[None, None],), reader, reader, adds_one=True)
    scaled = _Scaled(place, torch.tensor([[0.0, 1.0, 1.0, 1.0]]))
    assert scaled.exponents.tolist() == [[0, 1, 1, 0]]
    assert scaled.n_inexact == 1
    assert norm.tolist() == [2.0**-30, 1.0, -0.75, 0.498046875]
    assert reader[0][0, 0].tolist() == [1, 2, 2, 1]
    scaled.undo()
    assert norm.tolist() == [2.0**-30, 3.0, -0.5, 0.498046875]
    assert (reader[0] == 1).all()


def test_gemmas_norms_behind_layers_and_of_queries_and_keys_stay():
    model = with_outliers("gemma3_text", layers=1)
    before = state(model)
    smooth_model(model)
    norms = {name for name in changed(model, before) if "norm" in name}
    assert norms == {
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.pre_feedforward_layernorm.weight",
    }


def test_a_norm_with_a_gate_does_not_keep_the_others_from_being_smoothed():
    model = with_outliers("qwen3_5_text", layer_types=["linear_attention", "full_attention"])
    before = logits(model)
    found = smooth_model(model)
    linear = ("linear_attn.in_proj_qkv", "mlp.gate_proj", "mlp.down_proj")
    names = [*(f"model.layers.0.{name}" for name in linear), *(f"model.layers.1.{name}" for name in LLAMA)]
    assert set(found.places) == set(names)
    assert torch.equal(logits(model), before)


def test_what_a_dtype_cannot_hold_keeps_its_scale():
    model = with_outliers()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[5, 0] = 2.0**-149  # nothing smaller is a float32
    before = logits(model)
    found = smooth_model(model, strength=1.0)
    assert found.n_inexact == 1
    assert "1 more have no exact scale" in str(found)
    assert len(found.places) == 8
    assert torch.equal(logits(model), before)


def test_places_whose_arithmetic_differs_are_left():
    model = with_outliers()
    model.model.layers[0].self_attn.v_proj.register_forward_hook(lambda _, __, output: output.clamp(-40, 40))
    before = logits(model)
    weights = state(model)
    found = smooth_model(model)
    assert found.undone == ("values",)
    assert "not values, with which outputs change" in str(found)
    assert not any("o_proj" in name for name in {*found.places, *changed(model, weights)})
    assert torch.equal(logits(model), before)
    model.model.norm.register_forward_hook(lambda _, __, output: output + torch.rand(()))
    weights = state(model)
    with pytest.raises(ValueError, match="its outputs are others"):
        smooth_model(model)
    assert changed(model, weights) == set()


def test_shared_layers_and_experts_without_tokens_are_left():
    model = with_outliers("qwen3_moe")
    model.model.layers[1].self_attn = model.model.layers[0].self_attn
    router = model.model.layers[0].mlp.gate
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        router.weight[3] = -torch.ones(64) * router.weight[:3].abs().sum()  # of positive inputs never chosen
        model.model.layers[0].post_attention_layernorm.weight.abs_()
    before = logits(model)
    weights = state(model)
    unused = experts.down_proj[3].clone()
    chosen = []
    router.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
    found = smooth_model(model)
    assert not any("self_attn" in name for name in {*found.places, *changed(model, weights)})
    counts = torch.cat([each.flatten() for each in chosen]).bincount(minlength=4)
    assert torch.equal(experts.down_proj[3], unused) == bool(counts[3] < 8)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(
    ("model", "batches", "strength", "match"),
    [
        (make_model("llama"), [], 0.3, "needs texts"),
        (make_model("llama"), None, 1.5, "between 0 and 1"),
        (nn.Linear(2, 2), None, 0.3, "no decoder that gets token ids alone"),
    ],
)
def test_wrong_arguments(model, batches, strength, match):
    with pytest.raises(ValueError, match=match):
        smooth_model(model, batches, strength)


# ---- from_pretrained ------------------------------------------------------------------------------------------------


def load(folder, dtype=torch.float32, **options):
    config = MXFP4RLConfig(**options)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config)


@pytest.fixture
def outliers(tmp_path):
    with_outliers("qwen2", torch.bfloat16).save_pretrained(tmp_path / "outliers")
    return tmp_path / "outliers"


def test_a_plain_checkpoint_is_smoothed_as_it_is_loaded(outliers, tmp_path, caplog):
    torch.manual_seed(1)
    random = torch.get_rng_state()
    model = load(outliers)
    again = load(outliers)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    report = model.quantization_report
    assert len(report.smoothing.places) == 8
    assert "smoothed 8 places" in str(report)
    assert report.dither.n_weights == report.n_weights  # the scaled weights are 16-bit numbers

    model.save_pretrained(tmp_path / "saved")
    saved = load(tmp_path / "saved")
    assert saved.quantization_report.smoothing is None
    assert torch.equal(logits(saved), logits(model))
    off = load(outliers, smooth=False, dither_ties=False)
    assert off.quantization_report.smoothing is None
    assert "smoothed" not in str(off.quantization_report)
    stored = load_file(outliers / "model.safetensors")
    assert all(torch.equal(matrix.weight().bfloat16(), stored[matrix.full_name]) for matrix in trainable_matrices(off))
    assert "without smoothing" not in caplog.text


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_the_quantized_policy_is_nearer_to_the_checkpoint(family, tmp_path):
    with_outliers(family, torch.bfloat16).save_pretrained(tmp_path)
    exact = logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)).log_softmax(-1)

    def divergence(model):
        return float((exact.exp() * (exact - logits(model).log_softmax(-1))).sum(-1).mean())

    smooth, off = (divergence(load(tmp_path, smooth=smooth)) for smooth in (True, False))
    assert smooth < 0.9 * off


def test_what_is_not_smoothed_says_so_once(outliers, caplog):
    half = load(outliers, torch.float16)
    assert half.quantization_report.smoothing is None
    assert caplog.text.count("loaded without smoothing: float16 has too few exponents") == 1
    caplog.set_level("INFO", logger="hf_mxfp4")
    load(outliers, mode="packed")
    assert caplog.text.count("is packed without smoothing") == 1
    caplog.clear()
    pack(load(outliers))  # of a smoothed model
    assert "without smoothing" not in caplog.text


def test_weights_that_are_not_here_are_not_smoothed(outliers, monkeypatch, caplog):
    model = load(outliers, smooth=False)
    weights = state(model)
    model.model.layers[0].mlp.up_proj.weight.ds_id = 0
    assert smooth_loaded(model) is None
    assert changed(model, weights) == set()
    assert "spread over processes; run `hf-mxfp4 smooth` first" in caplog.text
    caplog.clear()
    # As in all processes but the first under FSDP with cpu_ram_efficient_loading.
    monkeypatch.setattr(quantizer, "is_fsdp_enabled", lambda: True)
    monkeypatch.setattr(quantizer, "is_local_dist_rank_0", lambda: False)
    assert load(outliers).quantization_report.smoothing is None
    assert "smoothing" not in caplog.text


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    return save_with_texts(tmp_path, with_outliers(dtype=torch.bfloat16), (1, 22, 304))


@pytest.mark.parametrize("has_text", [True, False])
def test_the_command_writes_a_checkpoint_that_computes_the_same(has_text, folder):
    words = ("smooth", folder / "base", folder / "out", *(("--text", folder / "sums.jsonl") if has_text else ()))
    said = json.loads(finish(*words, "--json").stdout)
    assert len(said["places"]) == 8
    assert said["n_channels"] > 0
    old, new = (AutoModelForCausalLM.from_pretrained(folder / name, dtype="auto") for name in ("base", "out"))
    assert torch.equal(logits(old), logits(new))
    assert new.dtype == torch.bfloat16
    assert not torch.equal(old.model.layers[0].mlp.up_proj.weight, new.model.layers[0].mlp.up_proj.weight)
    assert run("verify", folder / "out").exit_code == 0
    again = run(*words)
    assert again.exit_code == 2
    assert "overwrite" in again.stderr


def test_a_vision_tower_and_side_files_are_kept(folder):
    base = folder / "base"
    out = folder / "out"
    text = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text |= {"head_dim": 32, "vocab_size": 32, "num_key_value_heads": 1}
    text |= {"layer_types": ["full_attention"], "pad_token_id": 0}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision)
    AutoModelForImageTextToText.from_config(config).save_pretrained(base)
    (base / "preprocessor_config.json").write_text("{}")
    (base / "LICENSE").write_text("free")
    finish("smooth", base, out, "--text", folder / "sums.jsonl")
    old, new = (load_file(each / "model.safetensors") for each in (base, out))
    assert old.keys() == new.keys()
    towers = {name for name in old if "visual" in name}
    assert towers
    assert all(torch.equal(old[name], new[name]) for name in towers)
    assert {path.name for path in base.iterdir()} - {path.name for path in out.iterdir()} == set()
    t5 = AutoConfig.for_model("t5", vocab_size=32, d_model=32, d_kv=16, num_layers=1)
    AutoModelForSeq2SeqLM.from_config(t5).save_pretrained(base)
    done = run("smooth", base, out, "--text", folder / "sums.jsonl", "--overwrite")
    assert done.exit_code == 2
    assert "T5ForConditionalGeneration does not predict the next token" in done.stderr
