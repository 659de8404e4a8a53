# SPDX-License-Identifier: Apache-2.0
"""Groups with equal rewards are replaced by groups of other prompts."""

import os
from pathlib import Path

import numpy as np
import processes
import pytest
import torch
from datasets import Dataset
from grpo_runs import TOKENIZER, even_digits, logged, prompts
from moe_models import make_moe
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.rl.rollout.replay import BATCH_KEY
from hf_mxfp4.rl.rollout.rows import put_rows, take_rows
from hf_mxfp4.rl.rollout.sampling import equal_rewards, prompt_digest


ROOT = Path(__file__).resolve().parents[2]
#: A prompt whose number is odd earns the same whatever is said; "7+7=" does, too.
DATA = prompts(10)


def rewarded(prompts, completions, completion_ids, **kwargs):
    """Zero for hopeless prompts, else a number that differs between completions."""
    hopeless = [int(prompt.split("+")[0]) % 2 == 1 for prompt in prompts]
    return [0.0 if bad else 1.0 + i % 4 for i, bad in enumerate(hopeless)]


def rollout(trainer, numbers, step=0):
    trainer.model.train()
    trainer.state.global_step, trainer.state.max_steps = step, 4
    trainer.current_gradient_accumulation_steps = 1
    rows = [dict(DATA[number]) for number in numbers for _ in range(4)]
    return trainer._generate_and_score_completions(rows)


def texts(batch):
    return [
        TOKENIZER.decode(ids[mask.bool()]) for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
    ]


def recorded(trainer, name):
    return trainer._metrics["train"][f"dynamic_sampling/{name}"][-1]


# ---- one batch ------------------------------------------------------------------------------------------------------


def test_groups_with_equal_rewards_are_replaced(build):
    trainer = build(rewarded, dynamic_sampling=True, dynamic_sampling_max_rounds=20, dataset=DATA)
    batch = rollout(trainer, [2, 1, 3, 4])
    found = texts(batch)
    assert found[:4] == ["2+2="] * 4 and found[12:] == ["4+4="] * 4
    for group in (found[4:8], found[8:12]):
        assert len(set(group)) == 1 and int(group[0][0]) % 2 == 0
    for rows in batch["advantages"].view(4, 4):
        assert rows.tolist() == pytest.approx([-1.1618, -0.3873, 0.3873, 1.1618], abs=1e-3)
    assert recorded(trainer, "zero_variance_share") == 0.5 and recorded(trainer, "replaced_share") == 0.5
    assert 1 <= recorded(trainer, "rounds") < 20


def test_a_batch_without_such_groups_stays_as_it_is(build):
    trainer = build(rewarded, dynamic_sampling=True, dataset=DATA)
    rollouts = []
    original = trainer._generate
    trainer._generate = lambda prompts: rollouts.append(len(prompts)) or original(prompts)
    rollout(trainer, [2, 4])
    assert rollouts == [8]
    assert recorded(trainer, "rounds") == 0 and recorded(trainer, "replaced_share") == 0


def test_a_row_keeps_its_own_completion_probabilities_and_advantage(build):
    """Scored again by a plain forward pass, and the tokens counted for the loss are those of the final batch."""
    trainer = build(
        rewarded, dynamic_sampling=True, dynamic_sampling_max_rounds=20, num_iterations=2, aqn=False, beta=0.1,
        dataset=DATA,
    )  # fmt: skip
    batch = rollout(trainer, [1, 3, 2])
    assert recorded(trainer, "replaced_share") == pytest.approx(2 / 3)
    real = batch["completion_mask"].bool()
    assert batch["num_items_in_batch"] == real.sum()
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    with torch.no_grad():
        logits = trainer.model(input_ids=ids, attention_mask=mask).logits[:, batch["prompt_ids"].shape[1] - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)
    for name in ("old_per_token_logps", "sampling_per_token_logps", "ref_per_token_logps"):
        assert torch.allclose(batch[name][real], expected[real], atol=1e-4), name
    assert torch.isfinite(trainer.compute_loss(trainer.model, batch))


def test_off_by_default_but_measured(build):
    trainer = build(rewarded, dataset=DATA)
    batch = rollout(trainer, [2, 1])
    assert texts(batch)[4:] == ["1+1="] * 4
    assert recorded(trainer, "zero_variance_share") == 0.5
    assert "dynamic_sampling/rounds" not in trainer._metrics["train"]


def test_the_share_is_that_of_groups_also_where_trl_logs_that_of_the_batch(build):
    trainer = build(rewarded, dataset=DATA, scale_rewards="batch")
    rollout(trainer, [2, 1])
    assert trainer._metrics["train"]["frac_reward_zero_std"][-1] == 0.0
    assert recorded(trainer, "zero_variance_share") == 0.5


def test_logs_stay_those_of_the_prompts_that_were_drawn(build):
    logs = []
    for dynamic in (False, True):
        torch.manual_seed(0)
        trainer = build(rewarded, dynamic_sampling=dynamic, dataset=DATA)
        torch.manual_seed(1)
        rollout(trainer, [2, 1])
        metrics = {name: values for name, values in trainer._metrics["train"].items() if "dynamic" not in name}
        logs.append((metrics, list(trainer._logs["prompt"]), list(trainer._logs["advantages"])))
    tokens = [entry[0].pop("num_tokens")[0] for entry in logs]
    assert logs[0] == logs[1]
    assert tokens[1] > tokens[0]  # but what was sampled counts


def test_evaluation_is_untouched(build):
    trainer = build(rewarded, dynamic_sampling=True, dataset=DATA)
    trainer.model.eval()
    batch = trainer._generate_and_score_completions([dict(DATA[number]) for number in (1, 3) for _ in range(4)])
    assert texts(batch) == ["1+1="] * 4 + ["3+3="] * 4
    assert not any("dynamic" in name for mode in ("train", "eval") for name in trainer._metrics[mode])


# ---- training -------------------------------------------------------------------------------------------------------


def test_trap_b13_constant_rewards_train_on_and_lose_nothing(build, capsys):
    """QeRL's successor stopped when the filter left no group. Here the batch is kept, weights stay and steps go on."""
    trainer = build(
        lambda completions, **kwargs: [0.5] * len(completions),
        dynamic_sampling=True, dynamic_sampling_max_rounds=2, max_steps=3, aqn_num_stages=1,
    )  # fmt: skip
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    assert trainer.state.global_step == 3
    assert list(logged(trainer, "dynamic_sampling/rounds").values()) == [2, 2, 2]
    assert list(logged(trainer, "dynamic_sampling/zero_variance_share").values()) == [1, 1, 1]
    assert list(logged(trainer, "dynamic_sampling/replaced_share").values()) == [0, 0, 0]
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.named_parameters())
    assert capsys.readouterr().err.count("every group has equal rewards") == 1


OPTIONS = {
    "noise and correction": {"aqn_num_stages": 1},
    "several batches a step": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_iterations": 2},
    "LoRA": {"peft_config": LoraConfig(target_modules="all-linear", r=2), "beta": 0.1},
    "truncated": {"mask_truncated_completions": True},
    "router replay": {"router_replay": True, "aqn_num_stages": 1, "num_iterations": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_training_with(build, tmp_path, name):
    options = dict(OPTIONS[name])
    if "router_replay" in options:
        make_moe("qwen3_moe").save_pretrained(tmp_path / "moe")
        TOKENIZER.save_pretrained(tmp_path / "moe")
        options["policy"] = AutoModelForCausalLM.from_pretrained(
            tmp_path / "moe", quantization_config=MXFP4RLConfig(), dtype=torch.float32
        )
    # Prompts of several lengths, so that batches of several widths are put together.
    numbers = [int(f"{i}{'0' * (i % 3)}") for i in range(1, 9)]
    data = Dataset.from_list([{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in numbers])
    trainer = build(rewarded_by_length, dynamic_sampling=True, max_steps=2, dataset=data, **options)
    trainer.train()
    assert sum(logged(trainer, "dynamic_sampling/replaced_share").values()) > 0
    assert trainer.state.global_step == 2
    assert all(np.isfinite(norm) for norm in logged(trainer, "grad_norm").values())
    if "router_replay" in options:
        assert list(logged(trainer, "router_replay/coverage").values()) == [1.0] * 2


def rewarded_by_length(prompts, completions, **kwargs):
    """Nothing for the shorter prompts."""
    digits = even_digits(completions)
    return [0.01 * (i % 4) + digits[i] if len(prompt) == 8 else 0.0 for i, prompt in enumerate(prompts)]


def test_a_resumed_run_draws_the_same_prompts(build, tmp_path):
    options = {"dynamic_sampling": True, "max_steps": 3, "save_strategy": "steps", "save_steps": 2, "dataset": DATA}
    whole = build(rewarded, output_dir=str(tmp_path / "whole"), **options)
    whole.train()
    resumed = build(rewarded, output_dir=str(tmp_path / "resumed"), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for name, value in whole.model.named_parameters():
        assert torch.equal(value, resumed.model.get_parameter(name)), name
    assert logged(resumed, "dynamic_sampling/rounds") == logged(whole, "dynamic_sampling/rounds")


def test_prompts_are_a_function_of_seed_and_step(build, tmp_path):
    def drawn(step, **options):
        trainer = build(dynamic_sampling=True, dataset=prompts(50), **options)
        rows = trainer.sampler.other_prompts(set(), step)
        return [next(rows)["prompt"] for _ in range(60)]

    first = drawn(3)
    assert first == drawn(3) and first != drawn(4) and first != drawn(3, seed=1)
    assert len(set(first[:50])) == 50 and first[50:] == first[:10]  # none twice before all have been drawn


def test_prompts_of_the_batch_are_drawn_only_if_there_are_no_others(build):
    trainer = build(rewarded, dynamic_sampling=True, dynamic_sampling_max_rounds=20, dataset=DATA.select(range(5)))
    for step in range(3):
        assert texts(rollout(trainer, [2, 1, 4, 3], step))[4:8] == ["0+0="] * 4
        left_out = {prompt_digest(DATA[number]) for number in (2, 1, 4)}
        rows = trainer.sampler.other_prompts(left_out, step)
        assert {next(rows)["prompt"] for _ in range(6)} == {"0+0=", "3+3="}
        rows = trainer.sampler.other_prompts({prompt_digest(row) for row in DATA}, step)
        assert {next(rows)["prompt"] for _ in range(5)} == {f"{i}+{i}=" for i in range(5)}


def test_prompts_are_compared_and_answers_are_not():
    row = {"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}
    other = {"prompt": [{"role": "user", "content": "1+2="}], "answer": "2"}
    assert prompt_digest(row) == prompt_digest({**row, "answer": "3"}) != prompt_digest(other)
    assert prompt_digest({"seed": 1}) != prompt_digest({"seed": 2}) == prompt_digest({"seed": 2})


TWO_PROCESSES = """
import torch
import os
from pathlib import Path
from accelerate import PartialState
from accelerate.utils import gather_object
from grpo_runs import trainer_factory
from test_dynamic_sampling import DATA, rewarded, rollout, texts
state = PartialState(cpu=True)
trainer = trainer_factory(Path({folder!r}))(
    rewarded, dynamic_sampling=True, dynamic_sampling_max_rounds=20, dataset=DATA, aqn=False, max_steps=2,
    per_device_train_batch_size=6,
)
trainer.model.train()
trainer.state.max_steps = 4
# Three groups of four over two processes: the middle one spans both, and the first two are hopeless.
rows = [dict(DATA[number]) for number in (1, 3, 2) for _ in range(4)]
rank = state.process_index
batch = trainer._generate_and_score_completions(rows[rank * 6 : rank * 6 + 6])
found = texts(batch)
tokens = int(batch["completion_mask"].sum())
everything = gather_object([(rank, found, batch["advantages"].tolist(), tokens, int(batch["num_items_in_batch"]))])
rounds = gather_object([trainer._metrics["train"]["dynamic_sampling/rounds"]])
assert len(everything) == 2, everything
prompts = everything[0][1] + everything[1][1]
assert all(int(prompt[0]) % 2 == 0 for prompt in prompts), prompts
assert all(len(set(prompts[i : i + 4])) == 1 for i in (0, 4, 8)), prompts
assert prompts[8] == "2+2=" and "2+2=" not in prompts[:8], prompts
advantages = torch.tensor(everything[0][2] + everything[1][2]).view(3, 4)
assert (advantages.abs() > 0.1).all() and advantages.sum(1).abs().max() < 1e-3, advantages
assert everything[0][4] == everything[1][4] == everything[0][3] + everything[1][3], everything
assert rounds[0] == rounds[1], rounds
trainer.state.max_steps = 2
trainer.train()
assert trainer.state.global_step == 2
shares = [entry["sampling/kl"] for entry in trainer.state.log_history if "sampling/kl" in entry]
assert len(shares) == 2
print("agreed")
from recipes.common.terminal import leave_together
leave_together()
"""


@pytest.mark.large
def test_two_processes_replace_the_same_groups(build, tmp_path):
    build()  # leaves the model's files
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests" / "rl")}
    program = processes.code(TWO_PROCESSES.format(folder=str(tmp_path)))
    job = processes.run(program, ranks=2, environment=environment, timeout=180)
    assert job.returncode == 0 and job.stdout.count("agreed") == 2, job.stderr[-3000:]


# ---- parts ----------------------------------------------------------------------------------------------------------


def test_which_rewards_are_equal():
    nan = float("nan")
    groups = [
        [[1.0, 0.0], [0.0, 2.0]],
        [[1.0, 0.0], [1.0, 0.0]],
        [[nan, nan], [1.0, 1.0]],  # one completion that no function applies to
        [[nan, nan], [nan, nan]],
        [[nan, 1.0], [3.0, nan]],
    ]
    rewards = torch.tensor(groups).flatten(0, 1)
    found = equal_rewards(rewards, torch.tensor([1.0, 0.5]), 2)
    assert found.tolist() == [True, True, True, True, False]
    assert equal_rewards(rewards, torch.tensor([1.0, 1.0]), 2).tolist() == [False, True, True, True, False]


def small_batch(prompt, completion, rows=2, **extra):
    numbers = torch.arange(rows * (prompt + completion)).view(rows, -1) + 10
    return {
        "prompt_ids": numbers[:, :prompt],
        "prompt_mask": torch.ones(rows, prompt, dtype=torch.long),
        "completion_ids": numbers[:, prompt:],
        "completion_mask": torch.ones(rows, completion, dtype=torch.long),
        "sampling_per_token_logps": numbers[:, prompt:] / -10.0,
        BATCH_KEY: numbers[:, :, None, None].expand(-1, -1, 3, 2).to(torch.int16),
        "advantages": torch.arange(rows) + 0.5,
        "num_items_in_batch": torch.tensor(rows * completion),
        **extra,
    }


@pytest.mark.parametrize("widths", [(2, 3), (4, 1), (1, 5), (3, 2)], ids=str)
def test_rows_move_between_batches_of_any_width(widths):
    batch, other = small_batch(3, 2), small_batch(*widths)
    result = put_rows(batch, {1: take_rows(other, [0])[0]}, 0, {"advantages"})
    prompt, completion = max(3, widths[0]), max(2, widths[1])
    assert result["prompt_ids"].shape == (2, prompt) and result["completion_ids"].shape == (2, completion)
    for index, (source, row) in enumerate(((batch, 0), (other, 0))):
        ids, mask = result["prompt_ids"][index], result["prompt_mask"][index].bool()
        assert ids[mask].tolist() == source["prompt_ids"][row].tolist() and (ids[~mask] == 0).all()
        assert mask[-1]  # padded on the left
        ids, mask = result["completion_ids"][index], result["completion_mask"][index].bool()
        assert ids[mask].tolist() == source["completion_ids"][row].tolist() and mask[0]
        logs = result["sampling_per_token_logps"][index]
        assert torch.equal(logs[mask], source["sampling_per_token_logps"][row]) and (logs[~mask] == 0).all()
        choices = result[BATCH_KEY][index]
        both = torch.cat([result["prompt_mask"][index], result["completion_mask"][index]]).bool()
        assert torch.equal(choices[both], source[BATCH_KEY][row]) and (choices[~both] == -1).all()
        assert result["advantages"][index] == source["advantages"][row]


def test_numbers_by_sequence_are_not_padded():
    batch = small_batch(3, 2, importance_sampling_ratio=torch.tensor([[2.0], [3.0]]))
    other = small_batch(3, 1, importance_sampling_ratio=torch.tensor([[5.0], [7.0]]))
    result = put_rows(batch, {0: take_rows(other, [1])[0]}, 0, {"advantages", "importance_sampling_ratio"})
    assert result["importance_sampling_ratio"].tolist() == [[7.0], [3.0]]


def test_images_are_refused():
    with pytest.raises(ValueError, match="rollouts with pixel_values cannot be taken apart"):
        take_rows(small_batch(3, 2, pixel_values=torch.zeros(2, 3)), [0])


def test_streamed_datasets_are_refused(build):
    with pytest.raises(ValueError, match="dynamic_sampling=True draws prompts from anywhere"):
        build(dynamic_sampling=True, dataset=prompts(8).to_iterable_dataset())
