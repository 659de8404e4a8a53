# SPDX-License-Identifier: Apache-2.0
import json
from types import SimpleNamespace

import pytest
import torch
from grpo_runs import Pushes, quantized, vllm_llm, with_adapters, with_simulated_vllm
from peft import LoraConfig, get_peft_model
from same_bits import IDS
from tiny_models import make_model

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.rl.noise import NormNoise
from hf_mxfp4.rl.vllm import rollout_parameters
from hf_mxfp4.rl.vllm_engine import VLLMEngine


def test_quantized_values_travel_and_noise_on_norms_and_master_weights_stay():
    model = quantized()
    pushed = dict(rollout_parameters(model.named_parameters(), model))
    layer = model.model.layers[1].mlp.up_proj
    expected = layer.quantized_weight(layer.weight, torch.float32)
    assert torch.equal(pushed["model.layers.1.mlp.up_proj.weight"], expected)
    assert not torch.equal(expected, layer.weight)
    for name in ("lm_head.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"):
        assert pushed[name] is dict(model.named_parameters())[name]
    assert list(pushed) == [name for name, _ in model.named_parameters()]
    noise = NormNoise(model, seed=0)
    noisy = dict(rollout_parameters(model.named_parameters(), model, noise, step=4, sigma=0.1))
    changed = [name for name in pushed if not torch.equal(pushed[name], noisy[name])]
    assert changed == [f"{name}.weight" for name in noise.norms]
    index = list(noise.norms).index("model.norm")
    norm = model.model.norm.weight
    assert torch.equal(noisy["model.norm.weight"], norm + noise.noise(index, norm, 4, 0.1))
    assert noise.last_report.modules == 5
    assert noise.last_report.measured_std == pytest.approx(0.1, rel=0.1)


def test_vllm_that_pulls_no_weights_is_an_error(build):
    trainer = build(aqn_num_stages=1)
    trainer.use_vllm = trainer.args.use_vllm = True
    trainer._last_loaded_step = -1
    trainer.rollout_func = lambda prompts, trainer: {"prompt_ids": [[2]], "completion_ids": [[3]], "logprobs": [[0.0]]}
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    trainer.model.train()
    with pytest.raises(RuntimeError, match="did not reach vLLM"):
        trainer._generate(["1+1="])


EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def stored(model):
    return {name: (value, value.clone(), value._version) for name, value in model.state_dict(keep_vars=True).items()}


def assert_unwritten(model, before):
    for name, value in model.state_dict(keep_vars=True).items():
        kept, copy, version = before[name]
        assert value is kept and value._version == version and torch.equal(value, copy), name


def test_adapters_are_added_to_quantized_weights_and_no_master_is_written():
    model = with_adapters(quantized(), target_modules=["q_proj", "up_proj"])
    before = stored(model)
    pushed = Pushes(model, vllm_llm())()
    assert_unwritten(model, before)
    plain = make_model()
    assert {n: p.shape for n, p in pushed.items()} == {n: p.shape for n, p in plain.named_parameters()}
    for name in pushed:
        layer = model.get_base_model().get_submodule(name.rpartition(".")[0])
        base = getattr(layer, "base_layer", layer)
        expected = getattr(base, name.rpartition(".")[2])
        if hasattr(base, "quantized_weight") and name.endswith(".weight"):
            expected = base.quantized_weight(base.weight, torch.float32)
        if base is not layer and name.endswith(".weight"):
            expected = expected + 2.0 * (layer.lora_B["default"].weight @ layer.lora_A["default"].weight)
            assert not torch.equal(expected, base.quantized_weight(base.weight, torch.float32))
        assert torch.equal(pushed[name], expected), name
    plain.load_state_dict(pushed)
    quantized_alone = get_peft_model(quantized(), LoraConfig(target_modules=["q_proj"]))
    assert not torch.allclose(plain(IDS).logits, quantized_alone(IDS).logits, atol=1e-3)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapters_of_experts_are_added_to_quantized_weights(family):
    model = quantized(MXFP4RLConfig(preset="w4a16"), family, layers=1)
    biases = ["experts.down_proj_bias"] if family == "gpt_oss" else []
    model = with_adapters(model, target_modules=["q_proj"], target_parameters=[*EXPERTS, *biases])
    before = stored(model)
    pushed = Pushes(model, vllm_llm())()
    assert_unwritten(model, before)
    wrappers = {m.parameter_name: m for m in model.modules() if hasattr(m, "parameter_name")}
    experts = wrappers["down_proj"].get_base_layer()
    for projection in ("gate_up_proj", "down_proj"):
        base = experts.effective_weight(projection, getattr(experts, projection))
        expected = base + wrappers[projection].delta("default")
        assert torch.equal(pushed[f"model.layers.0.mlp.experts.{projection}"], expected)
        assert not torch.equal(expected, base)
    for bias in biases:
        name = bias.removeprefix("experts.")
        expected = getattr(experts, name) + wrappers[name].get_delta_weight("default")
        assert torch.equal(pushed[f"model.layers.0.mlp.{bias}"], expected)
    plain = make_model(family, layers=1)
    plain.load_state_dict(pushed)
    torch.testing.assert_close(plain(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)


def test_adapters_that_cannot_be_pushed_are_refused_at_the_start():
    model = with_adapters(quantized(), target_modules=["lm_head"], use_dora=True)
    with pytest.raises(
        ValueError, match="lm_head has an adapter of Linear that does more than add.*set use_vllm=False"
    ):
        Pushes(model, vllm_llm())()
    model = with_adapters(quantized(), target_modules=["q_proj", "embed_tokens"])
    with pytest.raises(ValueError, match="embed_tokens has an adapter of Embedding"):
        Pushes(model, vllm_llm())()


def test_a_walk_that_does_not_merge_is_an_error():
    """TRL may change what it does before it reads the weights of a PEFT model."""
    model = with_adapters(quantized(), target_modules=["q_proj"])
    with pytest.raises(RuntimeError, match="in another way"):
        Pushes(model, vllm_llm(), walk=model.named_parameters)()
    model.merge_adapter()  # PEFT's again
    assert model.get_base_model().model.layers[0].self_attn.q_proj.merged


PACKED = MXFP4RLConfig(mode="packed")
W4A4 = MXFP4RLConfig(preset="w4a4")
FULL = {"dtype": "torch.float32", "quantization": "mxfp4_rl"}
OVERRIDES = {"quantization_config": {"quant_method": "mxfp4_rl", "mode": "qat", "preset": "w4a4"}}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({**FULL, "model": ""}, (torch.float32, PACKED.activation_scheme)),
        ({"dtype": "torch.float16", "quantization": None, "model": "plain"}, (torch.float16, None)),
        # Not here.
        ({"dtype": "torch.float16", "quantization": "mxfp4_rl", "model": "no"}, (torch.float16, None)),
        # Of a checkpoint in full precision, by --hf-overrides.
        ({**FULL, "model": "plain", "hf_overrides": OVERRIDES}, (torch.float32, W4A4.activation_scheme)),
    ],
    ids=str,
)
def test_a_server_is_asked(tmp_path, answer, expected):
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "quantization_config": PACKED.to_dict()}))
    answer = {**answer, "model": str(tmp_path / answer["model"])}
    client = SimpleNamespace(get_server_info=lambda: {"model_config": answer})
    found = VLLMEngine.of(SimpleNamespace(mode="server", vllm_client=client))
    assert (found.dtype, found.inputs) == expected


def test_noise_is_measured_after_the_rounding_of_vllm(build):
    """Norms of one and noise of 1e-3: bfloat16, whose next number is 1.0078, keeps little of it."""
    measured = {}
    for dtype in (torch.float32, torch.bfloat16):
        trainer = build()
        with torch.no_grad():
            for norm in trainer.noise.norms.values():
                norm.weight.fill_(1.0)
        pushed = with_simulated_vllm(trainer, dtype=dtype)
        trainer.model.train()
        trainer.state.global_step = 3
        trainer.state.max_steps = 4
        trainer._generate(["1+1="])
        noisy = torch.cat([pushed[0][f"{name}.weight"] for name in trainer.noise.norms])
        assert noisy.dtype == torch.float32  # vLLM rounds
        logs = trainer._metrics["train"]
        measured[dtype] = logs["aqn/measured_std"][0]
        assert measured[dtype] == pytest.approx((noisy.to(dtype).double() - 1).square().mean().sqrt().item(), rel=1e-5)
    assert measured[torch.float32] == pytest.approx(1e-3, rel=0.15)
    assert measured[torch.bfloat16] < 9e-4
