# SPDX-License-Identifier: Apache-2.0
"""The accelerate configurations of the recipes on CPU processes, as `accelerate launch` would apply them on GPUs."""

import importlib
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import processes
import torch
import yaml


CONFIGS = Path(__file__).resolve().parents[2] / "recipes" / "accelerate"


def launch_environment(config: Path, *options: str) -> dict[str, str]:
    """The environment variables that `accelerate launch --config_file <config>` gives to each process."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    captured = {}
    command = ["--config_file", str(config), "--num_processes", "2", "--main_process_port", "0", *options, "train.py"]
    with mock.patch("torch.distributed.run.run", lambda args: captured.update(os.environ)):
        launch_command(launch_command_parser().parse_args(command))
    assert captured, "accelerate did not start its launcher of several processes"
    return captured


def use_engine(name: str | None, folder: Path, mixed_precision: str = "no", options: dict | None = None) -> None:
    """Make this process a rank of the configuration ``name``, if any, computing on the CPU, talking through gloo.

    accelerate enables FSDP and DeepSpeed on GPUs alone; `PartialState._prepare_backend` is where it decides. Under
    ZeRO-3 even the smallest weights are sharded, which DeepSpeed would leave whole in models of this size.
    """
    from accelerate.state import PartialState
    from transformers import training_args

    if name is None:
        return
    config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    if name == "zero3":
        ds_file = folder / f"ds_{os.environ['RANK']}.json"
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
        sizes = ("gradient_accumulation_steps", "gradient_clipping", "train_micro_batch_size_per_gpu")
        ds_file.write_text(
            json.dumps({"zero_optimization": zero, **{size: "auto" for size in sizes}, "bf16": {"enabled": "auto"}})
        )
        assert config["deepspeed_config"].pop("zero3_save_16bit_model") is True
        config["deepspeed_config"] = {
            "deepspeed_config_file": str(ds_file),
            "zero3_init_flag": config["deepspeed_config"]["zero3_init_flag"],
        }
        del config["mixed_precision"]  # accelerate refuses it beside a file; the trainer's bf16 says it
    else:
        config["mixed_precision"] = mixed_precision
    if options:
        config["fsdp_config"].update(options)
    file = folder / f"{name}_{os.environ['RANK']}.yaml"
    file.write_text(yaml.safe_dump(config))
    os.environ.update(launch_environment(file))
    torch.set_num_threads(1)
    if name == "ddp":  # runs on the CPU as it is, with use_cpu
        return
    if name.startswith("zero"):
        # It would compile C++ first, which gloo does without. (As an attribute, `deepspeed.comm.torch` is PyTorch.)
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    training_args.is_torch_bf16_gpu_available = lambda: True  # the CPU has bfloat16 too
    PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", "MULTI_GPU")


#: On top of the environment; as users have it.
VARIABLES = {"HF_MXFP4_VERBOSITY": "info"}


def run_job(name: str, log: Path, *, ranks: int = 1, timeout: float = 400, **arguments: Any) -> processes.Done:
    """Run ``"module:function"`` in each rank to its end; ``log`` and ``output`` get what all of them write."""
    options = {"ranks": ranks, "timeout": timeout, "log": log, "environment": os.environ | VARIABLES}
    return processes.start(processes.function(name, **arguments), **options).wait()
