# SPDX-License-Identifier: Apache-2.0
"""What `MXFP4GRPOConfig` refuses, what it accepts, and where options come from."""

import math

import pytest
from trl import TrlParser

from hf_mxfp4 import MXFP4GRPOConfig


#: Options, and what the error says; of most, the name of the first.
REFUSED = [
    ({"entropy_collapse": -0.1}, "entropy_collapse"),
    # Cadences.
    ({"error_every": -1}, "error_every"),
    ({"gradient_gain_every": -1}, "gradient_gain_every=-1 must not be negative"),
    ({"report_every": -1}, "report_every=-1 must not be negative"),
    ({"router_every": -1}, "router_every=-1 must not be negative"),
    ({"movement_every": -1}, "movement_every=-1 must not be negative"),
    # Noise.
    ({"aqn_num_stages": 0}, "aqn_num_stages"),
    ({"aqn_sigma_start": 1e-4}, "aqn_sigma_start"),
    ({"aqn_sigma_end": 1e-4, "aqn_schedule": "constant"}, "aqn_sigma_end"),
    ({"aqn_targets": "weights"}, "aqn_targets"),
    ({"aqn_schedule": "stepwise"}, "aqn_schedule"),
    ({"aqn_linear_sigma_scale": 2.0}, "aqn_linear_sigma_scale"),
    ({"aqn_linear_sigma_scale": -1.0, "aqn_targets": "both"}, "aqn_linear_sigma_scale"),
    ({"aqn_layers": ["re:("]}, "aqn_layers"),
    ({"aqn_layers": "layers.0"}, "aqn_layers"),
    # Noise that follows the entropy.
    ({"aqn_target_entropy": 0.3}, "aqn_target_entropy"),
    ({"aqn_target_entropy": 0.0, "aqn_schedule": "entropy"}, "aqn_target_entropy"),
    ({"aqn_target_entropy": math.inf, "aqn_schedule": "entropy"}, "aqn_target_entropy"),
    ({"aqn_rate_limit": 0.0, "aqn_schedule": "entropy"}, "aqn_rate_limit"),
    ({"aqn_rate_limit": math.nan, "aqn_schedule": "entropy"}, "aqn_rate_limit"),
    ({"aqn_sigma_start": 1e-4, "aqn_schedule": "entropy"}, "aqn_sigma_start"),
    # Rollouts.
    ({"rollout_weights": "sparse"}, "rollout_weights"),
    ({"rollout_weights": "packed", "cache_rollout_weights": False}, "rollout_weights"),
    ({"rollout_weights": "dense", "use_vllm": True}, "rollout_weights"),
    ({"compile_rollouts": True, "use_vllm": True}, "set use_vllm=False"),
    ({"compile_rollouts": True, "use_transformers_continuous_batching": True}, "default_compile_level"),
    ({"compile_rollouts": True, "router_replay": True}, "router_replay=False"),
    ({"router_replay": True, "use_vllm": True}, "vLLM does not return"),
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
    yaml = "aqn_layers: [layers.0, 're:.*norm']\naqn_targets: both\n"
    for more, layers in (([], ["layers.0", "re:.*norm"]), (["--aqn_layers", "layers.1", "norm"], ["layers.1", "norm"])):
        found = parsed(tmp_path, yaml, "--aqn_schedule", "cosine", *more)
        assert (found.aqn_layers, found.aqn_targets, found.noise_schedule.shape) == (layers, "both", "cosine")
