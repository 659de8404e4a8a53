# SPDX-License-Identifier: Apache-2.0
"""Noise on linear weights: which ones, how strong, the same everywhere, and gone after the rollout."""

import copy
import math

import pytest
import torch
from grpo_runs import logged, with_simulated_vllm
from moe_models import make_moe, tokens
from peft import LoraConfig, get_peft_model
from tiny_models import make_model
from torch import nn

from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig
from hf_mxfp4.adapters import policy_parameters
from hf_mxfp4.layers import QUANTIZED, cached_weights, uncached_weights
from hf_mxfp4.quantizer.swap import quantize_linears
from hf_mxfp4.rl import LinearNoise, MXFP4GRPOConfig
from hf_mxfp4.rl.noise.rollouts import RolloutNoise
from hf_mxfp4.rl.noise.targets import plain_name
from hf_mxfp4.rl.rollout.vllm import rollout_parameters
from hf_mxfp4.routing import find_routers


IDS = torch.arange(24).reshape(2, 12) % 32


def policy(family="qwen2", mode="qat", dtype=torch.float32, moe=False, **scheme):
    model = make_moe(family).to(dtype) if moe else make_model(family, dtype=dtype)
    quantize_linears(model, MXFP4RLConfig(mode=mode, **scheme))
    return model


def quantized(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, QUANTIZED)}


def plain_twin(model, noise=None, step=0, sigma=0.0):
    """The policy as plain layers, on noisy weights where there is noise."""
    twin = copy.deepcopy(model)
    for name, layer in quantized(model).items():
        linear = hasattr(layer, "to_linear")
        plain = layer.to_linear() if linear else layer.to_experts()
        for parameter, value in plain.named_parameters():
            full = f"{plain_name(name)}.{parameter}"
            if noise is not None and full in noise.parameters:
                value.data = noise.noisy_values(full, value.data, step, sigma)
        parent, _, own = name.rpartition(".")
        setattr(twin.get_submodule(parent), own, plain)
    return twin


def run(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits


# ---- what noise does ------------------------------------------------------------------------------------------------

POLICIES = {
    "qat": {},
    "packed": {"mode": "packed"},
    "macro blocks": {"macro_block": 128},
    "experts": {"family": "qwen3_moe", "moe": True},
    "transposed experts": {"family": "gpt_oss", "moe": True},
    "packed experts": {"family": "qwen3_moe", "moe": True, "mode": "packed"},
    "packed transposed experts": {"family": "gpt_oss", "moe": True, "mode": "packed"},
}


@pytest.mark.parametrize("kind", POLICIES)
def test_noise_acts_as_if_added_to_the_quantized_weights(kind):
    model = policy(preset="w4a16", **POLICIES[kind])
    noise = LinearNoise(model, seed=3)
    clean = run(model)
    with noise.active(7, 0.05):
        noisy = run(model)
    torch.testing.assert_close(clean, run(plain_twin(model)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(noisy, run(plain_twin(model, noise, 7, 0.05)), rtol=1e-4, atol=1e-5)
    assert (noisy - clean).abs().max() > 1e-2
    assert torch.equal(run(model), clean)


@pytest.mark.parametrize("kind", ["qat", "packed", "experts", "packed experts"])
def test_kept_copies_change_no_bit_and_neither_does_the_engine(kind):
    model = policy(preset="w4a4", **POLICIES[kind])
    noise, found = LinearNoise(model, seed=3), []
    for context in (cached_weights("dense"), cached_weights("packed"), uncached_weights()):
        with context, noise.active(7, 0.05):
            found += [run(model), run(model)]
        assert noise.last_report.modules == noise.n_matrices
    assert all(torch.equal(each, found[0]) for each in found)


def test_inputs_are_quantized_as_without_noise():
    model = policy(preset="w4a4")
    layer = model.model.layers[0].mlp.up_proj
    noise, x = LinearNoise(model, seed=0), torch.randn(5, 64)
    with torch.no_grad(), noise.active(1, 0.1):
        y = layer(x)
    q = layer.quantized_weight(layer.weight, torch.float32)
    noisy = noise.noisy_values("model.layers.0.mlp.up_proj.weight", q, 1, 0.1)
    with torch.no_grad():
        assert torch.equal(y, layer.quantized_input(x, torch.float32) @ noisy.T)


def test_rotated_weights_get_noise_of_the_same_strength():
    model = policy(preset="w4a4", fprop={"rotation": "deterministic-32"})
    noise = LinearNoise(model, seed=0)
    clean = run(model)
    with noise.active(1, 0.05):
        noisy = run(model)
    plain = policy(preset="w4a4")
    other = LinearNoise(plain, seed=0)
    before = run(plain)
    with other.active(1, 0.05):
        after = run(plain)
    ratio = (noisy - clean).square().mean() / (after - before).square().mean()
    assert 0.4 < ratio < 2.5
    assert noise.last_report.measured_std == pytest.approx(0.05, rel=0.05)


@pytest.mark.parametrize("kind", POLICIES)
def test_strength_is_relative_to_each_matrix_and_measured(kind):
    model = policy(**POLICIES[kind])
    with torch.no_grad():
        for layer in quantized(model).values():  # matrices of very different sizes
            for parameter in layer.parameters(recurse=False):
                if parameter.is_floating_point() and parameter.dim() > 1:
                    parameter.mul_(37.0)
            break
    noise = LinearNoise(model, seed=0, scale=2.0)
    ids = IDS if "experts" not in kind else tokens()
    with noise.active(5, 0.01):
        run(model, ids)
    report = noise.last_report
    assert report.sigma == 0.02 and report.measured_std == pytest.approx(0.02, rel=0.02)
    assert report.modules == noise.n_matrices
    for name, target in noise.parameters.items():
        clean = target.values(torch.float32)
        shift = noise._noisy(target, clean, [m.square().mean() for m in clean], 5, 0.02) - clean
        sizes = shift.square().mean((1, 2)).sqrt() / clean.square().mean((1, 2)).sqrt()
        assert (sizes - 0.02).abs().max() < 0.003, name


def test_noise_that_the_dtype_swallows_is_measured_as_such():
    model = policy(dtype=torch.bfloat16)
    noise = LinearNoise(model, seed=0)
    for sigma, swallowed in ((2e-2, False), (2e-4, True)):
        with noise.active(1, sigma):
            run(model)
        assert noise.last_report.is_swallowed == swallowed
    assert noise.last_report.measured_std < 1e-4


def test_swallowed_noise_is_warned_of_once(tmp_path, caplog):
    model = policy(dtype=torch.bfloat16)
    args = MXFP4GRPOConfig(str(tmp_path), aqn_targets="linears", report_to="none", bf16=False)
    noise = RolloutNoise(model, args, False, lambda name, value: None)
    for sigma, warnings in ((2e-2, 0), (2e-4, 1), (2e-4, 1)):
        with noise.active(1, sigma):
            run(model)
        assert caplog.text.count("noise on linear layers was meant") == warnings


def test_noise_is_standard_normal_and_drawn_in_chunks(monkeypatch):
    noise = LinearNoise(policy(), seed=0)
    whole = torch.cat(list(noise.noise("a", 200_001, 3)))
    assert len(whole) == 200_001 and whole.dtype == torch.float32
    assert float(whole.mean()) == pytest.approx(0, abs=0.01) and float(whole.std()) == pytest.approx(1, rel=0.01)
    assert float((whole.abs() < 0.6745).float().mean()) == pytest.approx(0.5, abs=0.01)
    assert float((whole.abs() > 3).float().mean()) == pytest.approx(0.0027, abs=0.001)
    half = len(whole) // 2
    assert abs(float((whole[:half] * whole[half : 2 * half]).mean())) < 0.02
    monkeypatch.setattr("hf_mxfp4.rl.noise.linears._CHUNK", 1000)
    parts = list(noise.noise("a", 2500, 3))
    assert [len(part) for part in parts] == [1000, 1000, 500]
    assert not torch.equal(parts[0], parts[1]) and torch.equal(parts[1], list(noise.noise("a", 2500, 3))[1])


def test_noise_is_a_function_of_seed_step_and_name_alone():
    first, second = LinearNoise(policy(), seed=1), LinearNoise(policy("llama"), seed=1)
    other = LinearNoise(policy(), seed=2)
    state = torch.get_rng_state()

    def draw(noise, name, step):
        return torch.cat(list(noise.noise(name, 64, step)))

    assert torch.equal(draw(first, "x", 9), draw(second, "x", 9))
    others = [draw(first, "x", 10), draw(first, "y", 9), draw(other, "x", 9)]
    assert all(not torch.equal(draw(first, "x", 9), each) for each in others)
    assert torch.equal(torch.get_rng_state(), state)


# ---- what it leaves alone -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qat", "packed", "experts", "packed experts"])
def test_weights_are_never_written_and_layers_are_themselves_again_after_an_exception(kind):
    model = policy(**POLICIES[kind])
    before = copy.deepcopy(model.state_dict())
    noise = LinearNoise(model, seed=0)
    with pytest.raises(ZeroDivisionError), cached_weights(), noise.active(3, 0.5):
        run(model)
        raise ZeroDivisionError
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any({"forward", "project"} & module.__dict__.keys() for module in model.modules())
    assert torch.equal(run(model), run(policy(**POLICIES[kind])))


def test_steps_do_not_share_copies_and_noise_does_not_grow():
    model, outputs, measured = policy(), [], []
    noise = LinearNoise(model, seed=0)
    with cached_weights():
        for step in (1, 2, 1):
            with noise.active(step, 0.1):
                outputs.append(run(model))
            measured.append(noise.last_report.measured_std)
    assert torch.equal(outputs[0], outputs[2]) and not torch.equal(outputs[0], outputs[1])
    assert measured == pytest.approx([0.1] * 3, rel=0.02)


def test_a_noise_free_step_changes_nothing_and_reports_none():
    model = policy()
    noise = LinearNoise(model, seed=0)
    with noise.active(1, 0.0):
        assert torch.equal(run(model), run(policy()))
        assert not any("forward" in module.__dict__ for module in model.modules())
    assert noise.last_report.modules == 0 and noise.last_report.sigma == 0


def test_noise_that_reaches_no_layer_and_a_pass_with_gradients_are_errors():
    model = policy()
    noise = LinearNoise(model, seed=0)
    with pytest.raises(RuntimeError, match="reached none of 14 weights"), noise.active(1, 0.1):
        pass
    with pytest.raises(RuntimeError, match="belongs to rollouts"), noise.active(1, 0.1):
        model(IDS)


def test_heads_embeddings_norms_and_routers_are_no_targets():
    model = policy("qwen3_moe", moe=True)
    noise = LinearNoise(model, seed=0)
    layers = {id(target.layer) for target in noise.parameters.values()}
    assert not layers & {id(router) for router in find_routers(model).values()}
    assert id(model.lm_head) not in layers and id(model.model.embed_tokens) not in layers
    assert layers == {id(layer) for layer in quantized(model).values()}
    # Two layers of four projections of attention, and six experts of two projections.
    assert noise.n_matrices == 2 * (4 + 6 * 2)


def test_a_quantized_layer_in_the_place_of_a_router_is_none_either():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = nn.ModuleDict({"gate": MXFP4Linear(32, 4), "up_proj": MXFP4Linear(32, 32)})

    assert list(LinearNoise(nn.ModuleDict({"layer": Block()}), seed=0).parameters) == ["layer.mlp.up_proj.weight"]


@pytest.mark.parametrize("mode", ["qat", "packed"])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_the_same_hidden_state_is_routed_to_the_bit(family, mode):
    model = policy(family, mode, moe=True)
    router, name = next((router, name) for name, router in find_routers(model).items())
    block = model.get_submodule(name.rpartition(".")[0])
    noise, seen, x = LinearNoise(model, seed=0), [], torch.randn(1, 5, 32)
    handle = router.register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        clean = block(x)
        with noise.active(1, 0.3):
            noisy = block(x)
    handle.remove()
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    clean, noisy = (value[0] if isinstance(value, tuple) else value for value in (clean, noisy))
    assert not torch.equal(clean, noisy)


@pytest.mark.parametrize("kind", ["packed", "packed experts"])
def test_adapters_get_none(kind):
    model = policy(**POLICIES[kind])
    targets = ["q_proj", "up_proj"] if kind == "packed" else ["q_proj", "experts"]
    plain = LinearNoise(model, seed=0)
    model = get_peft_model(model, LoraConfig(target_modules=targets, init_lora_weights=False))
    noise = LinearNoise(model, seed=0)
    assert list(noise.parameters) == list(plain.parameters)
    with noise.active(2, 0.05):
        adapted = run(model)
    pushed = dict(rollout_parameters(policy_parameters(model), model, None, 2, 0.05, noise))
    clean = dict(policy_parameters(model))
    changed = {name for name in clean if not torch.equal(clean[name], pushed[name])}
    assert changed == set(noise.parameters)
    twin = plain_twin(policy(**POLICIES[kind]))
    twin.load_state_dict(pushed)
    torch.testing.assert_close(run(twin), adapted, rtol=1e-3, atol=1e-3)


# ---- which layers ---------------------------------------------------------------------------------------------------


def test_layers_are_chosen_by_whole_name_parts_and_keep_their_noise():
    model = policy("qwen3_moe", moe=True)
    everything = LinearNoise(model, seed=0)
    noise = LinearNoise(model, seed=0, layers=["experts.1.down_proj", "re:.*layers\\.0.*q_proj"])
    assert noise.n_matrices == 3
    name = "model.layers.1.mlp.experts.down_proj"
    clean = noise.parameters[name].values(torch.float32)
    some, all_of_them = (each.noisy_values(name, clean, 1, 0.1) for each in (noise, everything))
    assert torch.equal(some[1], all_of_them[1]) and torch.equal(some[0], clean[0]) and torch.equal(some[2:], clean[2:])
    with noise.active(1, 0.1):
        run(model, tokens())
    assert noise.last_report.modules == 3


def test_nothing_to_put_noise_on_is_an_error():
    with pytest.raises(ValueError, match="has no quantized linear layer"):
        LinearNoise(make_model(), seed=0)
    with pytest.raises(ValueError, match="chooses none"):
        LinearNoise(policy(), seed=0, layers=["norm"])
    for scale in (0.0, math.nan):
        with pytest.raises(ValueError, match="aqn_linear_sigma_scale"):
            LinearNoise(policy(), seed=0, scale=scale)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aqn_targets": "both", "aqn_layers": ["input_layernrom"]}, "aqn_layers has.*input_layernorm"),
        ({"aqn_targets": "both", "aqn_layers": ["mlp.dwon_proj"]}, "aqn_layers has.*mlp.down_proj"),
        ({"aqn_targets": "both", "aqn_layers": ["layers.7"]}, "aqn_layers has.*layers.1"),
        (
            {"aqn_targets": "both", "aqn_layers": ["post_atention_layernorm"]},
            "aqn_layers has.*post_attention_layernorm",
        ),
        # One kind would be left without noise.
        ({"aqn_targets": "both", "aqn_layers": ["up_proj"]}, "aqn_layers"),
        ({"aqn_targets": "both", "aqn_layers": ["norm"]}, "aqn_layers"),
        ({"aqn_targets": "norms", "aqn_layers": ["up_proj"]}, "aqn_layers"),
        ({"aqn_targets": "linears", "compile_rollouts": True}, "set aqn_targets='norms'"),
    ],
    ids=str,
)
def test_a_choice_that_cannot_be_is_refused_with_advice(options, message, build):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        build(**options)


# ---- in training ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "layers", "norms", "linears"),
    [("linears", None, None, 14), ("both", None, 5, 14), ("both", ["layers.1"], 2, 7), ("norms", ["norm"], 1, None)],
)
def test_training_reports_what_got_noise(targets, layers, norms, linears, build):
    # Noise takes dense copies, in the place of packed ones too.
    weights = "packed" if targets == "linears" else "dense"
    options = {"aqn_targets": targets, "aqn_layers": layers, "aqn_schedule": "constant", "rollout_weights": weights}
    trainer = build(**options, max_steps=2)
    trainer.train()
    assert logged(trainer, "aqn/n_modules") == ({} if norms is None else {1: 0, 2: norms})
    assert logged(trainer, "aqn/n_linears") == ({} if linears is None else {1: 0, 2: linears})
    assert logged(trainer, "aqn/sigma") == {1: 0, 2: 1e-2}
    if linears:
        assert logged(trainer, "aqn/linear_sigma") == {1: 0, 2: 1e-2}
        assert logged(trainer, "aqn/linear_measured_std") == pytest.approx({1: 0, 2: 1e-2}, rel=0.05)
        assert logged(trainer, "aqn/n_dense_copies") == {1: 0, 2: 14 if weights == "packed" else 0}


def test_scores_of_a_noisy_rollout_are_under_the_very_noise_that_sampled(build, monkeypatch):
    options = {"aqn_targets": "both", "aqn_num_stages": 1, "aqn_sigma_start": 0.3, "aqn_sigma_end": 0.3}
    trainer = build(generation_kwargs={"do_sample": False}, **options)
    trainer.model.train()
    trainer.state.global_step, trainer.state.max_steps = 2, 4
    prompt, completion, *_, scores = (trainer._generate(["1+1="])[i] for i in (0, 1, 4))
    with trainer.noise.active(2, 0.3), trainer.linear_noise.active(2, 0.3):
        logits = run(trainer.model, torch.tensor([prompt[0] + completion[0]]))[0, len(prompt[0]) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(completion[0])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(scores[0]), expected, rtol=1e-4, atol=1e-5)
    assert logits.argmax(-1).tolist() == completion[0]
    clean = run(trainer.model, torch.tensor([prompt[0] + completion[0]]))[0, len(prompt[0]) - 1 : -1]
    assert (clean - logits).abs().max() > 1e-2


def test_evaluation_sees_none_and_masters_stay(build):
    options = {"aqn_targets": "both", "aqn_num_stages": 1, "aqn_sigma_start": 0.5, "aqn_sigma_end": 0.5}
    trainer = build(generation_kwargs={"do_sample": False}, **options)
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.model.eval()
    clean = trainer._generate(["1+1=", "2+2="])[1]
    trainer.model.train()
    trainer._generate(["1+1=", "2+2="])
    trainer.model.eval()
    assert trainer._generate(["1+1=", "2+2="])[1] == clean
    assert all(torch.equal(value, before[key]) for key, value in trainer.model.state_dict().items())


def test_continuous_batching_samples_with_the_same_noise(build):
    options = {"aqn_targets": "both", "aqn_num_stages": 1, "aqn_sigma_start": 0.3, "aqn_sigma_end": 0.3}
    batching = {
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": {"num_blocks": 16, "max_batch_tokens": 64},
    }
    found = []
    for more in ({}, batching):
        trainer = build(generation_kwargs={"do_sample": False}, **options, **more)
        trainer.model.train()
        trainer.state.global_step, trainer.state.max_steps = 2, 4
        found.append((trainer._generate(["1+1=", "2+2="])[1], trainer.linear_noise.last_report))
    assert found[0] == found[1] and found[0][1].modules == 14


# ---- on the way to vLLM ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qat", "experts", "transposed experts"])
def test_vllm_gets_the_noise_of_a_rollout_here(kind):
    model = policy(preset="w4a16", **POLICIES[kind])
    noise = LinearNoise(model, seed=0)
    with noise.active(4, 0.05):
        expected = run(model)
    here = noise.last_report
    pushed = dict(rollout_parameters(model.named_parameters(), model, None, 4, 0.05, noise))
    assert noise.last_report.modules == here.modules and noise.last_report.sigma == here.sigma
    assert noise.last_report.measured_std == pytest.approx(here.measured_std, rel=1e-4)
    twin = plain_twin(model)
    twin.load_state_dict(pushed)
    torch.testing.assert_close(run(twin), expected, rtol=1e-4, atol=1e-5)
    clean = dict(rollout_parameters(model.named_parameters(), model, None, 4, 0.0, noise))
    changed = {name for name in clean if not torch.equal(clean[name], pushed[name])}
    assert changed == set(noise.parameters)


def test_noise_that_cannot_be_pushed_is_an_error():
    model = policy(mode="packed")
    with pytest.raises(ValueError, match="cannot carry noise"):
        list(rollout_parameters(model.named_parameters(), model, None, 4, 0.05, LinearNoise(model, seed=0)))
    model = policy()
    noise = LinearNoise(model, seed=0, layers=["q_proj"])
    named = [(name, value) for name, value in model.named_parameters() if "q_proj" not in name]
    with pytest.raises(RuntimeError, match="reached none of 2 weights"):
        list(rollout_parameters(named, model, None, 4, 0.05, noise))


def test_evaluation_after_a_noisy_push_sends_clean_weights_at_the_same_step(build):
    """TRL pushes once a step: noisy weights would stay for an evaluation in the step of the rollout."""
    trainer = build(aqn_targets="both", aqn_num_stages=1)
    pushed = with_simulated_vllm(trainer)
    trainer.state.global_step, trainer.state.max_steps = 3, 4
    for train in (False, True, False, False, True):
        trainer.model.train(train)
        trainer._generate(["1+1="])
    # The second evaluation in a row has clean weights already.
    assert len(pushed) == 4
    clean, noisy, again, last = pushed
    assert all(torch.equal(clean[name], again[name]) for name in clean)
    assert all(torch.equal(noisy[name], last[name]) for name in clean)
    assert sum(not torch.equal(clean[name], noisy[name]) for name in clean) == 5 + 14
    assert trainer._metrics["train"]["aqn/n_linears"] == [14, 14]
    assert trainer._metrics["train"]["aqn/n_modules"] == [5, 5]
