# SPDX-License-Identifier: Apache-2.0
"""TRL's asynchronous GRPO with `vllm serve`: the server has what the policy computes with."""

import pytest
import torch
import trl.experimental.async_grpo.weight_transfer as transfer
from async_runs import Worker, on_a_cpu, settings
from grpo_runs import logged
from harness import tiny_model
from server import Server, _send
from vllm.distributed.utils import StatelessProcessGroup

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.layers import trainable_matrices
from hf_mxfp4.rl import MXFP4AsyncGRPOTrainer
from recipes.tasks.tiny_model import build_byte_tokenizer


pytestmark = pytest.mark.vllm


class Group:
    """TRL's end of the transfer, over a TCP store; it looks into ``group`` when it lets go of it."""

    def __init__(self, info):
        address = info["master_address"], info["master_port"]
        self.group = StatelessProcessGroup.create(*address, 0, info["world_size"])

    def broadcast_obj(self, value, src):
        self.group.broadcast_obj(value, src)


def test_a_server_in_full_precision_samples_from_quantized_values(tmp_path, monkeypatch):
    on_a_cpu(monkeypatch)
    monkeypatch.setattr(transfer, "open_trainer_endpoint", Group)
    monkeypatch.setattr(transfer, "packed_nccl_broadcast_producer", _send)
    monkeypatch.setattr(transfer, "get_ip", lambda: "127.0.0.1")
    tokenizer, folder = build_byte_tokenizer(), tmp_path / "full"
    tiny_model("qwen2", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
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
    assert logged(trainer, "ratio")[1] == pytest.approx(1, abs=1e-4) and abs(logged(trainer, "kl")[1]) < 1e-8
