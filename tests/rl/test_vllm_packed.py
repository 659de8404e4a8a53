# SPDX-License-Identifier: Apache-2.0
"""What a vLLM that keeps weights in 4 bits is given, without vLLM; with it: `tests/vllm_integration`."""

import pytest
import torch
from accelerate import Accelerator
from grpo_runs import Pushes, quantized, vllm_llm, with_adapters, with_simulated_vllm
from peft import LoraConfig
from tiny_models import make_model
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration

from hf_mxfp4 import MXFP4GRPOConfig, MXFP4RLConfig, pack
from hf_mxfp4.integrations.peft import policy_parameters
from hf_mxfp4.integrations.vllm import EngineSettings
from hf_mxfp4.ops import quantize_weight
from hf_mxfp4.rl.noise import NormNoise
from hf_mxfp4.rl.vllm import VLLMPolicy


DEFAULT = MXFP4RLConfig()
NORM = "model.norm.weight"
LAYER = "model.layers.0.self_attn.q_proj"


def policy(scheme=DEFAULT, family="qwen2", packed=False, **lora):
    model = quantized(scheme, family, layers=1)
    if packed:
        pack(model)
    return with_adapters(model, **lora) if lora else model


def packed_tensors(scheme, family):
    return dict(policy(scheme, family, packed=True).state_dict())


FALLBACK = MXFP4RLConfig(preset="w4a16", macro_search="hybrid", outlier_fallback=0.5)


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        ("qwen2", DEFAULT),
        ("qwen2", FALLBACK),
        ("qwen2", MXFP4RLConfig(macro_block="row")),
        ("qwen2", MXFP4RLConfig(macro_block=None)),
        ("qwen2", MXFP4RLConfig(fprop={"weight": "rceil+mbs128-dynamic+32x32"})),
        ("qwen3_moe", DEFAULT),
        ("gpt_oss", FALLBACK),
    ],
    ids=str,
)
def test_trained_weights_are_pushed_as_a_packed_checkpoint_has_them(family, scheme):
    pushed = Pushes(policy(scheme, family))()
    expected = packed_tensors(scheme, family)
    assert pushed.keys() == expected.keys()
    assert sum(value.dtype == torch.uint8 for value in pushed.values()) >= 4
    for name, value in expected.items():
        assert torch.equal(pushed[name], value), name


@pytest.mark.parametrize("packed", [False, True])
def test_of_a_policy_with_adapters_the_base_is_pushed_once_and_then_their_factors(packed):
    model = policy(packed=packed, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])
    push = Pushes(model)
    first = push()
    second = push()
    factors = {
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.0.self_attn.q_proj.lora_B.weight",
        "model.layers.0.mlp.down_proj.lora_A.weight",
        "model.layers.0.mlp.down_proj.lora_B.weight",
    }
    assert second.keys() == {*factors, "lm_head.weight"}
    expected = packed_tensors(DEFAULT, "qwen2")
    assert first.keys() == expected.keys() | factors
    assert all(torch.equal(first[name], value) for name, value in expected.items() if value.dtype == torch.uint8)
    layer = model.get_base_model().get_submodule(LAYER)
    assert torch.equal(second[f"{LAYER}.lora_A.weight"], layer.lora_A["default"].weight)
    assert torch.equal(second[f"{LAYER}.lora_B.weight"], 2.0 * layer.lora_B["default"].weight)
    assert push.records["vllm/sync_bytes"] == [sum(t.nbytes for t in pushed.values()) for pushed in (first, second)]


def test_what_adapters_compute_is_what_is_pushed():
    """Several active adapters become one; the sum of all is that of the merged values."""
    model = policy(packed=True, target_modules=["q_proj"], r=2)
    model.add_adapter("other", LoraConfig(r=1, target_modules=["q_proj", "k_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])
    pushed = Pushes(model)()
    assert pushed[f"{LAYER}.lora_A.weight"].shape == (3, 64)
    merged = dict(policy_parameters(model))
    for layer in (LAYER, LAYER.replace("q_proj", "k_proj")):
        delta = pushed[f"{layer}.lora_B.weight"] @ pushed[f"{layer}.lora_A.weight"]
        base = model.get_base_model().get_submodule(layer).base_layer.dequantized_weight()
        assert delta.abs().max() > 1e-3
        torch.testing.assert_close(base + delta, merged[f"{layer}.weight"], rtol=1e-5, atol=1e-6)


def test_frozen_weights_that_were_written_are_pushed_again():
    model = policy(target_modules=["q_proj"])
    push = Pushes(model)
    push()
    layer = model.get_base_model().model.layers[0].mlp.up_proj
    with torch.no_grad():
        layer.weight.mul_(2.0)
    expected = quantize_weight(layer.weight, DEFAULT.weight_scheme)["weight_scale"]
    assert torch.equal(push()["model.layers.0.mlp.up_proj.weight_scale"], expected)
    assert "model.layers.0.mlp.up_proj.weight" not in push()
    layer.weight = torch.nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
    assert "model.layers.0.mlp.up_proj.weight" in push()
    layer.weight.requires_grad_(True)
    assert "model.layers.0.mlp.up_proj.weight" in push()
    assert "model.layers.0.mlp.up_proj.weight" in push()


def test_noisy_norms_are_pushed_while_noisy_and_once_more():
    model = policy(packed=True, target_modules=["q_proj"])
    push = Pushes(model, norms=True)
    clean = push()[NORM]
    push.sigma = 0.1
    noisy = push()
    assert (noisy[NORM] - clean).std() > 0.05
    assert push.of.has_noise
    assert sum("norm" in name for name in noisy) == 3
    assert len(noisy) == 5
    push.sigma = 0.0
    assert torch.equal(push()[NORM], clean)
    assert not push.of.has_noise
    assert NORM not in push()


def test_a_vllm_that_sleeps_is_given_everything_each_time():
    """Also factors of layers without adapters, whose zeros it has thrown away."""
    push = Pushes(policy(packed=True, target_modules=["q_proj"]), sleeps=True)
    first = push()
    assert push().keys() == first.keys()
    others = [value for name, value in first.items() if "lora_" in name and LAYER not in name]
    assert len(others) == 12
    assert not any(value.any() for value in others)


def test_nothing_left_to_push_is_an_error():
    model = policy(packed=True)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    push = Pushes(model)
    push()
    with pytest.raises(RuntimeError, match="nothing of the policy is left to push"):
        push()
    push._generation._iter_named_params = list
    push.of.n_syncs = 0
    with pytest.raises(RuntimeError, match="pushed none of the weights"):
        push()


ON_PARAMETERS = {"family": "qwen3_moe", "target_parameters": ["experts.down_proj"], "target_modules": []}
ON_EXPERTS = {"family": "qwen3_moe", "packed": True, "target_modules": ["experts"]}


@pytest.mark.parametrize(
    ("made", "rank", "message"),
    [
        ({"target_modules": ["q_proj"]}, 3, 'rank 3.*have rank 4.*"adapter_rank": 4'),
        ({"scheme": FALLBACK}, 0, "quantizes weights by .* and the policy by .*of0.5"),
        (ON_PARAMETERS, 0, "adapters on experts are added"),
        (ON_EXPERTS, 0, "adapters on experts are added"),
    ],
)
def test_a_vllm_that_would_quantize_twice_is_refused(made, rank, message):
    model = policy(**made)
    with pytest.raises(ValueError, match=message):
        Pushes(model, vllm_llm(scheme=DEFAULT, settings=EngineSettings("packed", rank)))
    Pushes(model, vllm_llm(scheme=DEFAULT, settings=EngineSettings("dense")))


class Client:
    """TRL's, of a server that takes nothing which was not announced."""

    def __init__(self, folder):
        self.folder = folder
        self.pushes = []

    def get_server_info(self):
        return {"model_config": {"dtype": "torch.float32", "quantization": "mxfp4_rl", "model": "", **self.folder}}

    def update_named_params(self, metadata, named):
        tensors = dict(named)
        found = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()]
        assert found == metadata
        self.pushes.append(tensors)

    def reset_prefix_cache(self):
        pass

    base_url = "http://nowhere"
    session = None
    generate = image_features = None


def served(model, settings, rollout, record, noise):
    """TRL's `VLLMGeneration` of a server in the scheme of the policy, and the `VLLMPolicy` that it pushes."""
    args = MXFP4GRPOConfig(use_cpu=True, bf16=False, use_vllm=True, vllm_mode="server")
    generation = object.__new__(VLLMGeneration)
    generation.mode = "server"
    generation.enable_sleep_mode = False
    generation._weight_metadata = None
    generation.model = model
    generation.accelerator = Accelerator(cpu=True)
    generation._dist = DistributedBackend(generation.accelerator)
    generation.vllm_client = Client({"hf_overrides": {"quantization_config": {**DEFAULT.to_dict(), "vllm": settings}}})
    return generation, VLLMPolicy(generation, model, args, noise, rollout, record)


def test_a_server_is_given_everything_each_time():
    """TRL announces what it found in its first walk over the weights, for good; factors are those of all layers."""
    model = policy(packed=True, target_modules=["q_proj"])
    sigma = [0.0]
    walks = []
    records = []
    generation, of = served(
        model,
        {"adapter_rank": 4},
        rollout=lambda: (4, sigma[0]),
        record=lambda *record: records.append(record),
        noise=NormNoise(model, seed=0),
    )
    assert of.engine.is_packed
    assert of.engine.settings.adapter_rank == 4
    walk = generation._iter_named_params
    generation._iter_named_params = lambda: walks.append(None) or walk()
    for sigma[0] in (0.0, 0.0, 0.1, 0.0):
        generation.sync_weights()
    first, second, noisy, last = generation.vllm_client.pushes
    assert len(first) > 30
    assert first.keys() == second.keys() == noisy.keys()
    assert not torch.equal(noisy[NORM], first[NORM])
    assert torch.equal(last[NORM], first[NORM])
    assert sum(bool(value.any()) for name, value in last.items() if name.endswith("lora_B.weight")) == 1
    assert len(walks) == 4 + 1
    assert of.n_syncs == 4
    assert [name for name, _ in records] == ["vllm/sync_bytes"] * 4


def test_a_server_would_lose_parts_of_gpt_oss():
    model = make_model("gpt_oss", layers=1)
    with pytest.raises(ValueError, match="loses its sinks"):
        served(model, {}, None, None, None)


def test_a_run_pushes_codes_and_logs_bytes(build):
    trainer = build(aqn=False, max_steps=2, learning_rate=0.5, weight_decay=1.0)
    scheme = trainer.model.config.quantization_config
    pushed = with_simulated_vllm(trainer, scheme=scheme, settings=EngineSettings())
    trainer.train()
    assert len(pushed) == 2
    name = "model.layers.0.mlp.up_proj.weight_scale"
    assert pushed[0][name].dtype == torch.uint8
    assert not torch.equal(pushed[0][name], pushed[1][name])
    logs = [entry for entry in trainer.state.log_history if "vllm/sync_bytes" in entry]
    assert len(logs) == 2
    assert logs[0]["vllm/sync_bytes"] == sum(tensor.nbytes for tensor in pushed[0].values())
