# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the tests of distributed engines, of the kill trials and of the tests of dead ranks do."""

import gc
import json
import os
import shutil
import signal
from pathlib import Path
from unittest import mock

import torch
import trl
from cpu_engines import use_engine
from datasets import Dataset
from grpo_runs import TOKENIZER, even_digits, prompts, with_simulated_vllm
from moe_models import make_moe
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny_models import make_model
from transformers import AutoModelForCausalLM, Trainer, TrainerState, TrainingArguments, default_data_collator

from benchmarks.counters import LiveTensors
from hf_mxfp4 import MXFP4DistillationConfig, MXFP4DistillationTrainer, MXFP4GRPOConfig, MXFP4GRPOTrainer, MXFP4RLConfig
from hf_mxfp4.checkpoint import last_complete_checkpoint
from hf_mxfp4.integrations.vllm import EngineSettings
from hf_mxfp4.rl import ExactResumeMixin, StepMovementCallback
from hf_mxfp4.rl.rewards import guard_reward


IDS = torch.arange(2, 30).repeat(8, 1).add(torch.arange(8).unsqueeze(1) * 5) % 31
LORA = {"task_type": "CAUSAL_LM", "target_modules": "all-linear", "r": 4, "lora_dropout": 0.0}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
#: On attention alone.
MOE_LORA = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
#: Of a mixture of experts, GRPO replays and measures routing.
MOE_GRPO = {"router_replay": True}


class PlainTrainer(ExactResumeMixin, Trainer):
    """A Trainer with exact resume."""


def make_base(folder: Path, moe: bool = False) -> Path:
    """Save the model that all jobs start from: dense, or a mixture of experts. In bfloat16, as most checkpoints are:
    every rank dithers its float32 masters as it loads them."""
    model = make_moe("qwen3_moe") if moe else make_model(layers=2, hidden=32, intermediate=48)
    model.to(torch.bfloat16).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def load(base: str, mode: str) -> torch.nn.Module:
    """The policy: trainable masters, or packed weights with new adapters."""
    config = MXFP4RLConfig(mode="packed" if mode.endswith("lora") else "qat")
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=config, dtype=torch.float32)
    if mode.endswith("lora"):
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(**(LORA | (MOE_LORA if mode == "moe_lora" else {}))))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zeros otherwise, and the gradients of lora_A with them
                torch.nn.init.normal_(parameter, std=0.1)
    return model


def arguments(folder: Path, cls=TrainingArguments, **options):
    """Training options of all jobs: 8 sequences a step, however many processes share them."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    settings = {
        "output_dir": str(folder), "per_device_train_batch_size": 8 // world, "max_steps": 4, "learning_rate": 1e-3,
        "lr_scheduler_type": "linear", "logging_steps": 1, "save_strategy": "steps", "save_steps": 2,
        "report_to": "none", "use_cpu": "ACCELERATE_TORCH_DEVICE" not in os.environ, "bf16": False,
        "gradient_checkpointing": False, "disable_tqdm": True, "seed": 3,
    }  # fmt: skip
    return cls(**settings | options)


def plain_trainer(base: str, mode: str, folder: Path, **options) -> PlainTrainer:
    """A causal language model trainer over fixed sequences."""
    rows = Dataset.from_list([{"input_ids": row.tolist(), "labels": row.tolist()} for row in IDS.repeat(2, 1)])
    args = arguments(folder, **options)
    return PlainTrainer(load(base, mode), args, train_dataset=rows, data_collator=default_data_collator)


def grpo_trainer(base: str, mode: str, folder: Path, **options) -> MXFP4GRPOTrainer:
    """GRPO with noise in every rollout but the first, and its correction."""
    usual = {"num_generations": 4, "max_completion_length": 4, "error_every": 2, "report_every": 0}
    options = {**usual, "aqn": True, "aqn_num_stages": 4, **options}
    if mode.startswith("moe"):
        options |= MOE_GRPO
    args = arguments(folder, MXFP4GRPOConfig, **options)
    return MXFP4GRPOTrainer(load(base, mode), even_digits, args, prompts(), processing_class=TOKENIZER)


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    """What a model says of the fixed sequences."""
    model.eval()
    return model(input_ids=IDS[:2]).logits.float().clone()


def noise_of_each_rank(trainer: MXFP4GRPOTrainer) -> list[list[float]]:
    """For each rank, how far norms were from the clean ones in its last rollout, to the bit."""
    reports = [trainer.noise.last_report.measured_std]
    mine = torch.tensor([reports], dtype=torch.float64, device=trainer.accelerator.device)
    return trainer.accelerator.gather(mine).tolist()


def refusal(build, *arguments, **options) -> str | None:
    """Why something cannot be made; None where it can."""
    try:
        build(*arguments, **options)
    except ValueError as error:
        return str(error)
    return None


def train_and_save(engine: str | None, mode: str, base: str, out: str, mixed_precision: str = "no", fsdp=None) -> None:
    """Train the plain trainer, GRPO, and under an engine GRPO once more from its checkpoint in the middle; rank 0
    writes what they saw to ``out/results.pt``, and each saves its model. At the end compiled rollouts are asked for,
    where weights are sharded."""
    out = Path(out)
    use_engine(engine, out, mixed_precision, fsdp)
    results = {}
    for kind in ("plain", "grpo", "resumed") if engine else ("plain", "grpo"):
        build, options = (plain_trainer, {}) if kind == "plain" else (grpo_trainer, {})
        trainer = build(base, mode, out / kind, bf16=mixed_precision == "bf16", **options)
        if kind == "plain" and not mode.endswith("lora"):
            trainer.add_callback(StepMovementCallback())
        trainer.train(resume_from_checkpoint=str(out / "grpo" / "checkpoint-2") if kind == "resumed" else None)
        logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        results[kind] = {
            "logs": [{name: float(value) for name, value in entry.items()} for entry in logged],
            "logits": logits(trainer.model_wrapped if engine else trainer.model),
            "distributed_type": trainer.accelerator.distributed_type.value,
            "processes": trainer.accelerator.num_processes,
            "errors": getattr(getattr(trainer, "error_callback", None), "history", None),
            "movement": [c.history for c in trainer.callback_handler.callbacks if isinstance(c, StepMovementCallback)],
            "noise": None if kind == "plain" else noise_of_each_rank(trainer),
            "n_quantized": getattr(trainer, "n_quantized", None),
        }
        trainer.save_model(str(out / kind / "saved"))
        trainer.accelerator.wait_for_everyone()
    if os.environ.get("RANK", "0") == "0":
        torch.save(results, out / "results.pt")


def train_on_uneven_rollouts(engine: str, base: str, out: str) -> None:
    """GRPO with replay where the sequences of rank 1 all end with their first token, and those of rank 0 do not; with
    quantized copies kept in rollouts, and without. Each rank writes what it saw to ``out/rank<i>.json``."""
    use_engine(engine, Path(out))
    rank = os.environ["RANK"]
    seen = {}
    for kept in (True, False):
        options = {"max_steps": 1, "save_strategy": "no", "max_completion_length": 6}
        options["step_weights"] = "dense" if kept else "uncached"  # the bits of those without copies
        trainer = grpo_trainer(base, "moe", Path(out) / f"kept-{kept}", **options)
        if rank == "1":
            trainer.generation_config.eos_token_id = trainer.eos_token_ids = list(range(32))
        held = []
        generate = trl.GRPOTrainer._generate

        def measured(self, prompts, held=held, generate=generate):
            with LiveTensors() as live:
                output = generate(self, prompts)
                gc.collect()
                held.append(live.current)
            return output

        with mock.patch.object(trl.GRPOTrainer, "_generate", measured):
            trainer.train()
        logs = [{name: float(value) for name, value in entry.items()} for entry in trainer.state.log_history[:1]]
        left_out = ("step_time", "quantization/weights_per_step")
        seen[str(kept)] = {"held": held, "logs": [{k: v for k, v in log.items() if k not in left_out} for log in logs]}
    (Path(out) / f"rank{rank}.json").write_text(json.dumps(seen))


def push_to_vllm(engine: str | None, base: str, out: str, packs: bool) -> None:
    """GRPO of adapters on trainable layers, whose weights are pushed for each rollout to something like
    a vLLM that keeps 4 bits (``packs``), or to another, with adapters on experts too and under noise. Each rank writes
    what it pushed, and whether the masters are as they were, to ``out/pushed<i>.pt``."""
    use_engine(engine, Path(out))
    scheme = MXFP4RLConfig(preset="w4a16")
    policy = AutoModelForCausalLM.from_pretrained(base, quantization_config=scheme, dtype=torch.float32)
    torch.manual_seed(0)
    experts = None if packs else EXPERTS
    policy = get_peft_model(policy, LoraConfig(r=2, target_modules=["q_proj"], target_parameters=experts))
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    options = {"num_generations": 4, "max_completion_length": 4, "report_every": 0, "error_every": 0}
    options |= {"aqn": not packs, "aqn_num_stages": 1, "max_steps": 2 if packs else 1}
    args = arguments(Path(out), MXFP4GRPOConfig, **options)
    trainer = MXFP4GRPOTrainer(policy, even_digits, args, prompts(), processing_class=TOKENIZER)
    vllm = {"scheme": scheme, "settings": EngineSettings("packed", 2)} if packs else {}
    pushes = with_simulated_vllm(trainer, **vllm)
    unwritten = []
    generate = trainer._generate

    def versions():
        return {key: value._version for key, value in trainer.model.named_parameters() if "lora_" not in key}

    def generate_noted(*args):
        before = versions()
        output = generate(*args)
        unwritten.append(before == versions())
        return output

    trainer._generate = generate_noted
    trainer.train()
    noise = trainer.noise.last_report.measured_std if trainer.noise else 0.0
    result = {"pushes": pushes, "unwritten": all(unwritten), "noise": noise}
    torch.save(result, Path(out) / f"pushed{os.environ.get('RANK', '0')}.pt")


def distill(engine: str | None, base: str, out: str) -> None:
    """Distill the whole run, under an engine again from its checkpoint in the middle; rank 0 writes what was logged."""
    own = f"{out}/base{os.environ.get('RANK', '0')}"
    model = AutoModelForCausalLM.from_pretrained(base)
    model.model.norm.weight.data *= 8  # predictions that are far from uniform
    model.save_pretrained(own)
    use_engine(engine, Path(out))
    # Of unequal length, so that a mean over the means of processes is another number.
    rows = Dataset.from_list([{"input_ids": row[: 8 + 2 * i].tolist()} for i, row in enumerate(IDS)] * 2)
    evaluated = rows.select(range(len(rows) - 1))  # two processes repeat a row
    results = {}
    for checkpoint in (None, f"{out}/run/checkpoint-2") if engine else (None,):
        scheme = MXFP4RLConfig(outlier_fallback=None)
        student = AutoModelForCausalLM.from_pretrained(own, quantization_config=scheme, dtype=torch.float32)
        args = arguments(f"{out}/run", MXFP4DistillationConfig, report_every=0)
        trainer = MXFP4DistillationTrainer(student, None, args, rows, evaluated, processing_class=TOKENIZER)
        trainer.train(resume_from_checkpoint=checkpoint)
        metrics = trainer.evaluate()
        results[checkpoint and "resumed" or "whole"] = {
            "loss": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            "evaluated": [metrics[f"eval_{name}"] for name in ("kl", "perplexity", "teacher_perplexity")],
            "tokens": trainer.tokens_distilled,
            "shared": trainer.shared[0],
        }
    if os.environ.get("RANK", "0") == "0":
        (Path(out) / "distilled.json").write_text(json.dumps(results))


def train_with_trl(engine: str | None, mode: str, base: str, out: str) -> None:
    """SFT and DPO of TRL; rank 0 writes what each logged in a step to ``out/trl.json``, and both save the model."""
    use_engine(engine, Path(out))
    rows = {
        "SFT": [{"prompt": f"{i}+{i}=", "completion": "1" * (1 + i)} for i in range(8)],
        "DPO": [{"prompt": f"{i}+{i}=", "chosen": f"{2 * i}", "rejected": f"{i}+1"} for i in range(8)],
    }
    TOKENIZER.split_special_tokens = False  # TRL ends texts by the name of a token
    logs = {}
    for name in rows:
        args = arguments(Path(out) / name, getattr(trl, f"{name}Config"), max_steps=2)
        data = {"train_dataset": Dataset.from_list(rows[name] * 2), "processing_class": TOKENIZER}
        trainer = getattr(trl, f"{name}Trainer")(load(base, mode), args=args, **data)
        trainer.train()
        kept = ("loss", "grad_norm", "rewards/margins", "entropy")
        logs[name] = [[entry[key] for key in kept if key in entry] for entry in trainer.state.log_history[:2]]
        trainer.save_model(f"{out}/{name}/saved")
    if os.environ.get("RANK", "0") == "0":
        (Path(out) / "trl.json").write_text(json.dumps(logs))


def run_recipe(engine: str, out: str, options: list[str]) -> None:
    """`recipes/grpo.py` under a configuration."""
    from hf_mxfp4.recipes import grpo

    use_engine(engine, Path(out))
    grpo.main([*options, f"--output_dir={out}/run", "--use_cpu=false"])


def load_split(base: str) -> None:
    """Load a model under transformers' own tensor parallelism in both modes, which is refused, and then a plain one."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    torch.distributed.init_process_group("gloo")
    for mode in ("qat", "packed"):
        config = MXFP4RLConfig(mode=mode)
        load = AutoModelForCausalLM.from_pretrained
        # In one piece: the other rank writes to the same file.
        print(f"refused: {refusal(load, base, quantization_config=config, tp_plan='auto')}", flush=True)
    torch.distributed.barrier()
    print("the plain model", flush=True)
    AutoModelForCausalLM.from_pretrained(base, tp_plan="auto")
    print("is loaded", flush=True)
    # A rank that leaves takes down the store that the other still needs to make its groups.
    torch.distributed.barrier()


STEPS = 4
OPTIONS = {"max_steps": STEPS, "save_steps": 1, "save_total_limit": 2, "num_iterations": 2, "logging_steps": 2}


def train_or_resume(base: str, run: str, dies_writing: str | None = None) -> None:
    """Train to the end, from the newest complete checkpoint if there is one; leave the final state in ``final.pt``.

    ``dies_writing``: a file of the third checkpoint that is begun, or ``"rotation"``; the process writes half of it, or
    deletes half of the oldest checkpoint, and gets SIGKILL.
    """
    if dies_writing is not None:
        _die_while_writing(dies_writing)
    folder = Path(run)
    trainer = grpo_trainer(base, "qat", folder, **OPTIONS)
    trainer.train(resume_from_checkpoint=last_complete_checkpoint(folder) is not None)
    state = {"weights": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
    state["random"] = torch.get_rng_state()
    torch.save(state, folder / "final.partial")
    os.replace(folder / "final.partial", folder / "final.pt")


def stop_in_an_update(engine: str, base: str, out: str) -> None:
    """Train alone under an engine; train again, with SIGTERM at the beginning of the third update, and resume. What is
    saved, and the ends of the first and the last run, are in ``out/ends.pt``."""
    out = Path(out)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    use_engine(engine, out)
    update = torch.optim.AdamW.step
    signals = []
    ends = []
    for kind in ("whole", "stopped", "resumed"):
        folder = out / ("whole" if kind == "whole" else "parts")
        trainer = grpo_trainer(base, "qat", folder, save_strategy="no")

        def step(*args, kind=kind, trainer=trainer, **kwargs):
            if kind == "stopped" and trainer.state.global_step == 2 and not signals:
                signals.append(signal.SIGTERM)
                signal.raise_signal(signal.SIGTERM)
            return update(*args, **kwargs)

        with mock.patch.object(torch.optim.AdamW, "step", step):
            try:
                trainer.train(resume_from_checkpoint=kind == "resumed")
            except SystemExit:
                assert kind == "stopped"
        trainer.save_model(str(folder / kind))
        ends.append(load_file(folder / kind / "model.safetensors"))
    torch.save({"saved": [path.name for path in (out / "parts").glob("checkpoint-*")], "ends": ends}, out / "ends.pt")


def _die_while_writing(name: str) -> None:
    begun = []

    def half(original, position):
        def write(*args, **kwargs):
            original(*args, **kwargs)
            path = Path(args[position])
            if path.name == name and path.parent.name.startswith("checkpoint-"):
                begun.append(path)
                if len(begun) == 3:
                    os.truncate(path, path.stat().st_size // 2)
                    os.kill(os.getpid(), signal.SIGKILL)

        return write

    def half_removed(path, **kwargs):
        if Path(path).name.startswith("checkpoint-"):
            for file in sorted(Path(path).iterdir())[::2]:
                file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        original_rmtree(path, **kwargs)

    torch.save = half(torch.save, 1)
    TrainerState.save_to_json = half(TrainerState.save_to_json, 1)
    if name == "rotation":
        original_rmtree = shutil.rmtree
        shutil.rmtree = half_removed


def train_with_a_failing_rank(base: str, run: str, failure: str | None) -> None:
    """Two ranks, a checkpoint at each step; in the third rollout rank 1 is ``"killed"``, or its reward function
    ``"raises"``. They go on from the newest whole checkpoint, if there is one. Rank 0 leaves the final state, and
    the steps that it made, in ``final.pt``."""
    folder = Path(run)
    steps = []
    use_engine("ddp", folder)
    torch.set_num_threads(1)
    trainer = grpo_trainer(base, "qat", folder, save_steps=1)

    def reward(completions, trainer_state, **kwargs):
        steps.append(trainer_state.global_step)
        if failure and trainer_state.global_step == 2 and os.environ["RANK"] == "1":
            print(f"rank 1 fails now: {failure}", flush=True)
            if failure == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("answer")
        return even_digits(completions)

    reward.__name__ = even_digits.__name__
    trainer.reward_funcs = [guard_reward(reward)]
    trainer.train(resume_from_checkpoint=last_complete_checkpoint(folder) is not None)
    if os.environ["RANK"] == "0":
        state = {"weights": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
        torch.save(state | {"steps": steps}, folder / "final.pt")
    torch.distributed.barrier()
