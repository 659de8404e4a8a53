# SPDX-License-Identifier: Apache-2.0
"""TRL's asynchronous GRPO on a CPU: stand-ins for its attention kernel and its rollout worker."""

import queue

import numpy as np
import torch
import trl.experimental.async_grpo.async_grpo_trainer as trl_trainer
from grpo_runs import prompts
from trl.experimental.async_grpo import AsyncGRPOConfig, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample


PROMPT = [3, 4, 5, 6]
LENGTH = 10


def tree_attention(module, query, key, value, mask, *, tree_kv_index, tree_cu_seqlens_q, tree_cu_seqlens_k, **others):
    """What TRL has a kernel for that needs a GPU: each segment sees the path to it, ``[1, heads, tokens, size]``."""
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, dim=1)
    value = value.repeat_interleave(groups, dim=1)
    parts = []
    for own, path in zip(tree_cu_seqlens_q.unfold(0, 2, 1), tree_cu_seqlens_k.unfold(0, 2, 1), strict=True):
        seen = tree_kv_index[slice(*path.tolist())]
        part = query[:, :, slice(*own.tolist())]
        (count, length) = (int(own.diff()), len(seen))
        scores = part @ key[:, :, seen].mT * others["scaling"]
        hidden = torch.ones(count, length, dtype=torch.bool).triu(length - count + 1)
        parts.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value[:, :, seen])
    return torch.cat(parts, dim=2).transpose(1, 2), None


class Worker:
    """Makes rollouts of drawn tokens, ``count`` at a time; ``logprobs`` gives those of ids, ``[count, length - 1]``."""

    def __init__(self, logprobs, count=4):
        self.logprobs = logprobs
        self.count = count
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        self.random = np.random.default_rng(0)
        self.version = 0

    def start(self):
        self.roll_out()
        self.roll_out()  # the trainer takes a batch before it trains on the one before

    def roll_out(self):
        drawn = self.random.integers(2, 32, (self.count, LENGTH - len(PROMPT))).tolist()
        rows = [[*PROMPT, *tokens] for tokens in drawn]
        mask = (torch.arange(LENGTH) >= len(PROMPT)).long().numpy()
        for number, (ids, logps) in enumerate(zip(rows, self.logprobs(rows), strict=True)):
            sample = RolloutSample(
                prompt="", completion="", input_ids=np.array(ids), completion_mask=mask,
                old_log_probs=np.concatenate([[0.0], logps.numpy()]), advantage=float(number % 2) - 0.5,
                model_version=self.version, group_id=self.version, metrics={"reward": 0.0},
            )  # fmt: skip
            self.rollout_buffer.put(sample)

    def update_model_version(self, version):
        self.version = version
        if version > 1:  # the first are asked for by `start`
            self.roll_out()

    def check_health(self, *args):
        raise AssertionError("the trainer waits for samples that nobody makes")

    def stop(self):
        """Nothing runs."""


def on_a_cpu(monkeypatch):
    """Let TRL's trainer run without a GPU."""
    monkeypatch.setattr(packing, "tree_attention", tree_attention)
    monkeypatch.setattr(trl_trainer, "get_peak_flops_per_device", lambda *_: None)  # asks for the name of a GPU


def settings(out, worker, **options):
    """What a trainer is given beside its model, for three steps."""
    args = AsyncGRPOConfig(
        str(out), use_cpu=True, bf16=False, max_steps=3, per_device_train_batch_size=4, num_generations=4,
        learning_rate=1e-2, lr_scheduler_type="constant", token_budget=-1, logging_steps=1, report_to="none",
        save_strategy="no", disable_tqdm=True, gradient_checkpointing=False, **options,
    )  # fmt: skip
    return {"args": args, "rollout_worker": worker, "reward_funcs": max, "train_dataset": prompts()}
