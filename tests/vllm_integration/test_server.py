# SPDX-License-Identifier: Apache-2.0
"""GRPO with `vllm serve`: the server has the weights of the policy, with its noise, and may die; asynchronous GRPO.

One server for all tests of GRPO but the last, which kills it. Those that need no vLLM are in
`tests/rl/test_vllm_server.py`.
"""

import json

import pytest
import torch
import trl.experimental.async_grpo.weight_transfer as transfer
from async_runs import Worker, on_a_cpu, settings
from grpo_runs import logged, prompts, trainer_factory
from harness import PROMPTS, model_logprobs, tiny_model
from peft import LoraConfig
from server import Server, _send, free_port, use_store
from test_training import run_recipe
from transformers import AutoModelForCausalLM
from vllm.distributed.utils import StatelessProcessGroup

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.layers import trainable_matrices
from hf_mxfp4.recipes.tasks.tiny_model import build_byte_tokenizer
from hf_mxfp4.rl import MXFP4AsyncGRPOTrainer, VLLMServerError, plain_name


pytestmark = pytest.mark.vllm

SCHEME = {"preset": "w4a16"}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def folder(work):
    """A checkpoint in full precision: the scheme is that of the policy, and the server is told of it."""
    tokenizer = build_byte_tokenizer()
    tiny_model("qwen2", vocab_size=len(tokenizer)).save_pretrained(work / "full")
    tokenizer.save_pretrained(work / "full")
    return work / "full"


@pytest.fixture(scope="module")
def served(folder, work):
    scheme = {"quant_method": "mxfp4_rl", "mode": "qat", **SCHEME, "vllm": {"adapter_rank": 4}}
    with Server(folder, work, "--hf-overrides", json.dumps({"quantization_config": scheme})) as server:
        yield server


@pytest.fixture(autouse=True)
def store(monkeypatch):
    use_store(monkeypatch)


def alternating(completions, **kwargs):
    """A reward that differs within every group, whatever a server has sampled: no step is without a gradient."""
    return [float(index % 2) for index in range(len(completions))]


def trainer_on(server, folder, tmp_path, *, preset=SCHEME["preset"], **options):
    policy = AutoModelForCausalLM.from_pretrained(folder, quantization_config=MXFP4RLConfig(preset=preset))
    settings = {
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": server.url,
        "vllm_group_port": free_port(),
        "max_steps": 2,
        **options,
    }
    return trainer_factory(tmp_path)(alternating, policy=policy, **settings)


def differing(server, policy):
    """Names of the tensors that the server has otherwise than the policy: codes and scales of quantized layers, all
    others as they are. vLLM pads the vocabulary."""
    matrices = list(trainable_matrices(policy))
    expected = {}
    assert len(matrices) == 14
    for matrix in matrices:
        name = plain_name(matrix.full_name)
        masters = getattr(matrix.layer, matrix.parameter)
        expected.update({f"{name}{suffix}": part for suffix, part in matrix.packed_values(masters).items()})
    quantized = {plain_name(matrix.full_name) for matrix in matrices}
    plain = {plain_name(name): value.detach() for name, value in policy.named_parameters() if "lora_" not in name}
    expected.update({name: value for name, value in plain.items() if name not in quantized})
    inside = {name: value for name, value in server.weights().items() if "lora_" not in name}
    assert inside.keys() == expected.keys()
    return {name for name, value in expected.items() if not torch.equal(inside[name][: len(value)], value)}


def test_the_server_has_the_weights_of_the_policy_and_its_noise(served, folder, tmp_path, caplog):
    """Constant noise has two stages, the first without; evaluations have none."""
    noise = {"aqn_sigma_start": 0.02, "aqn_sigma_end": 0.02, "aqn_num_stages": 2}
    trainer = trainer_on(served, folder, tmp_path, eval_dataset=prompts(), **noise)
    policy = trainer.model
    client = trainer.vllm_generation.vllm_client
    assert "vLLM samples with" not in caplog.text  # a warning of another scheme
    norms = {name for name, _ in policy.named_parameters() if "norm" in name}
    seen = []
    sample = client.generate

    def looking(*arguments, **options):
        change = served.weights()["model.norm.weight"] - policy.model.norm.weight.detach()
        seen.append((change.std().item(), differing(served, policy)))
        return sample(*arguments, **options)

    client.generate = looking
    before = served.weights()
    trainer.train()
    trainer.evaluate()
    quiet, noisy, *evaluations = seen
    assert quiet == (0.0, set())
    assert noisy[0] == pytest.approx(0.02, rel=0.2)
    assert noisy[1] == norms
    assert evaluations
    assert all(found == (0.0, set()) for found in evaluations)
    assert logged(trainer, "sampling/sampling_logp_difference/max")[1] < 1e-4
    after = served.weights()
    assert all(not torch.equal(after[name], before[name]) for name in after if name.endswith("proj.weight"))
    assert (served.logprobs(PROMPTS) - model_logprobs(policy)).abs().max() < 1e-4


def test_the_recipe_with_a_server(served, folder, tmp_path, monkeypatch):
    """The configuration shipped for Qwen2.5-3B, with a small model in its place."""
    options = [f"--vllm_server_base_url={served.url}", f"--vllm_group_port={free_port()}", "--preset=w4a16"]
    summary = run_recipe("qwen2.5_3b_gsm8k_vllm_server", folder, tmp_path, monkeypatch, *options)
    assert summary["steps"] == 2
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "policy")
    assert "model.norm.weight" in differing(served, policy)  # the last push was before the last step, with noise


def test_adapters_beside_codes(served, folder, tmp_path):
    """Of queries, keys and values, which vLLM joins, two have adapters; everything is pushed each time."""
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])
    trainer = trainer_on(served, folder, tmp_path, aqn=False, peft_config=lora)
    trainer.train()
    trainer.vllm_generation.sync_weights()
    sent = logged(trainer, "vllm/sync_bytes")
    assert sent[2] == sent[1]
    assert max(logged(trainer, "sampling/sampling_logp_difference/max").values()) < 1e-4
    assert differing(served, trainer.model) == set()
    assert (served.logprobs(PROMPTS) - model_logprobs(trainer.model)).abs().max() < 1e-4
    inside = served.weights()
    name = "model.layers.1.self_attn.qkv_proj.lora_B.weight"
    assert inside[name].abs().sum() > 0, sorted(inside)


def test_a_run_goes_on_with_a_new_server_when_the_old_one_dies(served, folder, work, tmp_path):
    """The new one is started on the checkpoint that was left behind, of master weights, and has the scheme from it: it
    quantizes inputs as the policy does, which the old one was not told to."""
    options = {"preset": "w4a8", "aqn": False}
    trainer = trainer_on(served, folder, tmp_path, **options)
    client = trainer.vllm_generation.vllm_client
    sample = client.generate

    def dying(*arguments, **options):
        if trainer.state.global_step == 1:
            served.kill()
        return sample(*arguments, **options)

    client.generate = dying
    with pytest.raises(VLLMServerError, match="failed while sampling"):
        trainer.train()
    checkpoint = tmp_path / "run" / "checkpoint-1"
    with Server(checkpoint, work, port=served.port) as again:
        resumed = trainer_on(again, folder, tmp_path, **options)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert resumed.state.global_step == 2
        off = logged(resumed, "sampling/sampling_logp_difference/mean")
        # Not 0: an input at a rounding boundary may go either way. A server samples by chance, so this varies.
        assert off[2] < 0.1 * off[1], off
        resumed.vllm_generation.sync_weights()
        assert differing(again, resumed.model) == set()


# ---- asynchronous GRPO ----------------------------------------------------------------------------------------------


class Group:
    """TRL's end of the transfer, over a TCP store; it looks into ``group`` when it lets go of it."""

    def __init__(self, info):
        address = info["master_address"], info["master_port"]
        self.group = StatelessProcessGroup.create(*address, 0, info["world_size"])

    def broadcast_obj(self, value, src):
        self.group.broadcast_obj(value, src)


def test_a_server_in_full_precision_samples_from_quantized_values(folder, tmp_path, monkeypatch):
    on_a_cpu(monkeypatch)
    monkeypatch.setattr(transfer, "open_trainer_endpoint", Group)
    monkeypatch.setattr(transfer, "packed_nccl_broadcast_producer", _send)
    monkeypatch.setattr(transfer, "get_ip", lambda: "127.0.0.1")
    with Server(folder, tmp_path) as server:
        worker = Worker(server.logprobs)
        given = settings(tmp_path / "run", worker, vllm_server_base_url=server.url)
        trainer = MXFP4AsyncGRPOTrainer(str(folder), quantization_config=MXFP4RLConfig(preset="w4a16"), **given)
        before = server.weights()
        trainer.train()
        inside = server.weights()
    assert trainer.model_version == 4  # before the first step and after each
    matrices = list(trainable_matrices(trainer.model))
    assert len(matrices) == 14
    for matrix in matrices:
        masters = getattr(matrix.layer, matrix.parameter).detach()
        assert torch.equal(inside[matrix.full_name], matrix.layer_values(masters)), matrix.full_name
        assert not torch.equal(inside[matrix.full_name], before[matrix.full_name])
    assert torch.equal(inside["model.norm.weight"], trainer.model.model.norm.weight.detach())
    assert logged(trainer, "ratio")[1] == pytest.approx(1, abs=1e-4)
    assert abs(logged(trainer, "kl")[1]) < 1e-8
