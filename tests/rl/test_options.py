# SPDX-License-Identifier: Apache-2.0
"""What `MXFP4GRPOConfig` refuses, what it accepts, and where options come from."""

import inspect

import pytest
from trl import TrlParser

from hf_mxfp4 import MXFP4GRPOConfig
from hf_mxfp4.rl.rollout.correction_options import limits_in_force, share_with_trl


#: Options, and what the error says; of most, the name of the first.
REFUSED = [
    ({"entropy_collapse": -0.1}, "entropy_collapse"),
    # Cadences.
    ({"error_every": -1}, "error_every"),
    ({"gradient_gain_every": 50}, "gradient_gain_every=50 was removed: gradients are no longer compared"),
    ({"report_every": -1}, "report_every=-1 must not be negative"),
    ({"router_every": -1}, "router_every=-1 must not be negative"),
    ({"movement_every": -1}, "movement_every=-1 must not be negative"),
    # Noise.
    ({"aqn_num_stages": 0}, "aqn_num_stages"),
    ({"aqn_sigma_start": 1e-4}, "aqn_sigma_start"),
    ({"aqn_sigma_end": 1e-4, "aqn_schedule": "constant"}, "aqn_sigma_end"),
    ({"aqn_targets": "both"}, "aqn_targets='both' was removed: noise is on norms alone; leave the option out"),
    ({"aqn_schedule": "stepwise"}, "aqn_schedule"),
    ({"aqn_linear_sigma_scale": 2.0}, "aqn_linear_sigma_scale=2.0 was removed"),
    ({"aqn_layers": ["re:("]}, "aqn_layers"),
    ({"aqn_layers": "layers.0"}, "aqn_layers"),
    ({"aqn_target_entropy": 0.3}, "aqn_target_entropy=0.3 was removed.*use_adaptive_entropy of TRL"),
    ({"aqn_rate_limit": 0.1}, "aqn_rate_limit=0.1 was removed"),
    ({"aqn_schedule": "entropy"}, "aqn_schedule='entropy' was removed: choose 'exponential'"),
    # Rollouts.
    ({"rollout_weights": "sparse"}, "rollout_weights"),
    ({"rollout_weights": "packed", "cache_rollout_weights": False}, "rollout_weights"),
    ({"rollout_weights": "dense", "use_vllm": True}, "rollout_weights"),
    ({"vllm_weights": "4bit", "use_vllm": True, "vllm_mode": "colocate"}, "choose one of packed, dense, checkpoint"),
    ({"vllm_weights": "dense"}, "vllm_weights='dense' has no effect without a vLLM in this process"),
    ({"vllm_weights": "dense", "use_vllm": True, "vllm_mode": "server"}, "a server is told when it is started"),
    ({"compile_rollouts": True, "use_vllm": True}, "set use_vllm=False"),
    ({"compile_rollouts": True, "use_transformers_continuous_batching": True}, "default_compile_level"),
    ({"compile_rollouts": True, "router_replay": True}, "router_replay=False"),
    ({"router_replay": True, "use_vllm": True, "vllm_mode": "server"}, "TRL drops them from what a server answers"),
    ({"router_replay": True, "use_vllm": True, "vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size=1"),
    (
        {"router_replay": True, "use_transformers_continuous_batching": True},
        "use_transformers_continuous_batching=False",
    ),
    # Their correction.
    ({"rollout_correction_cap": 0.0}, "rollout_correction_cap"),
    ({"rollout_correction_mode": "tokens"}, "rollout_correction_mode"),
    ({"rollout_correction_min": 2.5}, "rollout_correction_min"),
    ({"rollout_correction_min": -0.1}, "rollout_correction_min"),
    ({"rollout_correction_mode": "sequence_mask", "loss_type": "vespo"}, "rollout_correction_mode"),
    # The same under TRL's names, for vLLM.
    (
        {"use_vllm": True, "rollout_correction": False, "vllm_importance_sampling_correction": True},
        "contradict each other: for no importance weights leave vllm_importance_sampling_correction out",
    ),
    (
        {
            "use_vllm": True,
            "rollout_correction_mode": "token_mask",
            "vllm_importance_sampling_mode": "sequence_mask",
        },
        "rollout_correction_mode='token_mask' and vllm_importance_sampling_mode='sequence_mask' are the same option",
    ),
    (
        {"use_vllm": True, "rollout_correction_cap": 4.0, "vllm_importance_sampling_clip_max": 5.0},
        "rollout_correction_cap=4.0 and vllm_importance_sampling_clip_max=5.0 are the same option.*set one of them",
    ),
    (
        {"use_vllm": True, "rollout_correction_cap": 4.0, "vllm_importance_sampling_cap": 5.0},
        "rollout_correction_cap=4.0 and vllm_importance_sampling_clip_max=5.0",
    ),
    (
        {"use_vllm": True, "rollout_correction_min": 0.5, "vllm_importance_sampling_clip_min": 0.4},
        "rollout_correction_min=0.5 and vllm_importance_sampling_clip_min=0.4",
    ),
    ({"vllm_importance_sampling_mode": "tokens"}, "vllm_importance_sampling_mode='tokens' is not known"),
    # Options that starve dynamic sampling, or mix scales.
    ({"dynamic_sampling_max_rounds": 0}, "dynamic_sampling_max_rounds"),
    ({"dynamic_sampling": True, "scale_rewards": "batch"}, "dynamic_sampling"),
    ({"dynamic_sampling": True, "multi_objective_aggregation": "normalize_then_sum"}, "dynamic_sampling"),
    # The punishment of long completions.
    ({"overlong_buffer": -1}, "overlong_buffer"),
    ({"overlong_penalty": 0.0}, "overlong_penalty"),
    (
        {"overlong_buffer": 8, "multi_objective_aggregation": "normalize_then_sum"},
        "overlong_buffer adds a reward function.*use 'sum_then_normalize'",
    ),
]
ACCEPTED = [
    {"rollout_weights": "packed", "use_transformers_continuous_batching": True},
    {"cache_rollout_weights": False},
    {"aqn_sigma_start": 1e-4, "aqn_schedule": "constant"},
    {"aqn_sigma_start": 0.1, "aqn_sigma_end": 0.1, "aqn_schedule": "constant"},
    {"aqn": False, "aqn_sigma_end": 1e-4, "aqn_schedule": "constant"},
    {"rollout_correction_mode": "token_mask", "loss_type": "vespo"},
    {"multi_objective_aggregation": "normalize_then_sum"},
    {"rollout_correction_cap": 4.0, "vllm_importance_sampling_clip_max": 5.0},
    {"use_vllm": True, "rollout_correction_cap": 5.0, "vllm_importance_sampling_clip_max": 5.0},
]
#: Options under vLLM, and the correction, mode, upper and lower limit that TRL then has.
SHARED = [
    ({}, (True, "token_truncate", 2.0, None)),
    ({"rollout_correction": False}, (False, "token_truncate", 2.0, None)),
    ({"vllm_importance_sampling_correction": False}, (False, "token_truncate", 2.0, None)),
    ({"rollout_correction_mode": "sequence_mask", "rollout_correction_cap": 5.0}, (True, "sequence_mask", 5.0, None)),
    ({"rollout_correction_min": 0.5}, (True, "token_truncate", 2.0, 0.5)),
    ({"vllm_importance_sampling_mode": "sequence_mask"}, (True, "sequence_mask", 2.0, None)),
    ({"vllm_importance_sampling_clip_max": 4.0}, (True, "token_truncate", 4.0, None)),
    ({"vllm_importance_sampling_cap": 4.0}, (True, "token_truncate", 4.0, None)),
    (
        {"vllm_importance_sampling_clip_max": None, "rollout_correction_min": 0.5},
        (True, "token_truncate", None, 0.5),
    ),
    ({"vllm_importance_sampling_clip_min": 0.1}, (True, "token_truncate", 2.0, 0.1)),
]


def config(tmp_path, **options):
    return MXFP4GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=str)
def test_meaningless_options_are_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **options)


@pytest.mark.parametrize("options", ACCEPTED, ids=str)
def test_options_that_mean_something_are_accepted(options, tmp_path):
    found = config(tmp_path, **options)
    if "aqn_schedule" in options:
        assert found.noise_schedule.sigma(9, 10) == found.aqn_sigma_start


@pytest.mark.filterwarnings("ignore:The `vllm_importance_sampling_cap`:FutureWarning")
@pytest.mark.parametrize(("options", "expected"), SHARED, ids=str)
def test_rollout_correction_is_trls_under_vllm(options, expected, tmp_path):
    found = config(tmp_path, use_vllm=True, **options)
    for _ in range(2):  # what is shared already is shared again without a change
        names = ("correction", "mode", "clip_max", "clip_min")
        assert tuple(getattr(found, f"vllm_importance_sampling_{name}") for name in names) == expected
        assert limits_in_force(found) == (expected[1:] if expected[0] else None)
        share_with_trl(found)


def test_limits_in_force_without_vllm(tmp_path):
    found = config(tmp_path, rollout_correction_cap=4.0, vllm_importance_sampling_clip_max=5.0)
    assert limits_in_force(found) == ("token_truncate", 4.0, None)
    assert limits_in_force(config(tmp_path, rollout_correction=False)) is None


def parsed(tmp_path, yaml, *arguments):
    path = tmp_path / "run.yaml"
    path.write_text(f"use_cpu: true\nbf16: false\n{yaml}")
    arguments = ["--config", str(path), "--output_dir", str(tmp_path), *arguments]
    (found,) = TrlParser((MXFP4GRPOConfig,)).parse_args_and_config(arguments)
    return found


def test_every_option_can_come_from_yaml_and_command_line(tmp_path):
    yaml = "aqn_sigma_start: 2.0e-2\naqn: false\nvllm_mode: server\n"
    found = parsed(tmp_path, yaml, "--aqn_num_stages", "3", "--use_vllm", "false")
    assert (found.aqn_sigma_start, found.aqn, found.aqn_num_stages) == (2e-2, False, 3)
    assert (found.vllm_mode, found.use_vllm) == ("server", False)
    yaml = "use_vllm: true\nvllm_importance_sampling_mode: sequence_mask\nrollout_correction_cap: 4.0\n"
    found = parsed(tmp_path, yaml, "--vllm_importance_sampling_correction", "true")
    assert limits_in_force(found) == ("sequence_mask", 4.0, None)
    assert limits_in_force(parsed(tmp_path, yaml, "--vllm_importance_sampling_correction", "false")) is None
    yaml = "aqn_layers: [layers.0, 're:.*norm']\naqn_targets: norms\naqn_rate_limit: 0.05\n"
    for more, layers in (([], ["layers.0", "re:.*norm"]), (["--aqn_layers", "layers.1", "norm"], ["layers.1", "norm"])):
        found = parsed(tmp_path, yaml, "--aqn_schedule", "cosine", *more)
        assert (found.aqn_layers, found.noise_schedule.shape) == (layers, "cosine")


def test_misspelt_options_name_the_nearest(tmp_path):
    for name, nearest in {"aqn_sigma_strat": "aqn_sigma_start", "learning_rte": "learning_rate"}.items():
        with pytest.raises(TypeError, match=f"^MXFP4GRPOConfig has no option '{name}'; did you mean .*'{nearest}'"):
            config(tmp_path, **{name: 1})


def test_signature_and_help_list_the_options():
    assert inspect.signature(MXFP4GRPOConfig).parameters["aqn_num_stages"].default == 10
    assert "aqn_num_stages (int, default 10): Equal parts of training" in MXFP4GRPOConfig.__doc__
    assert "learning_rate" not in MXFP4GRPOConfig.__doc__  # TRL's, described there
