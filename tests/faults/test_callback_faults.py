# SPDX-License-Identifier: Apache-2.0
"""A callback that raises, be it a user's or a tracker's: training stops with what was trained saved."""

import pytest
from grpo_runs import trainer_factory
from same_bits import assert_same, weights
from transformers import TrainerCallback


class Broken(TrainerCallback):
    """A callback that raises at one step."""

    def __init__(self, event, step):
        def handle(args, state, control, **kwargs):
            if state.global_step == step:
                raise KeyError("mistake")

        setattr(self, event, handle)


RUN = {"max_steps": 4, "num_iterations": 2, "error_every": 0, "movement_every": 0}
TIMES = {
    "step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos",
}  # fmt: skip


def lines(trainer):
    return [{key: value for key, value in e.items() if key not in TIMES} for e in trainer.state.log_history]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The end of a run of these options that nothing stops: weights, logs."""
    trainer = trainer_factory(tmp_path_factory.mktemp("whole"))(**RUN)
    trainer.train()
    return weights(trainer.model), lines(trainer)


@pytest.mark.parametrize(
    ("event", "lacks"), [("on_log", set()), ("on_step_end", {"loss", "grad_norm", "learning_rate"})]
)
def test_a_callback_that_fails_stops_training_with_everything_saved(undisturbed, tmp_path, event, lacks, capsys):
    run = trainer_factory(tmp_path)
    with pytest.raises(KeyError, match="mistake"):
        run(callbacks=[Broken(event, 2)], **RUN).train()
    saved = tmp_path / "run" / "checkpoint-2"
    assert f"training stopped at step 2 by KeyError: 'mistake'; saved as {saved}" in capsys.readouterr().err
    resumed = run(**RUN)
    resumed.train(resume_from_checkpoint=True)
    values, (first, second, *rest) = undisturbed
    assert resumed.state.global_step == 4
    assert_same(weights(resumed.model), values)
    assert lacks < set(second)
    second = {key: value for key, value in second.items() if key not in lacks}
    assert_same(sorted(lines(resumed)[1].items()), sorted(second.items()))
    assert_same(lines(resumed)[2:], rest)
