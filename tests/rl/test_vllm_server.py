# SPDX-License-Identifier: Apache-2.0
"""Servers that die, and what they are pushed, without vLLM; with it: `tests/vllm_integration`."""

import pytest
import torch
from fake_vllm import FakeVLLM, use_fake_vllm
from grpo_runs import logged
from peft import LoraConfig

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.rl import VLLMServerError


STEPS = {"max_steps": 4, "vllm_mode": "server", "use_vllm": True, "vllm_server_timeout": 0.0, "aqn_num_stages": 4}


@pytest.fixture(autouse=True)
def pushed(monkeypatch):
    return use_fake_vllm(monkeypatch)


def trainer_on(build, server, **options):
    return build(vllm_server_base_url=server.url, **{**STEPS, **options})


@pytest.fixture
def uninterrupted(build, tmp_path):
    with FakeVLLM() as server:
        trainer = trainer_on(build, server, output_dir=str(tmp_path / "whole"))
        trainer.train()
    return trainer


@pytest.mark.parametrize(
    "path, what",
    [
        pytest.param("/v1/completions", "while sampling", marks=pytest.mark.large),
        ("/update_weights", "while receiving weights"),
    ],
)
def test_a_server_that_dies_leaves_a_checkpoint_from_which_a_new_one_goes_on(
    build, uninterrupted, pushed, path, what, tmp_path, caplog
):
    with FakeVLLM(dies=(path, 2)) as server:
        trainer = trainer_on(build, server)
        with pytest.raises(VLLMServerError, match="resume this run with resume_from_checkpoint") as caught:
            trainer.train()
    assert server.url in str(caught.value)
    assert what in str(caught.value)
    assert trainer.state.global_step == 2
    assert f"saved as {tmp_path / 'run' / 'checkpoint-2'}" in caplog.text
    with FakeVLLM(server.port) as again:
        resumed = trainer_on(build, again)
        pushed.clear()
        resumed.train(resume_from_checkpoint=True)
        assert again.requests.index("/update_weights") < again.requests.index("/v1/completions")
    assert logged(resumed, "loss") == logged(uninterrupted, "loss")
    name = "model.layers.0.mlp.down_proj.weight"
    layer = uninterrupted.model.model.layers[0].mlp.down_proj
    assert torch.equal(resumed.model.get_parameter(name), layer.weight)
    assert not torch.equal(pushed[0][name], layer.effective_weight(layer.weight))


def test_what_a_server_says_is_said(build):
    refusal = {"error": {"message": "the prompt is longer than max_model_len"}}
    with FakeVLLM(answers={"/v1/completions": (400, refusal)}) as server:
        trainer = trainer_on(build, server)
        with pytest.raises(VLLMServerError, match="failed while sampling.*longer than max_model_len"):
            trainer.train()


# ---- what a server is pushed ----------------------------------------------------------------------------------------

LAYER = "model.layers.0"


def packed_server(rank=0):
    """A server that keeps weights of the default policy in 4 bits."""
    scheme = {**MXFP4RLConfig().to_dict(), "vllm": {"adapter_rank": rank}}
    model = {
        "logprobs_mode": "processed_logprobs",
        "dtype": "torch.float32",
        "quantization": "mxfp4_rl",
        "hf_overrides": {"quantization_config": scheme},
    }
    answer = {"vllm_config": {"weight_transfer_config": {}, "model_config": model}}
    return FakeVLLM(answers={"/server_info": (200, answer)})


def pushed_twice(trainer, pushed):
    pushed.clear()
    for _ in range(2):
        trainer.vllm_generation.sync_weights()
    return pushed


def test_a_server_gets_all_of_what_vllm_joins_or_nothing(build, pushed):
    """It loads a layer anew from what comes: had it codes of queries alone, those of keys and values would be lost."""
    with packed_server() as server:
        trainer = trainer_on(build, server, aqn=False)
        layer = trainer.model.model.layers[0]
        for frozen in (layer.self_attn.q_proj, layer.self_attn.k_proj.bias, layer.mlp):
            frozen.requires_grad_(False)
        first, second = pushed_twice(trainer, pushed)
    assert {f"{LAYER}.self_attn.{name}_proj.weight" for name in "qkvo"} <= second.keys()
    assert f"{LAYER}.self_attn.k_proj.bias" in second
    assert first[f"{LAYER}.mlp.up_proj.weight"].dtype == torch.uint8
    assert first.keys() - second.keys() == {name for name in first if name.startswith(f"{LAYER}.mlp.")}


def test_a_server_gets_factors_of_all_layers_and_codes_once(build, pushed):
    """Those of another run may be in it, and two of three that are joined would leave the third one what it is."""
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
    with packed_server(rank=4) as server:
        trainer = trainer_on(build, server, aqn=False, peft_config=lora)
        first, second = pushed_twice(trainer, pushed)
    layers = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    names = {f"model.layers.{i}.{layer}.lora_{side}.weight" for i in (0, 1) for layer in layers for side in "AB"}
    assert second.keys() == names and first.keys() > names
    assert second[f"{LAYER}.self_attn.q_proj.lora_A.weight"].shape == (4, 32)
    assert torch.count_nonzero(second[f"{LAYER}.self_attn.k_proj.lora_A.weight"]) == 0
