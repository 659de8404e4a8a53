# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from grpo_runs import with_simulated_vllm
from peft import LoraConfig, get_peft_model
from tiny_models import make_model

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.quantizer.swap import quantize_linears
from hf_mxfp4.rl.noise.norms import NormNoise
from hf_mxfp4.rl.rollout.vllm import rollout_parameters


def quantized_model():
    model = make_model()
    quantize_linears(model, MXFP4RLConfig())
    return model


def test_quantized_values_travel_and_master_weights_stay():
    model = quantized_model()
    pushed = dict(rollout_parameters(model.named_parameters(), model))
    layer = model.model.layers[1].mlp.up_proj
    expected = layer.quantized_weight(layer.weight, torch.float32)
    assert torch.equal(pushed["model.layers.1.mlp.up_proj.weight"], expected)
    assert not torch.equal(expected, layer.weight)
    for name in ("lm_head.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"):
        assert pushed[name] is dict(model.named_parameters())[name]
    assert list(pushed) == [name for name, _ in model.named_parameters()]


def test_noise_travels_on_norm_weights_only():
    model = quantized_model()
    noise = NormNoise(model, seed=0)
    clean = dict(rollout_parameters(model.named_parameters(), model))
    noisy = dict(rollout_parameters(model.named_parameters(), model, noise, step=4, sigma=0.1))
    changed = [name for name in clean if not torch.equal(clean[name], noisy[name])]
    assert changed == [f"{name}.weight" for name in noise.norms]
    index = list(noise.norms).index("model.norm")
    norm = model.model.norm.weight
    assert torch.equal(noisy["model.norm.weight"], norm + noise.noise(index, norm, 4, 0.1))
    assert noise.last_report.modules == 5
    assert noise.last_report.measured_std == pytest.approx(0.1, rel=0.1)


def test_noise_that_bfloat16_swallows_is_measured_as_such():
    model = make_model(dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
    noise = NormNoise(model, seed=0)
    list(rollout_parameters(model.named_parameters(), model, noise, step=4, sigma=1e-4))
    assert noise.last_report.measured_std < 1e-5


def test_nothing_matching_is_an_error():
    model = quantized_model()
    with pytest.raises(RuntimeError, match="none of the quantized layers"):
        list(rollout_parameters([("other.weight", torch.ones(2))], model))


def test_noise_without_norms_is_an_error():
    model = make_model()
    noise = NormNoise(model, seed=0)
    with pytest.raises(RuntimeError, match="reached none"):
        list(rollout_parameters([("other.weight", torch.ones(2))], model, noise, 1, 0.1))


def test_names_match_under_peft():
    model = get_peft_model(quantized_model(), LoraConfig(target_modules=["q_proj"]))
    noise = NormNoise(model, seed=0)
    base = [
        (name.removeprefix("base_model.model.").replace(".base_layer", ""), value)
        for name, value in model.named_parameters()
        if "lora_" not in name
    ]
    pushed = dict(rollout_parameters(base, model, noise, 1, 0.1))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(pushed[name], dict(base)[name])
    assert not torch.equal(pushed["model.norm.weight"], dict(base)["model.norm.weight"])


def test_the_trainer_pushes_the_rollout_policy_and_reports_its_noise(build):
    """Against the interface of TRL's `VLLMGeneration`: vLLM itself does not run here."""
    trainer = build()
    pushed = with_simulated_vllm(trainer)
    trainer.model.train()
    trainer.state.global_step, trainer.state.max_steps = 3, 4
    trainer._generate(["1+1="])
    trainer.model.eval()
    trainer._last_loaded_step = -1
    trainer._generate(["1+1="])
    noisy, clean = (weights["model.norm.weight"] for weights in pushed)
    assert torch.equal(clean, trainer.model.model.norm.weight) and not torch.equal(noisy, clean)
    layer = trainer.model.model.layers[0].mlp.up_proj
    for weights in pushed:
        quantized = weights["model.layers.0.mlp.up_proj.weight"]
        assert torch.equal(quantized, layer.quantized_weight(layer.weight, torch.float32))
    assert trainer._metrics["train"]["aqn/n_modules"] == [5]
    assert trainer._metrics["train"]["aqn/measured_std"][0] == pytest.approx(1e-3, rel=0.25)


def test_vllm_that_pulls_no_weights_is_an_error(build):
    trainer = build(aqn_num_stages=1)
    trainer.use_vllm = trainer.args.use_vllm = True
    trainer._last_loaded_step = -1
    trainer.rollout_func = lambda prompts, trainer: {
        "prompt_ids": [[2]],
        "completion_ids": [[3]],
        "logprobs": [[0.0]],
    }

    class Generation:
        def sync_weights(self):
            pass

    trainer.vllm_generation = Generation()
    trainer.model.train()
    with pytest.raises(RuntimeError, match="did not reach vLLM"):
        trainer._generate(["1+1="])
