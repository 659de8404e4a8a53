# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 plan`: estimates against counted bytes of real steps on the CPU, and what the command prints."""

import json

import pytest
import torch
from commands import finish, run
from same_bits import edit_config
from transformers import GptOssConfig, Qwen3MoeConfig

from benchmarks.memory import architecture, make_model, measure
from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.lab import Setup, plan, sizes_of


SEQUENCES = 3
TOKENS = 64
RANK = 4


def config():
    small = architecture(layers=2, hidden=128)
    small.vocab_size = 512
    return small


@pytest.mark.parametrize(
    ("options", "checkpointing"),
    [(None, True), ({"preset": "w4a16"}, False), ({"preset": "w4a8"}, True), ({"mode": "packed"}, False)],
    ids=["full", "w4a16", "w4a8", "packed"],
)
def test_a_step_takes_about_what_was_estimated(options, checkpointing):
    ids = torch.arange(SEQUENCES * TOKENS).view(SEQUENCES, TOKENS) % 512
    packed = options == {"mode": "packed"}
    model = make_model(config(), options, torch.bfloat16 if packed else torch.float32, checkpointing, RANK)
    measured = measure(model, ids, torch.bfloat16, checkpointing)
    quantization = None if options is None else MXFP4RLConfig(**options)
    setup = Setup(quantization, batch=SEQUENCES, length=TOKENS, checkpointing=checkpointing, lora_rank=RANK)
    planned = plan(sizes_of(config(), quantization), setup)
    states = {name: planned[name] for name in ("weights", "gradients", "optimizer")}
    if not packed:  # PEFT's adapters have the dtype of their base here, and float32 in a run of the recipe
        assert states["gradients"] == measured["gradients"]
        assert states == pytest.approx({name: measured[name] for name in states}, rel=0.01)
    if not checkpointing:
        saved = measured["saved"] - 512 * SEQUENCES * TOKENS * 4  # the logits' softmax
        saved -= planned["copies of weights"]  # which a cache holds
        assert 0.75 * saved < planned["activations"] < 1.33 * saved


@pytest.mark.parametrize(
    ("options", "inputs"),
    [
        ({"preset": "w4a16"}, 2 * (6 * 128 + 512)),
        ({"preset": "w4a4"}, 2 * (6 * 128 + 512)),
        ({"preset": "w4a8"}, 6 * (128 + 1) + 512 + 1),  # E4M3, and a byte for the scale of the token
        ({"preset": "w4a8g8"}, 6 * (128 + 4) + 512 + 4),
        ({"preset": "w8a8"}, 6 * (128 + 1) + 512 + 1),
        ({"preset": "w4a8", "fprop": {"x": "mxfp8"}}, (6 * 128 + 512) * 33 / 32),
        ({"mode": "packed", "preset": "w4a8"}, 2 * (128 + 128 + 512)),  # adapters on q, k, v and o, gate and up, down
    ],
)
def test_bytes_of_saved_inputs(options, inputs):
    outputs = 2 * (128 + 64 + 64 + 128 + 512 + 512 + 128)
    inner_and_residual = 2 * 512 + 16 * 128
    assert sizes_of(config(), MXFP4RLConfig(**options)).saved == inputs + outputs + inner_and_residual


def test_what_is_spread_over_gpus():
    sizes = sizes_of(config(), None)
    one, four = (plan(sizes, Setup(None, "fsdp2", gpus)) for gpus in (1, 4))
    for part in ("weights", "gradients", "optimizer"):
        assert four[part] == one[part] / 4
    assert four["activations"] == one["activations"]
    assert one["weights"] == 4 * sizes.elements
    zero2, zero3 = (plan(sizes, Setup(None, engine, 4)) for engine in ("zero2", "zero3"))
    assert zero2["weights"] == 2 * sizes.elements + sizes.elements
    assert zero3["weights"] == 2 * sizes.elements / 4 + sizes.elements
    with pytest.raises(ValueError, match="engine='fsdp' is not known; choose one of ddp, fsdp2, zero2, zero3"):
        plan(sizes, Setup(None, "fsdp"))


def test_experts_are_quantized_too():
    mixture = Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    sizes = sizes_of(mixture, MXFP4RLConfig(mode="packed"))
    assert sizes.quantized == 2 * (64 * 32 * 3 * 4 + 64 * 64 * 2 + 64 * 32 * 2)
    saved = {preset: sizes_of(mixture, MXFP4RLConfig(preset=preset)).saved for preset in ("w4a16", "w4a8")}
    # Two experts of a token: 64 inputs, and 32 between their halves.
    attention = [64, 64, 64, 64]
    assert saved["w4a16"] - saved["w4a8"] == sum(attention) - len(attention) + 2 * (64 + 32 - 2)


def test_lora_on_attention_and_experts_of_gpt_oss():
    """Attention is bfloat16 and computed in full; the experts are packed."""
    mixture = GptOssConfig(
        vocab_size=512, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, num_local_experts=8, num_experts_per_tok=4, pad_token_id=0,
    )  # fmt: skip
    options = {"mode": "packed", "preset": "w4a16", "macro_block": None, "modules_to_not_convert": ["self_attn"]}
    targets = [*(f"{name}_proj" for name in "qkvo"), "experts"]
    model = make_model(mixture, options, torch.bfloat16, False, RANK, targets)
    for parameter in filter(lambda p: p.requires_grad, model.parameters()):
        parameter.data = parameter.data.float()  # as in a run of the recipe
    ids = torch.arange(SEQUENCES * TOKENS).view(SEQUENCES, TOKENS) % 512
    measured = measure(model, ids, torch.bfloat16, False)
    quantization = MXFP4RLConfig(**options)
    setup = Setup(quantization, batch=SEQUENCES, length=TOKENS, checkpointing=False, lora_rank=RANK)
    planned = plan(sizes_of(mixture, quantization, lora_experts=True), setup)
    for name in ("weights", "gradients", "optimizer"):
        assert planned[name] == pytest.approx(measured[name], rel=0.001)
    saved = measured["saved"] - 512 * SEQUENCES * TOKENS * 4
    assert 0.8 * saved < planned["activations"] < 1.25 * saved
    assert sizes_of(mixture, quantization).adapter == 2 * (4 * 128 + 2 * 256 + 2 * 128)  # q, k, v and o alone


@pytest.fixture
def folder(tmp_path):
    config().save_pretrained(tmp_path)
    return tmp_path


def planned(folder, *options):
    """What is planned, by engine."""
    return json.loads(run("plan", folder, *options, "--json").stdout)["engines"]


def test_every_engine_is_planned(folder):
    engines = planned(folder, "--gpus", 2)
    assert list(engines) == ["ddp", "fsdp2", "zero2", "zero3"]
    assert all(engine["fits"] for engine in engines.values())


def test_the_table(folder):
    table = finish("plan", folder / "config.json", "--mode", "packed").stdout
    assert "optimizer" in table
    assert "fits 72.0 GB" in table
    assert "fsdp2" not in table


def test_the_largest_batch_is_the_largest(folder):
    largest = planned(folder)["ddp"]["largest_batch"]
    finish("plan", folder, "--batch", largest)
    refused = finish("plan", folder, "--batch", largest + 1, code=1)
    assert "nothing fits into 72.0 GB per GPU" in refused.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [(("--preset", "w4a5"), "preset='w4a5' is not supported"), ((), "is no folder with a config.json")],
)
def test_what_cannot_be_planned(folder, options, message):
    model = folder if options else folder / "none"
    assert message in finish("plan", model, *options, code=2).stderr


def save_scheme(folder, skips):
    """Save a scheme of two tensors per weight, as packing does."""
    scheme = MXFP4RLConfig(mode="packed", outlier_fallback=1.0, modules_to_not_convert=skips)
    content = {**config().to_dict(), "quantization_config": scheme.to_dict()}
    (folder / "config.json").write_text(json.dumps(content))


def test_a_checkpoint_is_planned_under_its_own_scheme(folder):
    save_scheme(folder, ["self_attn"])
    own = planned(folder)
    assert planned(folder, "--mode", "packed") == own
    assert planned(folder, "--preset", "w4a16") != own


def test_layers_that_are_skipped_too(folder):
    save_scheme(folder, ["self_attn"])
    less = planned(folder, "--skip", "down_proj")
    save_scheme(folder, ["self_attn", "down_proj"])
    assert planned(folder) == less


@pytest.mark.parametrize(
    "odd",
    [{"hidden_size": "64"}, {"num_hidden_layers": 10**9}, {"num_attention_heads": 0}, {"vocab_size": None}],
    ids=str,
)
def test_a_config_of_odd_values_ends_in_one_line(odd, folder):
    edit_config(folder, **odd)
    (line,) = finish("plan", folder, code=2).stderr.splitlines()
    assert line.startswith("error: ")
    assert "config" in line
