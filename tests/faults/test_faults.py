# SPDX-License-Identifier: Apache-2.0
"""Signals, rewards and callbacks that raise, a full disk: what was trained is saved, and goes on to the same bits."""

import itertools
import json
import os
import resource
import signal

import pytest
import torch
from grpo_runs import even_digits, everything, prompts, trainer_factory
from same_bits import assert_same, weights
from transformers import TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from hf_mxfp4.checkpoint import last_complete_checkpoint, why_incomplete
from hf_mxfp4.rl import RewardError
from hf_mxfp4.rl.exit_checkpoint import keep_random_states


#: Two rollouts for four optimizer steps each, so that a checkpoint falls between steps of one rollout too.
RUN = {"max_steps": 6, "num_iterations": 2, "lr_scheduler_type": "linear"}


@pytest.fixture(autouse=True)
def signals_as_python_starts_with():
    """What runs in the background of a shell ignores Ctrl-C, and so would these tests."""
    usual = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    return trainer_factory(tmp_path_factory.mktemp("interrupts"))


def end_of(build, folder, resume=None, **options):
    """Everything at the end of a run that nothing interrupts, or not again."""
    trainer = build(output_dir=str(folder), **options)
    trainer.train(resume_from_checkpoint=resume)
    return everything(trainer)


def checkpoints(folder):
    return [path.name for path in folder.glob("checkpoint-*")]


@pytest.fixture(scope="module")
def whole(build, tmp_path_factory):
    return end_of(build, tmp_path_factory.mktemp("whole"), **RUN)


def at_step(step, act):
    """A reward function that acts in the rollout after this optimizer step."""

    def reward(completions, trainer_state, **kwargs):
        if trainer_state.global_step == step:
            act()
        return even_digits(completions)

    reward.__name__ = even_digits.__name__  # which is logged
    return reward


def send(number):
    os.kill(os.getpid(), number)


def fail():
    raise KeyError("answer")


class Acting(TrainerCallback):
    """Acts in an event at a step."""

    def __init__(self, event, step, act):
        def handle(args, state, control, **kwargs):
            if state.global_step == step:
                act()

        setattr(self, event, handle)


FAULTS = {
    "SIGTERM": (lambda: send(signal.SIGTERM), SystemExit, "Terminated: SIGTERM"),
    "reward raises": (fail, RewardError, "RewardError: reward function 'even_digits' raised KeyError: 'answer'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_last_finished_step_is_saved_and_goes_on_to_the_same_bits(build, whole, fault, tmp_path, capsys):
    act, kind, words = FAULTS[fault]
    trainer = build(at_step(4, act), output_dir=str(tmp_path), **RUN)
    with pytest.raises(kind) as caught:
        trainer.train()
    assert kind is not SystemExit or caught.value.code == 143
    assert f"training stopped at step 4 by {words}" in capsys.readouterr().err
    assert checkpoints(tmp_path) == ["checkpoint-4"]
    assert_same(end_of(build, tmp_path, resume=True, **RUN), whole)


def test_what_half_a_step_has_logged_is_not_saved(build, tmp_path):
    """It stops between the two micro-batches of its third step, which resuming takes from the start."""
    options = {"max_steps": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    whole = end_of(build, tmp_path / "whole", **options)
    trainer = build(output_dir=str(tmp_path / "parts"), **options)
    computed = []
    original = trainer._compute_loss

    def interrupted(*args):
        if len(computed) == 2 * 2 + 1:
            send(signal.SIGTERM)
        computed.append(original(*args))
        return computed[-1]

    trainer._compute_loss = interrupted
    with pytest.raises(SystemExit):
        trainer.train()
    assert checkpoints(tmp_path / "parts") == ["checkpoint-2"]
    assert_same(end_of(build, tmp_path / "parts", resume=True, **options), whole)


@pytest.mark.parametrize("step", [0, 1])
def test_a_step_that_was_cut_short_is_forgotten_by_the_next_training_of_the_process(build, tmp_path, step):
    options = {"max_steps": 3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    options |= {"use_adaptive_entropy": True, "entropy_coef": 0.01}
    whole = end_of(build, tmp_path / "whole", **options)
    trainer = build(output_dir=str(tmp_path / "parts"), **options)
    begin = keep_random_states()
    original = trainer._compute_loss
    batches = itertools.count()

    def interrupted(*args):
        if next(batches) == 2 * step + 1:
            raise KeyboardInterrupt
        return original(*args)

    trainer._compute_loss = interrupted
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    begin()
    trainer.train(resume_from_checkpoint=step > 0)
    assert_same(everything(trainer), whole)


def test_a_stop_in_an_evaluation_goes_on_to_the_same_bits(build, tmp_path):
    """That of this step is not repeated."""
    options = {"max_steps": 3, "eval_dataset": prompts(2), "eval_strategy": "steps", "eval_steps": 2}
    options |= {"per_device_eval_batch_size": 4, "error_every": 0}
    whole = end_of(build, tmp_path / "whole", **options)

    stop = at_step(2, lambda: trainer.model.training or send(signal.SIGTERM))
    trainer = build(stop, output_dir=str(tmp_path / "parts"), **options)
    with pytest.raises(SystemExit):
        trainer.train()
    ends = [whole, end_of(build, tmp_path / "parts", resume=True, **options)]
    evaluated = [[entry["step"] for entry in end["logs"] if "eval_loss" in entry] for end in ends]
    assert evaluated == [[2, 3], [3]]
    for end in ends:
        end["logs"] = [entry for entry in end["logs"] if "eval_loss" not in entry]
    assert_same(*ends)


@pytest.mark.parametrize(
    "step", [pytest.param(2, marks=pytest.mark.large), 4], ids=["within an epoch", "between epochs"]
)
def test_a_resumed_run_that_stops_in_its_first_step_goes_on_in_another_folder(build, step, tmp_path):
    """What it saves there is the checkpoint that it was resumed from."""
    options = {"max_steps": 5, "save_strategy": "steps", "save_steps": step}
    whole = end_of(build, tmp_path / "whole", **options)
    source = tmp_path / "whole" / f"checkpoint-{step}"
    trainer = build(at_step(step, lambda: send(signal.SIGTERM)), output_dir=str(tmp_path / "parts"), **options)
    with pytest.raises(SystemExit):
        trainer.train(resume_from_checkpoint=str(source))
    assert checkpoints(tmp_path / "parts") == [source.name]
    assert_same(end_of(build, tmp_path / "parts", resume=True, **options), whole)


@pytest.mark.parametrize(("number", "step"), [(signal.SIGTERM, 2), (signal.SIGINT, 5)], ids=["SIGTERM", "Ctrl-C"])
def test_an_update_is_finished_first(build, whole, step, number, tmp_path, monkeypatch):
    """Weights of which some are updated belong to no step. Step 5 is the last one: the run ends with it, and stops."""
    original = torch.optim.AdamW.step
    trainer = build(output_dir=str(tmp_path), **RUN)

    def interrupted(self, *args, **kwargs):
        if trainer.state.global_step == step:
            send(number)
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises((SystemExit, KeyboardInterrupt)):
        patch.setattr(torch.optim.AdamW, "step", interrupted)
        trainer.train()
    assert checkpoints(tmp_path) == [f"checkpoint-{step + 1}"]
    resumed = end_of(build, tmp_path, resume=True, **RUN)
    for part in ("weights", "optimizer", "schedule"):
        assert_same(resumed[part], whole[part])
    assert_same(*([line for line in end["logs"] if "loss" in line] for end in (resumed, whole)))


def test_a_line_of_the_log_is_written_to_its_end(build, whole, tmp_path):
    trainer = build(output_dir=str(tmp_path), **RUN, report_every=100)
    trainer.callback_handler.callbacks.insert(0, Acting("on_log", 2, lambda: send(signal.SIGTERM)))
    with pytest.raises(SystemExit):
        trainer.train()
    log = [json.loads(line) for line in (tmp_path / "run_log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log if line["kind"] == "log"] == [1, 2]
    assert_same(end_of(build, tmp_path, resume=True, **RUN), whole)


def test_handlers_of_others_are_left_alone(build, tmp_path):
    """Such as those of transformers' `enable_jit_checkpoint`, and of launchers."""
    caught = []
    signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))
    trainer = build(at_step(0, lambda: send(signal.SIGTERM)), output_dir=str(tmp_path), max_steps=1)
    trainer.train()
    assert caught == [signal.SIGTERM]
    assert trainer.state.global_step == 1


def test_a_checkpoint_that_a_callback_saves_within_a_step_is_of_the_step_before(build, tmp_path):
    options = {"max_steps": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    whole = end_of(build, tmp_path / "whole", **options)
    trainer = build(output_dir=str(tmp_path / "parts"), **options)
    trainer.add_callback(Acting("on_substep_end", 2, lambda: trainer._save_checkpoint(trainer.model, trial=None)))
    trainer.train()
    assert_same(everything(trainer), whole)
    assert_same(end_of(build, tmp_path / "parts", resume=True, **options), whole)


def test_a_just_in_time_checkpoint_goes_on_to_the_same_bits(build, whole, tmp_path):
    """That of transformers is saved before an update, which is made in spite of it."""
    trainer = build(output_dir=str(tmp_path), enable_jit_checkpoint=True, **RUN)
    (manager,) = [c.jit_manager for c in trainer.callback_handler.callbacks if isinstance(c, JITCheckpointCallback)]
    trainer.reward_funcs[0] = at_step(2, manager._enable_checkpoint)  # what a signal does after some seconds
    trainer.train()
    assert trainer.state.global_step == 3
    assert checkpoints(tmp_path) == ["checkpoint-2"]
    assert_same(end_of(build, tmp_path, resume=True, **RUN), whole)


def test_a_second_signal_does_not_wait_for_the_update(build, tmp_path, monkeypatch, capsys):
    original = torch.optim.AdamW.step
    trainer = build(output_dir=str(tmp_path), **RUN)

    def stuck(self, *args, **kwargs):
        if trainer.state.global_step == 2:
            send(signal.SIGTERM)
            send(signal.SIGTERM)
            pytest.fail("the second signal was ignored")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", stuck)
    with pytest.raises(SystemExit):
        trainer.train()
    assert "the weights are half-updated" in capsys.readouterr().err
    assert checkpoints(tmp_path) == []


@pytest.mark.parametrize("event", ["on_log", "on_step_end"])
def test_a_callback_that_fails_stops_training_with_everything_saved(build, whole, tmp_path, event, capsys):
    def mistake():
        raise KeyError("mistake")

    with pytest.raises(KeyError, match="mistake"):
        build(callbacks=[Acting(event, 2, mistake)], output_dir=str(tmp_path), **RUN).train()
    saved = tmp_path / "checkpoint-2"
    assert f"training stopped at step 2 by KeyError: 'mistake'; saved as {saved}" in capsys.readouterr().err
    assert_same(end_of(build, tmp_path, resume=True, **RUN), whole)


#: A checkpoint at each step, in the middle of rollouts too.
SAVING = {"max_steps": 5, "save_strategy": "steps", "save_steps": 1, "num_iterations": 2}


class LimitFrom(TrainerCallback):
    """From an optimizer step on no file may be larger than the limit, in bytes: writing fails in the middle of one."""

    def __init__(self, step, limit):
        self.step = step
        self.limit = limit

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture
def limits():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def fitting(build, tmp_path_factory):
    """The folder of a run on a disk of any size, and its weights."""
    folder = tmp_path_factory.mktemp("fitting")
    trainer = build(output_dir=str(folder), **SAVING)
    trainer.train()
    return folder, weights(trainer.model)


@pytest.mark.parametrize("file", ["model.safetensors", pytest.param("optimizer.pt", marks=pytest.mark.large)])
def test_a_checkpoint_that_does_not_fit_leaves_the_one_before_usable(build, tmp_path, file, fitting, limits, capsys):
    folder, expected = fitting
    size = (folder / "checkpoint-1" / file).stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    trainer = build(output_dir=str(tmp_path / "run"), callbacks=[LimitFrom(2, size - 1000)], **SAVING)
    with pytest.raises(Exception, match="File too large|iostream error"):
        trainer.train()
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err
    newest = tmp_path / "run" / "checkpoint-2"
    assert "training stopped at step 3 by" in said
    assert "saving failed too" in said
    assert f"the newest whole checkpoint is {newest}, resume with resume_from_checkpoint" in said
    assert why_incomplete(tmp_path / "run" / "checkpoint-3") is not None
    assert last_complete_checkpoint(tmp_path / "run") == str(newest)
    resumed = build(output_dir=str(tmp_path / "run"), **SAVING)
    resumed.train(resume_from_checkpoint=True)
    assert_same(weights(resumed.model), expected)
