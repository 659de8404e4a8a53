# SPDX-License-Identifier: Apache-2.0
"""What `MXFP4GRPOConfig` refuses, what it accepts, and where options come from."""

import math
from dataclasses import fields

import pytest
import torch
from trl import GRPOConfig, TrlParser

from hf_mxfp4 import MXFP4GRPOConfig


BATCHED = {"use_transformers_continuous_batching": True}
#: Options, and what the error says; of most, the name of the first.
REFUSED = [
    ({"error_every": -1}, "error_every"),
    ({"report_every": -1}, "report_every=-1"),
    # Noise.
    ({"aqn_num_stages": 0}, "aqn_num_stages"),
    ({"aqn_sigma_start": 1e-4}, "aqn_sigma_start"),
    ({"aqn_sigma_start": math.inf}, "aqn_sigma_start"),
    ({"aqn_sigma_start": math.nan}, "aqn_sigma_start"),
    ({"aqn_sigma_end": 0.0}, "aqn_sigma_end"),
    # Rollouts.
    ({"step_weights": "sparse"}, "step_weights"),
    ({"vllm_weights": "4bit", "use_vllm": True, "vllm_mode": "colocate"}, "choose one of packed, dense, checkpoint"),
    ({"vllm_weights": "dense"}, "vllm_weights='dense' has no effect without use_vllm=True"),
    ({"vllm_weights": "dense", "use_vllm": True, "vllm_mode": "server"}, "a server is told when it is started"),
    ({"router_replay": True, "use_vllm": True, "vllm_mode": "server"}, "TRL drops them from what a server answers"),
    ({"router_replay": True, "use_vllm": True, "vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size=1"),
    ({**BATCHED, "use_vllm": True}, "no effect with use_vllm=True"),
    ({**BATCHED, "router_replay": True}, "tokens of many sequences as one"),
    ({**BATCHED, "transformers_continuous_batching_config": {"seed": 1}}, "set seed of MXFP4GRPOConfig"),
    # Their correction.
    ({"rollout_correction_cap": 0.0}, "rollout_correction_cap"),
    ({"rollout_correction": "tokens"}, "choose one of token_truncate"),
    ({"rollout_correction": None}, "rollout_correction=None is not known"),
    ({"rollout_correction": "sequence_mask", "loss_type": "vespo"}, "loss_type='vespo'"),
    # The same under TRL's names, for vLLM.
    ({"use_vllm": True, "vllm_importance_sampling_correction": False}, "set rollout_correction alone"),
    ({"use_vllm": True, "vllm_importance_sampling_mode": "sequence_mask"}, "set rollout_correction alone"),
    ({"use_vllm": True, "vllm_importance_sampling_clip_max": 5.0}, "set rollout_correction_cap alone"),
    ({"use_vllm": True, "vllm_importance_sampling_cap": 5.0}, "set rollout_correction_cap alone"),
]
ACCEPTED = [
    {"rollout_correction": "token_mask", "loss_type": "vespo"},
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
    options = {"rollout_correction": "sequence_mask", "rollout_correction_cap": 5.0}
    args = config(tmp_path, use_vllm=True, **options)
    of_trl = {name: value for name, value in vars(args).items() if name.startswith("vllm_importance_sampling_")}
    assert of_trl == {
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 5.0,
        "vllm_importance_sampling_clip_min": None,
        "vllm_importance_sampling_cap": None,
    }
    config(tmp_path, use_vllm=True, **options, **of_trl)  # as a config that is made again
    assert config(tmp_path, use_vllm=True, rollout_correction="none").vllm_importance_sampling_correction is False


@pytest.mark.parametrize(
    ("given", "expected"),
    [(True, "token_truncate"), (False, "none"), ("True", "token_truncate"), ("false", "none")],
    ids=str,
)
def test_rollout_correction_is_read_as_a_boolean_too(given, expected, tmp_path):
    assert config(tmp_path, rollout_correction=given).rollout_correction == expected


def test_noise_is_off_by_default_and_a_schedule_without_it_is_warned_of(tmp_path, caplog):
    assert config(tmp_path).aqn is False
    assert "no effect" not in caplog.text
    config(tmp_path, aqn_sigma_start=2e-2)
    assert "NoiseSchedule(start=0.02, end=0.001, stages=10) has no effect without aqn=True" in caplog.text


def test_every_option_can_come_from_yaml_and_command_line(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("use_cpu: true\nbf16: false\naqn_sigma_start: 2.0e-2\naqn: false\nvllm_mode: server\n")
    arguments = ["--config", str(path), "--output_dir", str(tmp_path), "--aqn_num_stages", "3", "--use_vllm", "false"]
    (args,) = TrlParser((MXFP4GRPOConfig,)).parse_args_and_config(arguments)
    assert args.aqn_sigma_start == 2e-2
    assert args.aqn is False
    assert args.aqn_num_stages == 3
    assert args.vllm_mode == "server"
    assert args.use_vllm is False


def noise(trainer):
    return trainer.noise is not None and trainer.args.noise_schedule.sigma(5, 10)


def weighted_advantages(trainer):
    """What the correction makes of two sequences, one of them far from what sampled it."""
    log_probs = torch.tensor([[-1.0, -1.0], [-0.2, -1.0]])
    inputs = {"advantages": torch.tensor([1.0, -1.0]), "completion_mask": torch.ones(2, 2)}
    inputs |= {"old_per_token_logps": log_probs, "sampling_per_token_logps": torch.tensor([[-1.1, -1.0], [-3.0, -1.0]])}
    with trainer.correction.weighting(inputs, step=1) as weighted:
        return weighted["advantages"].tolist()


#: Of each option of ours: a value that is not the default, and where it shows.
EFFECTS = {
    "aqn": (False, noise),
    "aqn_sigma_start": (2e-2, noise),
    "aqn_sigma_end": (1e-4, noise),
    "aqn_num_stages": (3, noise),
    "rollout_correction": ("sequence_mask", weighted_advantages),
    "rollout_correction_cap": (3.0, weighted_advantages),
    "step_weights": ("packed", lambda trainer: trainer.quantization.form),
    "error_every": (2, lambda trainer: (trainer.error_callback.every, trainer.movement_callback.every)),
    "report_every": (0, lambda trainer: trainer.run_log),
}
#: Those that are refused on a dense policy without vLLM, or change only what is refused.
OTHERS = {"vllm_weights", "router_replay", "allow_full_precision"}
#: TRL's options that are declared again, since ours set them.
TRLS = {"vllm_importance_sampling_correction", "vllm_importance_sampling_mode"}


def test_every_option_has_an_effect_or_is_refused(build):
    own = {field.name for field in fields(MXFP4GRPOConfig)} - {field.name for field in fields(GRPOConfig)}
    assert own == {*EFFECTS, *OTHERS}
    assert len(own) <= 12
    assert {*MXFP4GRPOConfig.__annotations__} == own | TRLS
    usual = {"error_every": 50, "report_every": 100}
    default = build(**usual)
    for name, (value, observe) in EFFECTS.items():
        changed = build(**{**usual, name: value})
        assert observe(changed) != observe(default), name
