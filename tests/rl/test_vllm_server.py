# SPDX-License-Identifier: Apache-2.0
"""Servers that die, or that are others than the weights were pushed to, without vLLM; with it: `tests/vllm_lane`."""

import pytest
import torch
from fake_vllm import FakeVLLM, use_fake_vllm
from grpo_runs import logged

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
        ("/v1/completions", "while sampling"),
        ("/update_weights", "while receiving weights"),
        ("/weight_info", "while sampling"),
    ],
)
def test_a_server_that_dies_leaves_a_checkpoint_from_which_a_new_one_goes_on(
    build, uninterrupted, pushed, path, what, tmp_path, caplog
):
    with FakeVLLM(dies=(path, 2)) as server:
        trainer = trainer_on(build, server)
        with pytest.raises(VLLMServerError, match="resume this run with resume_from_checkpoint") as caught:
            trainer.train()
    assert server.url in str(caught.value) and "does not answer any more" in str(caught.value)
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


def test_a_server_that_was_started_anew_is_not_sampled_from(build, monkeypatch):
    with FakeVLLM() as server:
        trainer = trainer_on(build, server)
        sync = trainer.vllm_generation.sync_weights

        def sync_and_restart():
            sync()
            if trainer.state.global_step == 2:
                server.version = "default"

        monkeypatch.setattr(trainer.vllm_generation, "sync_weights", sync_and_restart)
        with pytest.raises(VLLMServerError, match="'default' instead of '[0-9a-f]{32}-3'.* started anew") as caught:
            trainer.train()
    assert "resume_from_checkpoint" in str(caught.value)
    assert trainer.state.global_step == 2 and len(logged(trainer, "loss")) == 2


def test_two_runs_on_one_server_are_noticed(build, tmp_path):
    with FakeVLLM() as server:
        first, second = trainer_on(build, server), trainer_on(build, server, output_dir=str(tmp_path / "other"))
        first.vllm_generation.sync_weights()
        second.vllm_generation.sync_weights()
        second.vllm_generation.generate([[2, 3]] * 4, None, 4)
        with pytest.raises(VLLMServerError, match="another run pushes to it"):
            first.vllm_generation.generate([[2, 3]] * 4, None, 4)


def test_a_server_without_versions_is_told_of_and_used(build, caplog):
    with FakeVLLM(versions=False) as server:
        trainer = trainer_on(build, server, max_steps=2)
        trainer.train()
    assert trainer.state.global_step == 2 and server.requests.count("/weight_info") == 0
    assert caplog.text.count("keeps no version of its weights") == 1


def test_what_a_server_says_is_said(build):
    refusal = {"error": {"message": "the prompt is longer than max_model_len"}}
    with FakeVLLM(answers={"/v1/completions": (400, refusal)}) as server:
        trainer = trainer_on(build, server)
        with pytest.raises(VLLMServerError, match="runs, and failed while sampling.*longer than max_model_len"):
            trainer.train()


def test_errors_of_this_process_are_not_blamed_on_the_server(build, monkeypatch):
    with FakeVLLM() as server:
        trainer = trainer_on(build, server)
        trainer.vllm_generation.sync_weights()

        def failing():
            raise OSError("a shard cannot be read")
            yield

        monkeypatch.setattr(trainer.vllm_generation, "_iter_named_params", failing)
        with pytest.raises(OSError, match="^a shard cannot be read$"):
            trainer.vllm_generation.sync_weights()
