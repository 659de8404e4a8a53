# SPDX-License-Identifier: Apache-2.0
"""Training runs of a few steps on a tiny quantized policy: GRPO, and a plain Trainer's."""

from types import SimpleNamespace

import torch
from datasets import Dataset
from tiny_models import make_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration

from hf_mxfp4 import MXFP4GRPOConfig, MXFP4GRPOTrainer, MXFP4RLConfig
from hf_mxfp4.recipes.tasks.tiny_model import build_char_tokenizer
from hf_mxfp4.rl import ExactResumeMixin


TOKENIZER = build_char_tokenizer("0123456789+=")


def even_digits(completions, **kwargs):
    """A reward that random completions sometimes earn, so that advantages are not all zero."""
    return [sum(character in "02468" for character in text) / 4 for text in completions]


def prompts(count=8):
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(count)]
    return Dataset.from_list(rows)


#: What a run measures of its policy by itself, often enough for four steps.
MEASURED = {"error_every": 2, "movement_every": 2}


def logged(trainer, key):
    """The values that were logged under a key, by step."""
    return {entry["step"]: entry[key] for entry in trainer.state.log_history if key in entry}


def trainer_factory(tmp_path, layers=2):
    """`build(reward=..., **options)` makes a trainer: 2 prompts x 4 generations a step, 4 steps an epoch. Of what costs
    time nothing is measured, unless the options say so (`MEASURED`): of four steps that is nearly half."""
    base = tmp_path / "base"

    def build(
        reward=even_digits, *, scheme=None, dataset=None, eval_dataset=None, policy=None, peft_config=None,
        callbacks=None, tokenizer=TOKENIZER, **options,
    ):  # fmt: skip
        if not base.exists():
            make_model(layers=layers, hidden=32, intermediate=48).save_pretrained(base)
            TOKENIZER.save_pretrained(base)
        if policy is None:
            policy = AutoModelForCausalLM.from_pretrained(base, quantization_config=scheme or MXFP4RLConfig())
        settings = {
            "output_dir": str(tmp_path / "run"), "per_device_train_batch_size": 8, "num_generations": 4,
            "max_completion_length": 4, "max_steps": 4, "learning_rate": 1e-3, "lr_scheduler_type": "constant",
            "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True, "bf16": False,
            "gradient_checkpointing": False, "disable_tqdm": True, "aqn_num_stages": 4, "error_every": 0,
            "movement_every": 0, "report_every": 0, **options,
        }  # fmt: skip
        data = prompts() if dataset is None else dataset, eval_dataset
        others = {"processing_class": tokenizer, "peft_config": peft_config, "callbacks": callbacks}
        return MXFP4GRPOTrainer(policy, reward, MXFP4GRPOConfig(**settings), *data, **others)

    return build


class ResumableTrainer(ExactResumeMixin, Trainer):
    pass


def train_plainly(cls, base, scheme, out, resume=None):
    """A trainer of class ``cls`` after 4 steps on the model in ``base``, checkpoints every 2 in ``out``."""
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=scheme)
    rows = [{"input_ids": [i % 30 + 1 for i in range(j, j + 16)]} for j in range(16)]
    rows = [{**row, "labels": row["input_ids"]} for row in rows]
    args = TrainingArguments(
        str(out), max_steps=4, save_steps=2, learning_rate=1e-2, use_cpu=True, report_to="none",
        per_device_train_batch_size=4, disable_tqdm=True, save_strategy="steps",
    )  # fmt: skip
    trainer = cls(model, args, train_dataset=rows, data_collator=default_data_collator)
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer


def trl_walk(model, accelerator):
    """TRL's own walk over the parameters that it pushes, of a `VLLMGeneration` without vLLM."""
    generation = object.__new__(VLLMGeneration)
    generation.model, generation.accelerator, generation._dist = model, accelerator, DistributedBackend(accelerator)
    return generation._iter_named_params()


def vllm_llm(dtype=torch.float32, scheme=None, settings=None):
    """What vLLM's `LLM` says of itself: its dtype, and the scheme of a checkpoint that the plugin has loaded, with its
    settings."""
    quantization = None if scheme is None else SimpleNamespace(scheme=scheme, settings=settings)
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=dtype), quant_config=quantization)
    return SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))


def with_simulated_vllm(trainer, *, walk: bool = True, **engine) -> list[dict]:
    """Rollouts of two tokens from something with the interface of TRL's `VLLMGeneration`; the list of the weights that
    are pushed to it, by name, from TRL's own walk, which without ``walk`` is an error. ``engine`` is for
    [`vllm_llm`]."""
    pushed = []

    class Generation:
        llm = vllm_llm(**engine)

        def _iter_named_params(self):
            assert walk, "TRL's own walk merges the adapters"
            yield from trl_walk(trainer.model, trainer.accelerator)

        def sync_weights(self):
            pushed.append(dict(self._iter_named_params()))

        def generate(self, prompts, **kwargs):
            return None, [[2, 1]] * len(prompts), [[[0.0], [0.0]]] * len(prompts), None

    trainer.use_vllm = trainer.args.use_vllm = True
    trainer.vllm_generation, trainer._last_loaded_step = Generation(), -1
    trainer._push_rollout_policy_to_vllm()
    return pushed
