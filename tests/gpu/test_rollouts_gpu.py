# SPDX-License-Identifier: Apache-2.0
"""Rollouts on real hardware: compiled with CUDA graphs, and in continuous batches with theirs."""

import copy

import pytest
import torch
from grpo_runs import trainer_factory
from peft import LoraConfig

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.rl.rollout.generation import _static_caches


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
IDS = torch.tensor([[0, 2, 3, 4], [5, 6, 7, 8]])
PROMPTS = ["1+1=", "22+22=", "3+=", "4+4="]


@pytest.fixture
def build(tmp_path):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    factory = trainer_factory(tmp_path)

    def build(mode, preset, **options):
        if mode == "packed":
            options |= {"peft_config": LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")}
        options |= {"aqn_num_stages": 4, "aqn_sigma_start": 0.5, "aqn_sigma_end": 0.4, "error_every": 0}
        trainer = factory(scheme=MXFP4RLConfig(mode=mode, preset=preset), use_cpu=False, **options)
        trainer.model.train()
        trainer.state.max_steps = 4
        return trainer

    yield build
    torch._dynamo.reset()


def logits(trainer, compiled, step):
    """Of one token again and again at an optimizer step, as rollouts compute them."""
    config = copy.deepcopy(trainer.generation_config)
    config.do_sample, config.return_dict_in_generate, config.output_logits = False, True, True
    config.eos_token_id, config.max_new_tokens, config.disable_compile = None, 6, not compiled
    config.suppress_tokens = [token for token in range(32) if token != 9]  # near ties must not part the two runs
    trainer.state.global_step = step
    with torch.no_grad(), trainer._rollout_policy(), _static_caches(trainer.model):
        return torch.stack(trainer.model.generate(input_ids=IDS.cuda(), generation_config=config).logits)


@pytest.mark.parametrize(
    ("mode", "preset", "form"),
    [("qat", "w4a4", "packed"), ("qat", "w4a16", "auto"), ("qat", "w4a4", "dense"), ("packed", "w4a16", "auto")],
)
@pytest.mark.parametrize("bf16", [True, False])
def test_compiled_rollouts_follow_noise_and_weights(build, mode, preset, form, bf16):
    trainer = build(mode, preset, rollout_weights=form, bf16=bf16, compile_rollouts=True)
    seen = []
    for step in (0, 1, 2, 2):
        for _ in range(2):  # warm-up and recording of a CUDA graph, and another cache, at another address
            found, expected = (logits(trainer, compiled, step) for compiled in (True, False))
            torch.testing.assert_close(found, expected, rtol=0.06, atol=0.06)
        seen.append(found)
        if step == 2:
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    if parameter.requires_grad:
                        parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    differences = [(a - b).abs().max().item() for a, b in zip(seen, seen[1:], strict=False)]
    assert min(differences) > 0.1, differences
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize(("mode", "preset"), [("qat", "w4a4"), ("packed", "w4a16")])
def test_training_on_compiled_rollouts(build, mode, preset):
    trainer = build(mode, preset, compile_rollouts=True, bf16=True, gradient_checkpointing=True)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "aqn/n_modules" in entry]
    assert [entry["aqn/n_modules"] for entry in logs] == [0, 5, 5, 5]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize(("mode", "preset"), [("qat", "w4a4"), ("packed", "w4a16")])
@pytest.mark.parametrize("graphs", [True, False])
def test_continuous_batches_follow_noise(build, mode, preset, graphs):
    batching = {"num_blocks": 16, "max_batch_tokens": 64, "use_cuda_graph": graphs}
    options = {"bf16": False, "generation_kwargs": {"do_sample": False}}
    plain = build(mode, preset, **options)
    batched = build(
        mode,
        preset,
        use_transformers_continuous_batching=True,
        transformers_continuous_batching_config=batching,
        **options,
    )
    same = total = 0
    for step in (0, 1, 3):
        for trainer in (plain, batched):
            trainer.state.global_step = step
        expected, found = plain._generate(PROMPTS)[1], batched._generate(PROMPTS)[1]
        assert batched.noise.last_report == plain.noise.last_report
        same += sum(a[0] == b[0] for a, b in zip(expected, found, strict=True))
        total += len(expected)
    assert same >= total - 1  # first tokens; a near tie may part one of them
