# SPDX-License-Identifier: Apache-2.0
"""What `MXFP4GRPOConfig` refuses, what it accepts, and where options come from; the overlong punishment."""

import math

import pytest
import torch
from grpo_runs import even_digits, prompts
from trl import TrlParser

from hf_mxfp4 import MXFP4GRPOConfig, MXFP4GRPOTrainer


#: Options, and what the error says; of most, the name of the first.
REFUSED = [
    ({"error_every": -1}, "error_every"),
    ({"report_every": -1}, "report_every=-1 must not be negative"),
    ({"movement_every": -1}, "movement_every=-1 must not be negative"),
    # Noise.
    ({"aqn_num_stages": 0}, "aqn_num_stages"),
    ({"aqn_sigma_start": 1e-4}, "aqn_sigma_start"),
    ({"aqn_sigma_start": math.inf}, "aqn_sigma_start"),
    ({"aqn_sigma_start": math.nan}, "aqn_sigma_start"),
    ({"aqn_sigma_end": 0.0}, "aqn_sigma_end"),
    # Rollouts.
    ({"step_weights": "sparse"}, "step_weights"),
    ({"step_weights": "dense", "cache_rollout_weights": False}, "use step_weights='none' with it"),
    ({"vllm_weights": "4bit", "use_vllm": True, "vllm_mode": "colocate"}, "choose one of packed, dense, checkpoint"),
    ({"vllm_weights": "dense"}, "vllm_weights='dense' has no effect without use_vllm=True"),
    ({"vllm_weights": "dense", "use_vllm": True, "vllm_mode": "server"}, "a server is told when it is started"),
    ({"router_replay": True, "use_vllm": True, "vllm_mode": "server"}, "TRL drops them from what a server answers"),
    ({"router_replay": True, "use_vllm": True, "vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size=1"),
    ({"use_transformers_continuous_batching": True}, "is not supported for quantized policies: use_vllm=True"),
    # Their correction.
    ({"rollout_correction_cap": 0.0}, "rollout_correction_cap"),
    ({"rollout_correction_mode": "tokens"}, "rollout_correction_mode"),
    ({"rollout_correction_mode": "sequence_mask", "loss_type": "vespo"}, "rollout_correction_mode"),
    ({"rollout_rejection": "k4", "rollout_rejection_limit": 1.0}, "'k4' is not known; choose one of geometric, k3"),
    (
        {"rollout_rejection": "geometric", "rollout_rejection_limit": 0.5},
        "rollout_rejection_limit=0.5 must be above 1.0",
    ),
    ({"rollout_rejection": "k3"}, "rollout_rejection_limit=None must be above 0.0"),
    ({"rollout_rejection_limit": 2.0}, "has no effect without rollout_rejection"),
    # The same under TRL's names, for vLLM.
    ({"use_vllm": True, "vllm_importance_sampling_correction": False}, "set rollout_correction alone"),
    ({"use_vllm": True, "vllm_importance_sampling_mode": "sequence_mask"}, "set rollout_correction_mode alone"),
    ({"use_vllm": True, "vllm_importance_sampling_clip_max": 5.0}, "set rollout_correction_cap alone"),
    ({"use_vllm": True, "vllm_importance_sampling_cap": 5.0}, "set rollout_correction_cap alone"),
    # The punishment of long completions.
    ({"overlong_buffer": -1}, "overlong_buffer"),
    ({"overlong_penalty": 0.0}, "overlong_penalty"),
    (
        {"overlong_buffer": 8, "multi_objective_aggregation": "normalize_then_sum"},
        "overlong_buffer adds a reward function.*use 'sum_then_normalize'",
    ),
]
ACCEPTED = [
    {"cache_rollout_weights": False},
    {"rollout_correction_mode": "token_mask", "loss_type": "vespo"},
    {"multi_objective_aggregation": "normalize_then_sum"},
    {"use_vllm": True, "rollout_correction_cap": 5.0, "vllm_importance_sampling_clip_max": 5.0},
]


def config(tmp_path, **options):
    return MXFP4GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)


@pytest.mark.filterwarnings("ignore:The `vllm_importance_sampling_cap`:FutureWarning")
@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_meaningless_options_are_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **options)


@pytest.mark.parametrize("options", ACCEPTED, ids=str)
def test_options_that_mean_something_are_accepted(options, tmp_path):
    config(tmp_path, **options)


def test_rollout_correction_is_trls_under_vllm(tmp_path):
    options = {"rollout_correction_mode": "sequence_mask", "rollout_correction_cap": 5.0}
    found = config(tmp_path, use_vllm=True, **options)
    again = type(found)(**{name: getattr(found, name) for name in found.__dataclass_fields__ if name[0] == "v"},
                        output_dir=str(tmp_path), use_cpu=True, bf16=False, use_vllm=True, **options)  # fmt: skip
    for each in (found, again):
        names = ("correction", "mode", "clip_max", "clip_min")
        shared = [getattr(each, f"vllm_importance_sampling_{name}") for name in names]
        assert shared == [True, "sequence_mask", 5.0, None]
    assert config(tmp_path, use_vllm=True, rollout_correction=False).vllm_importance_sampling_correction is False


def test_every_option_can_come_from_yaml_and_command_line(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("use_cpu: true\nbf16: false\naqn_sigma_start: 2.0e-2\naqn: false\nvllm_mode: server\n")
    arguments = ["--config", str(path), "--output_dir", str(tmp_path), "--aqn_num_stages", "3", "--use_vllm", "false"]
    (found,) = TrlParser((MXFP4GRPOConfig,)).parse_args_and_config(arguments)
    assert (found.aqn_sigma_start, found.aqn, found.aqn_num_stages) == (2e-2, False, 3)
    assert (found.vllm_mode, found.use_vllm) == ("server", False)


def test_misspelt_options_name_the_nearest(tmp_path):
    for name, nearest in {"aqn_sigma_strat": "aqn_sigma_start", "learning_rte": "learning_rate"}.items():
        with pytest.raises(TypeError, match=f"^MXFP4GRPOConfig has no option '{name}'; did you mean .*'{nearest}'"):
            config(tmp_path, **{name: 1})


def noise(trainer):
    return trainer.noise is not None and trainer.args.noise_schedule.sigma(5, 10)


def weighted_advantages(trainer):
    """What the correction makes of two sequences, one of them far from what sampled it."""
    log_probs = torch.tensor([[-1.0, -1.0], [-0.2, -1.0]])
    inputs = {"advantages": torch.tensor([1.0, -1.0]), "completion_mask": torch.ones(2, 2)}
    inputs |= {"old_per_token_logps": log_probs, "sampling_per_token_logps": torch.tensor([[-1.1, -1.0], [-3.0, -1.0]])}
    with trainer.correction.weighting(inputs, step=1) as weighted:
        return weighted["advantages"].tolist()


#: Of each option of ours: a value that is not the default, what it needs besides, and where it shows.
EFFECTS = {
    "aqn": (False, {}, noise),
    "aqn_sigma_start": (2e-2, {}, noise),
    "aqn_sigma_end": (1e-4, {}, noise),
    "aqn_num_stages": (3, {}, noise),
    "rollout_correction": (False, {}, weighted_advantages),
    "rollout_correction_mode": ("sequence_mask", {}, weighted_advantages),
    "rollout_correction_cap": (3.0, {}, weighted_advantages),
    "rollout_rejection": ("k3", {"rollout_rejection_limit": 1.5}, weighted_advantages),
    "rollout_rejection_limit": (1.5, {"rollout_rejection": "k3"}, weighted_advantages),
    "overlong_buffer": (2, {}, lambda trainer: trainer.reward_func_names),
    "overlong_penalty": (0.5, {"overlong_buffer": 2}, lambda trainer: trainer.reward_weights.tolist()),
    "cache_rollout_weights": (False, {}, lambda trainer: trainer.quantization.form),
    "step_weights": ("packed", {}, lambda trainer: trainer.quantization.form),
    "error_every": (2, {}, lambda trainer: trainer.error_callback.every),
    "movement_every": (2, {}, lambda trainer: trainer.movement_callback.every),
    "report_every": (0, {}, lambda trainer: trainer.run_log),
}
#: Those that are refused on a dense policy without vLLM, or change only what is refused.
OTHERS = {
    "vllm_weights",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "router_replay",
    "allow_full_precision",
}


def test_every_option_has_an_effect_or_is_refused(build):
    own = set(MXFP4GRPOConfig.__annotations__)
    assert own == {*EFFECTS, *OTHERS}
    usual = {"error_every": 50, "movement_every": 50, "report_every": 100}
    default = build(**usual)
    for name, (value, needed, observe) in EFFECTS.items():
        changed = build(**{**usual, **needed, name: value})
        assert observe(changed) != observe(default), name


def constant(completions, **kwargs):
    return [1.0] * len(completions)


def test_it_is_weighted_beside_the_others(build):
    trainer = build([even_digits, constant], reward_weights=[2.0, 0.5], overlong_buffer=2, overlong_penalty=0.3)
    assert trainer.reward_weights.tolist() == pytest.approx([2.0, 0.5, 0.3])
    assert trainer.reward_func_names == ["even_digits", "constant", "soft_overlong_punishment_reward"]
    assert trainer.args.reward_weights == [2.0, 0.5]  # the caller's config stays as it is


def test_training_logs_it_and_the_reward_contains_it(build):
    trainer = build(constant, overlong_buffer=3, overlong_penalty=0.5, max_steps=3)
    trainer.train()
    entries = trainer.state.log_history[:-1]
    # Lengths differ where answers do not.
    assert len(entries) == 3 and min(entry["frac_reward_zero_std"] for entry in entries) < 1
    for entry in entries:
        punished = entry["rewards/soft_overlong_punishment_reward/mean"]
        assert -1 <= punished < 0
        assert entry["reward"] == pytest.approx(1 + 0.5 * punished, abs=1e-5)


def test_a_buffer_longer_than_a_completion_is_refused(tmp_path):
    message = "overlong_buffer=5 is more than max_completion_length=4"
    with pytest.raises(ValueError, match=message):
        config(tmp_path, overlong_buffer=5, max_completion_length=4)
    # A length that is only known later.
    late = config(tmp_path, overlong_buffer=5, max_completion_length=None)
    late.check_overlong_buffer()
    late.max_completion_length = 4
    with pytest.raises(ValueError, match=message):
        late.check_overlong_buffer()
    # Before anything is loaded.
    with pytest.raises(ValueError, match=message):
        MXFP4GRPOTrainer("no/such-model", even_digits, late, prompts())


def test_a_buffer_of_completions_without_an_end_is_refused(build):
    with pytest.raises(ValueError, match="overlong_buffer=5 needs max_completion_length"):
        build(overlong_buffer=5, max_completion_length=None)
