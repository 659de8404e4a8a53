# SPDX-License-Identifier: Apache-2.0
"""How a colocated vLLM is started, and servers that die, without vLLM; with it: `tests/vllm_integration`."""

import json
import os

import pytest
import torch
from fake_vllm import FakeVLLM, use_fake_vllm
from grpo_runs import TOKENIZER, logged, quantized, trainer_factory, vllm_llm, with_adapters
from peft import LoraConfig
from tiny_models import make_model
from transformers import AutoModelForCausalLM
from trl.generation import vllm_generation

from hf_mxfp4 import MXFP4GRPOConfig, MXFP4RLConfig
from hf_mxfp4.integrations.vllm import EngineSettings
from hf_mxfp4.rl import VLLMServerError
from hf_mxfp4.rl.vllm_engine import quantization_config, vllm_in_scheme


@pytest.fixture
def full(tmp_path):
    make_model().save_pretrained(tmp_path / "full")
    TOKENIZER.save_pretrained(tmp_path / "full")
    return tmp_path / "full"


def load(folder, **scheme):
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=MXFP4RLConfig(**scheme))


def saved(model, folder):
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def args(**options):
    return MXFP4GRPOConfig(use_cpu=True, bf16=False, use_vllm=True, vllm_mode="colocate", **options)


GRADIENTS = {"stochastic_seed": 1, "dither_ties": False, "dgrad": {"grad": "rceil+stochastic"}}
RANKS = {"target_modules": "all-linear", "rank_pattern": {"up_proj": 9}}
#: What a policy is made of, its adapters and how it is asked for, and what vLLM is told: room for adapters and mode.
STARTS = {
    "qat": (lambda full, tmp: load(full), {}, {}, 0, "qat"),
    "qat w4a16": (lambda full, tmp: load(full, preset="w4a16"), {}, {}, 0, "qat"),
    "qat from its own": (lambda full, tmp: saved(load(full), tmp / "own"), {}, {}, 0, "qat"),
    "packed": (lambda full, tmp: saved(load(full, mode="packed"), tmp / "packed"), {}, {}, 0, "packed"),
    "packed as it was read": (lambda full, tmp: load(full, mode="packed"), {}, {}, 0, "qat"),
    "asked for": (lambda full, tmp: load(full), {}, {"vllm_weights": "dense"}, 0, "qat"),
    "lora": (lambda full, tmp: load(full), {"r": 3, "target_modules": ["q_proj"]}, {}, 3, "qat"),
    "lora of several ranks": (lambda full, tmp: saved(load(full, mode="packed"), tmp / "p"), RANKS, {}, 9, "packed"),
    "options of gradients": (lambda full, tmp: load(full, **GRADIENTS), {}, {}, 0, "qat"),
}


@pytest.mark.parametrize("name", STARTS)
def test_vllm_is_told_the_scheme_of_the_policy(name, full, tmp_path):
    make, lora, options, rank, mode = STARTS[name]
    model = make(full, tmp_path)
    model = with_adapters(model, **lora) if lora else model
    found, _ = quantization_config(model, args(**options))
    json.dumps(found)
    assert found["vllm"] == {"weights": "dense" if name == "asked for" else "packed", "adapter_rank": rank}
    scheme = MXFP4RLConfig.from_dict(found)
    trained = model.config.quantization_config
    assert scheme.mode == mode
    assert scheme.gemms().fprop == trained.gemms().fprop
    assert scheme.modules_to_not_convert == trained.modules_to_not_convert


def foreign(full, tmp_path):
    model = load(full)
    stored = json.loads((full / "config.json").read_text())
    (full / "config.json").write_text(json.dumps({**stored, "quantization_config": {"quant_method": "fp8"}}))
    return model


def unpacked(full, tmp_path):
    """A policy whose folder was packed by another scheme since."""
    model = saved(load(full, mode="packed"), tmp_path / "own")
    load(full, mode="packed", macro_block="row").save_pretrained(tmp_path / "own")
    return model


def moved(full, tmp_path):
    model = load(full)
    full.rename(tmp_path / "elsewhere")
    return model


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (lambda full, tmp: make_model(), {}, "it has no quantized layer"),
        (lambda full, tmp: quantized(MXFP4RLConfig()), {}, "was not quantized by from_pretrained"),
        (moved, {}, "has no config.json on this machine"),
        (foreign, {}, "its checkpoint is quantized by 'fp8'"),
        (unpacked, {}, "its checkpoint is packed by another scheme"),
        (lambda full, tmp: load(full), {"vllm_model_impl": "transformers"}, "vllm_model_impl='transformers'"),
    ],
)
def test_where_it_cannot_be_told_there_is_a_reason(make, options, reason, full, tmp_path):
    config, found = quantization_config(make(full, tmp_path), args(**options))
    assert config is None
    assert reason in found


def test_a_policy_that_no_vllm_can_sample_from_is_refused_before_one_is_made(full):
    with pytest.raises(ValueError, match="vLLM cannot sample from model.layers.0"):
        quantization_config(load(full, fprop={"rotation": "deterministic-32"}), args())


@pytest.fixture
def made(monkeypatch):
    """Options of each vLLM that TRL makes: a stand-in that says of itself what vLLM would."""
    calls = []

    def make(**options):
        calls.append(options)
        given = options.get("hf_overrides", {}).get("quantization_config")
        scheme = None if given is None else MXFP4RLConfig.from_dict(given)
        settings = None if given is None else EngineSettings.read(given["vllm"])
        return vllm_llm(scheme=scheme, settings=settings)

    monkeypatch.setattr(vllm_generation, "LLM", make, raising=False)
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda *a, **k: True)
    before = dict(os.environ)
    yield calls
    os.environ.clear()  # TRL has set those of distributed runs
    os.environ.update(before)


@pytest.mark.parametrize("kind", ["model", "name", "lora"])
def test_the_trainer_starts_vllm_in_the_scheme(kind, full, tmp_path, made):
    before = vllm_generation.VLLMGeneration._init_vllm, vllm_generation.LLM
    build = trainer_factory(tmp_path)
    options = {"use_vllm": True, "vllm_mode": "colocate", "aqn": False}
    if kind == "name":
        scheme = MXFP4RLConfig(preset="w4a16")
        options["model_init_kwargs"] = {"quantization_config": scheme}
        trainer = build(policy=str(full), **options)
    else:
        lora = LoraConfig(target_modules=["q_proj"], r=4) if kind == "lora" else None
        trainer = build(policy=load(full, preset="w4a16"), peft_config=lora, **options)
    (given,) = made
    assert given["model"] == str(full) == trainer.model.name_or_path
    assert given["hf_overrides"]["quantization_config"]["preset"] == "w4a16"
    engine = trainer.vllm_policy.engine
    assert engine.is_packed
    assert engine.settings.adapter_rank == (4 if kind == "lora" else 0)
    assert (vllm_generation.VLLMGeneration._init_vllm, vllm_generation.LLM) == before
    if kind == "lora":
        assert trainer.model.peft_config["default"].base_model_name_or_path == str(full)


def test_vllm_is_asked_for_the_experts_that_replay_needs(full, made, monkeypatch):
    monkeypatch.setattr(vllm_generation.VLLMGeneration, "_init_vllm", lambda self: vllm_generation.LLM())
    generation = object.__new__(vllm_generation.VLLMGeneration)
    generation.model = load(full)
    with vllm_in_scheme(args(router_replay=True)):
        generation._init_vllm()
    assert made[0]["enable_return_routed_experts"] is True


def test_a_trl_that_makes_vllm_otherwise_is_an_error(full, made, monkeypatch):
    generation = object.__new__(vllm_generation.VLLMGeneration)
    generation.model = load(full)
    monkeypatch.setattr(vllm_generation.VLLMGeneration, "_init_vllm", lambda self: None)
    with pytest.raises(RuntimeError, match="starts vLLM in another way"), vllm_in_scheme(args()):
        generation._init_vllm()


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
