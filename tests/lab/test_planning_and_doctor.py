# SPDX-License-Identifier: Apache-2.0
"""`hf-mxfp4 plan`: estimates against counted bytes of real steps on the CPU, and what the command prints; `hf-mxfp4
doctor`: what it compares, what it says, and that it finds kernels that are wrong."""

import json
import os

import processes
import pytest
import torch
from commands import run
from transformers import GptOssConfig, Qwen3MoeConfig

from benchmarks.memory import architecture, make_model, measure
from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.cli import machine
from hf_mxfp4.lab import Setup, check_kernels, doctor, plan, sizes_of
from hf_mxfp4.ops import self_check
from hf_mxfp4.ops import triton as kernels
from hf_mxfp4.ops.choice import HAS_FP8_ON_CPU


SEQUENCES, TOKENS, RANK = 3, 64, 4


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
        ({"preset": "w4a8g8"}, 6 * (128 + 1) + 512 + 1),
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
    assert four["activations"] == one["activations"] and one["weights"] == 4 * sizes.elements
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
    measured, quantization = measure(model, ids, torch.bfloat16, False), MXFP4RLConfig(**options)
    setup = Setup(quantization, batch=SEQUENCES, length=TOKENS, checkpointing=False, lora_rank=RANK)
    planned = plan(sizes_of(mixture, quantization, lora_experts=True), setup)
    for name in ("weights", "gradients", "optimizer"):
        assert planned[name] == pytest.approx(measured[name], rel=0.001)
    saved = measured["saved"] - 512 * SEQUENCES * TOKENS * 4
    assert 0.8 * saved < planned["activations"] < 1.25 * saved
    assert sizes_of(mixture, quantization).adapter == 2 * (4 * 128 + 2 * 256 + 2 * 128)  # q, k, v and o alone


def planned_as_saved(folder, skips, *options):
    """Bytes of what is planned for a checkpoint that was packed under a scheme of two tensors per weight."""
    packed = MXFP4RLConfig(mode="packed", outlier_fallback=1.0, modules_to_not_convert=skips)
    (folder / "config.json").write_text(json.dumps({**config().to_dict(), "quantization_config": packed.to_dict()}))
    return [json.loads(run("plan", folder, "--json", *each).stdout)["engines"]["ddp"]["bytes"] for each in options]


def test_the_command(tmp_path):
    config().save_pretrained(tmp_path)
    found = json.loads(run("plan", tmp_path, "--gpus", 2, "--json").stdout)["engines"]
    assert list(found) == ["ddp", "fsdp2", "zero2", "zero3"] and all(each["fits"] for each in found.values())
    table = run("plan", tmp_path / "config.json", "--mode", "packed").stdout
    assert "optimizer" in table and "fits 72.0 GB" in table and "fsdp2" not in table
    largest = found["ddp"]["largest_batch"]
    assert run("plan", tmp_path, "--gpus", 2, "--engine", "ddp", "--batch", largest).exit_code == 0
    full = run("plan", tmp_path, "--gpus", 2, "--engine", "ddp", "--batch", largest + 1)
    assert full.exit_code == 1 and "nothing fits into 72.0 GB per GPU; use more GPUs" in full.stderr
    unknown = run("plan", tmp_path, "--preset", "w4a5")
    assert unknown.exit_code == 2 and "preset='w4a5' is not supported" in unknown.stderr
    own, same, less = planned_as_saved(tmp_path, ["self_attn"], (), ("--mode", "packed"), ("--skip", "down_proj"))
    assert own == same != less and [less] == planned_as_saved(tmp_path, ["self_attn", "down_proj"], ())
    (default,) = planned_as_saved(tmp_path, ["self_attn"], ("--preset", "w4a16"))
    assert default["optimizer"] == own["optimizer"] < found["ddp"]["bytes"]["optimizer"]
    missing = run("plan", tmp_path / "none")
    assert missing.exit_code == 2 and "is no folder with a config.json" in missing.stderr


@pytest.mark.parametrize(
    "odd",
    [{"hidden_size": "64"}, {"num_hidden_layers": 10**9}, {"num_attention_heads": 0}, {"vocab_size": None},
     {"hidden_act": 3}, {"intermediate_size": 10**30}],
    ids=str,
)  # fmt: skip
def test_a_config_of_odd_values_ends_in_one_line(odd, tmp_path):
    config().save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**stored, **odd}))
    refused = run("plan", tmp_path)
    assert refused.exit_code == 2
    (line,) = refused.stderr.splitlines()
    assert line.startswith("error: ") and "config" in line


KERNELS = {
    "stochastic rounding": "quantize",
    "rows and columns": "fake_quantize_rows_and_columns",
    "rotation": "fake_quantize",
    "FP8 operands": "to_fp8",
    "NVFP4 scales": "nvfp4_scales",
}


@pytest.fixture
def of_lab(monkeypatch):
    """Only what self-checks do not compare, on the CPU."""
    monkeypatch.setattr(self_check, "FAMILIES", {})
    monkeypatch.setattr(machine, "_devices", lambda facts: ["cpu"])


def test_kernels_that_write_zeros_are_found(of_lab, monkeypatch):
    def zeros(x, *arguments):
        return torch.zeros_like(x), torch.zeros_like(x), torch.zeros((), dtype=torch.int64)

    for name in KERNELS.values():
        monkeypatch.setattr(kernels, name, zeros)
    monkeypatch.setattr(kernels, "fake_quantize_rows_and_columns", lambda x, *arguments: (x * 0, x.t() * 0))
    monkeypatch.setattr(kernels, "fake_quantize", lambda x, *arguments: torch.zeros_like(x, dtype=torch.float32))
    quantize = doctor.numerics.quantize
    monkeypatch.setattr(kernels, "quantize", lambda x, how, *_: quantize(torch.zeros_like(x), **vars(how), seed=7))
    found = {check.name: check.problem for check in check_kernels("cpu")}
    assert set(found) == set(KERNELS)
    assert all("differ from the eager ones" in problem for problem in found.values()), found


def test_wrong_kernels_are_named_and_the_exit_code_is_1(of_lab, monkeypatch):
    def pairs(second):
        return lambda device: iter([("sums", torch.ones(2), second)])

    monkeypatch.setattr(doctor, "_FAMILIES", {"fine": pairs(torch.ones(2)), "odd": pairs(torch.zeros(2))})
    shown, printed = run("doctor"), run("doctor", "--json")
    assert shown.exit_code == printed.exit_code == 1
    assert "AssertionError: sums differ from the eager ones" in shown.stdout and "right" in shown.stdout
    data = json.loads(printed.stdout)
    assert [check["problem"] is None for check in data["kernels"]["cpu"]] == [True, False]
    assert "torch" in data["versions"]
    monkeypatch.setattr(doctor, "_FAMILIES", {"fine": pairs(torch.ones(2))})
    assert run("doctor").exit_code == 0


@pytest.mark.skipif(not HAS_FP8_ON_CPU, reason="this PyTorch has no FP8 products on the CPU")
def test_products_on_tensor_cores_are_compared(of_lab, monkeypatch):
    monkeypatch.setattr(doctor, "_FAMILIES", {})
    monkeypatch.setattr(doctor, "hardware_of", lambda device: "sm_100")
    fp8, *fp4 = check_kernels("cpu")
    assert (fp8.name, fp8.problem) == ("FP8 products", None)
    assert [check.name for check in fp4] == ["MXFP4 products", "MXFP8 products", "NVFP4 products"]
    assert all("products fail" in check.problem for check in fp4)  # which the CPU does not have
    right = doctor.multiply_fp8
    monkeypatch.setattr(doctor, "multiply_fp8", lambda *arguments: right(*arguments) + 1)
    assert "FP8 products differ" in next(check_kernels("cpu")).problem


def test_without_a_gpu_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(machine, "_devices", lambda facts: [])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = run("doctor")
    assert done.exit_code == 2 and "no GPU here. TRITON_INTERPRET=1 runs the kernels on the CPU" in done.stderr


@pytest.mark.large
def test_interpreted_kernels_are_right():
    job = processes.module("hf_mxfp4.cli", "doctor", "--json")
    done = processes.run(job, timeout=550, environment=dict(os.environ), interpret=True, no_warnings=True)
    assert done.returncode == 0, done.stderr
    checks = json.loads(done.stdout)["kernels"]["cpu"]
    assert len(checks) == 8 and not any(check["problem"] for check in checks)
