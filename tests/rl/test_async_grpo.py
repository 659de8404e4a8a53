# SPDX-License-Identifier: Apache-2.0
"""TRL's asynchronous GRPO on quantized policies: what samples is what trains. On a CPU, with stand-ins for the
attention kernel, the rollout worker and the server; log-probabilities of rollouts come from what was pushed."""

import contextlib

import pytest
import torch
import trl.experimental.async_grpo.async_grpo_trainer as trl_trainer
from async_runs import Worker, on_a_cpu, settings
from grpo_runs import TOKENIZER, logged
from peft import LoraConfig
from tiny_models import make_model
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo import AsyncGRPOTrainer

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.layers import trainable_matrices
from hf_mxfp4.rl import MXFP4AsyncGRPOTrainer


LORA = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"])


class Server(Worker):
    """A plain model that takes weights as they are pushed; both TRL's transfer and its worker."""

    def __init__(self, folder):
        super().__init__(self.of_model)
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.pushes = []

    def send_weights(self, iterator):
        self.pushes.append({name: tensor.clone() for name, tensor in iterator})
        keys = self.model.load_state_dict(self.pushes[-1], strict=False)
        assert not keys.unexpected_keys
        assert not keys.missing_keys

    @torch.no_grad()
    def of_model(self, rows):
        ids = torch.tensor(rows)
        return self.model(ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)

    def nothing(self, *args):
        """What else is asked of a transfer."""

    init_weight_transfer = pause = resume = destroy = nothing


@pytest.fixture
def build(tmp_path, monkeypatch):
    on_a_cpu(monkeypatch)
    make_model("qwen3", hidden=64, intermediate=96).save_pretrained(tmp_path / "base")
    TOKENIZER.save_pretrained(tmp_path / "base")

    def make(cls=MXFP4AsyncGRPOTrainer, *, serves=True, folder=None, **given):
        server = Server(tmp_path / "base")
        transfer = {"weight_transfer": server} if serves else {}
        folder = str(folder or tmp_path / "base")
        trainer = cls(folder, **settings(tmp_path / "run", server), **transfer, **given)
        trainer.server = server
        return trainer

    return make


@pytest.mark.parametrize("preset", ["w4a16", "paper_a"])
def test_what_samples_is_what_trains(build, preset):
    """With quantized activations a server of full-precision ones has other log-probabilities, from the same weights."""
    trainer = build(quantization_config=MXFP4RLConfig(preset=preset))
    trainer.train()
    server = trainer.server
    ratios = logged(trainer, "ratio")
    assert list(ratios) == [1, 2, 3]
    assert len(server.pushes) == 4  # before the first step and after each
    assert trainer.n_quantized == 14
    stored = dict(trainer.model.named_parameters())
    for matrix in trainable_matrices(trainer.model):
        pushed = server.pushes[-1][matrix.full_name]
        assert torch.equal(pushed, matrix.layer_values(stored[matrix.full_name].detach()))
        assert not torch.equal(pushed, stored[matrix.full_name])
        assert not torch.equal(pushed, server.pushes[0][matrix.full_name])
    if preset == "w4a16":
        assert ratios[1] == pytest.approx(1, abs=1e-4)
        assert abs(logged(trainer, "kl")[1]) < 1e-8
        assert ratios[2] != pytest.approx(1, abs=1e-4)  # later batches were sampled a step before


def test_trls_own_trainer_is_refused(build, tmp_path):
    policy = saved(tmp_path, preset="w4a16")
    TOKENIZER.save_pretrained(policy)
    with pytest.raises(ValueError, match="use hf_mxfp4.rl.MXFP4AsyncGRPOTrainer"):
        build(AsyncGRPOTrainer, folder=policy)


@pytest.mark.parametrize(
    ("scheme", "adapters", "error", "reason"),
    [
        (None, None, ValueError, "no MXFP4 layer"),
        ("w4a4", None, TypeError, "must be an MXFP4RLConfig"),
        (MXFP4RLConfig(preset="w4a4", fprop={"rotation": "deterministic-32"}), None, ValueError, "cannot sample from"),
        (MXFP4RLConfig(), LORA, ValueError, "start vLLM on the policy's own folder with --enable-lora"),
    ],
)
def test_what_cannot_be_pushed_is_refused(build, scheme, adapters, error, reason):
    with pytest.raises(error, match=reason):
        build(quantization_config=scheme, peft_config=adapters)


class Client:
    """TRL's client of a server, which says what it is."""

    def __init__(self, model, **lora):
        config = {"dtype": "torch.float32", "model": model.pop("name"), "quantization": model.pop("method", None)}
        self.info = {"model_config": {**config, **model}, "lora_config": lora or None}
        self.info["parallel_config"] = {"data_parallel_size": 1}
        self.asked = 0

    def get_server_info(self):
        self.asked += 1
        return self.info

    def wait_for_server_ready(self):
        """It is."""


def saved(tmp_path, **options):
    scheme = MXFP4RLConfig(**options)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=scheme)
    model.save_pretrained(tmp_path / "served")
    return str(tmp_path / "served")


DENSE = {"weights": "dense"}


@pytest.mark.parametrize(
    ("policy", "served", "settings", "reason"),
    [
        ("w4a8", None, None, "quantizes inputs of layers as None, and the policy as"),
        ("w4a16", "w4a8", DENSE, "and the policy as None"),
        ("w4a16", "w4a16", {"weights": "packed"}, "keeps weights in 4 bits"),
        ("w4a16", None, None, None),
        ("w4a8", "w4a8", DENSE, None),
    ],
)
def test_the_server_is_asked_once_what_it_computes_with(build, tmp_path, policy, served, settings, reason):
    trainer = build(quantization_config=MXFP4RLConfig(preset=policy))
    said = {"name": str(tmp_path / "base")}
    if served is not None:
        config = {**MXFP4RLConfig(preset=served).to_dict(), "vllm": settings}
        said = {"name": saved(tmp_path, preset=served), "method": "mxfp4_rl"}
        said["hf_overrides"] = {"quantization_config": config}
    trainer.vllm_client = Client(said)
    trainer._is_server_asked = True
    if reason is not None:
        with pytest.raises(ValueError, match=reason):
            trainer._sync_weight()
        assert not trainer.server.pushes
        return
    trainer._sync_weight()
    trainer._sync_weight()
    assert len(trainer.server.pushes) == 2
    assert trainer.vllm_client.asked == 1


@pytest.mark.parametrize(
    ("is_own", "smooth", "reason"),
    [
        (True, False, None),
        (False, False, "does not have the weights that adapters are trained on"),
        (True, True, "does not have the weights that were smoothed"),
    ],
)
def test_adapters_are_pushed_alone_over_the_weights_that_they_are_trained_on(
    build, tmp_path, monkeypatch, is_own, smooth, reason
):
    options = {"preset": "w4a16", "smooth": smooth}
    name = saved(tmp_path, **options) if is_own else str(tmp_path / "base")
    client = Client({"name": name, "method": "mxfp4_rl" if is_own else None}, max_lora_rank=8, max_loras=8)
    monkeypatch.setattr(trl_trainer, "VLLMClient", lambda *_: client)
    trainer = build(serves=False, quantization_config=MXFP4RLConfig(**options), peft_config=LORA)
    assert trainer.weight_transfer is None
    with contextlib.nullcontext() if reason is None else pytest.raises(ValueError, match=reason):
        trainer._check_server()
