# SPDX-License-Identifier: Apache-2.0
"""Training runs of a few steps on a tiny quantized policy."""

from types import SimpleNamespace

import torch
from accelerate import Accelerator
from datasets import Dataset
from moe_models import make_moe
from peft import LoraConfig, get_peft_model
from tiny_models import make_model
from transformers import AutoModelForCausalLM
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration

from hf_mxfp4 import MXFP4GRPOConfig, MXFP4GRPOTrainer, MXFP4RLConfig
from hf_mxfp4.integrations.transformers.swap import quantize_linears
from hf_mxfp4.integrations.vllm import EngineSettings
from hf_mxfp4.recipes.tasks.tiny_model import build_char_tokenizer
from hf_mxfp4.rl.noise import NormNoise
from hf_mxfp4.rl.vllm import VLLMPolicy


TOKENIZER = build_char_tokenizer("0123456789+=")


#: How `agent` writes: from its first digit to the end, all is the argument of a call.
CALLS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "=",
    "fields": {
        "tool_calls": {
            "open_pattern": r"(?P<x>[0-3]((?!<\|).)*)", "close_pattern": "", "repeats": True, "content": "text",
            "transform": {"type": "function", "function": {"name": "double", "arguments": {"x": "{x}"}}},
        },
        "content": {"close_pattern": r"<\|endoftext\|>", "content": "text"},
    },
}  # fmt: skip
CHAT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}={% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments.x or call.function | tojson }}{% endfor %}"
    "{% if m.role == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


def agent(folder):
    """A policy of eight tokens that calls a tool whenever it writes a digit, saved in ``folder``; its tokenizer."""
    tokenizer = build_char_tokenizer("0123=+")
    tokenizer.backend_tokenizer.model.unk_token = tokenizer.unk_token = "+"
    tokenizer.chat_template = CHAT
    tokenizer.response_template = CALLS
    tokenizer.split_special_tokens = False
    make_model(hidden=32, intermediate=48, vocab_size=8).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def double(x: str) -> str:
    """Write the first digit twice.

    Args:
        x: the digits.
    """
    return 2 * x[0]


def questions(count=8):
    return Dataset.from_list([{"prompt": [{"role": "user", "content": f"{i % 4}+1"}]} for i in range(count)])


def even_digits(completions, **kwargs):
    """A reward that random completions sometimes earn, so that advantages are not all zero."""
    return [sum(character in "02468" for character in text) / 4 for text in completions]


def prompts(count=8):
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(count)]
    return Dataset.from_list(rows)


def quantized(config=None, family="qwen2", **options):
    """A tiny model whose linear layers are quantized, by default in the default scheme."""
    model = make_model(family, **options)
    quantize_linears(model, config or MXFP4RLConfig())
    return model


def mixture(folder, scheme=None, **options):
    """A quantized mixture of experts, of a checkpoint that is made in ``folder`` unless it is there."""
    if not folder.exists():
        make_moe(**options).save_pretrained(folder)
        TOKENIZER.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=scheme or MXFP4RLConfig())


#: What a run measures of its policy by itself, often enough for four steps.
MEASURED = {"error_every": 2}


#: A scheme that draws random numbers in all products.
RANDOM = {
    "preset": "w4a4g4",
    "fprop": {"weight": "rceil+stochastic"},
    "dgrad": {"grad": "rceil+stochastic"},
    "wgrad": {"grad": "rceil+stochastic", "rotation": "random-16"},
}
#: Noise in every step; and the key of what rollouts record.
NOISY = {"aqn_num_stages": 1, "aqn_sigma_start": 0.3, "aqn_sigma_end": 0.3}
SAMPLED = "sampling_per_token_logps"


def logged(trainer, key):
    """The values that were logged under a key, by step."""
    return {entry["step"]: entry[key] for entry in trainer.state.log_history if key in entry}


def rollout(trainer, step=1, prompts=2):
    trainer.model.train()
    trainer.state.global_step = step
    trainer.state.max_steps = 4
    trainer.current_gradient_accumulation_steps = 1
    rows = [row for row in trainer.train_dataset.select(range(prompts)) for _ in range(trainer.num_generations)]
    return trainer._generate_and_score_completions([dict(row) for row in rows])


def log_probs(trainer, batch):
    """Of the batch's completions, by a plain forward pass."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    with torch.no_grad():
        logits = trainer.model(input_ids=ids, attention_mask=mask).logits[:, batch["prompt_ids"].shape[1] - 1 : -1]
    logits = logits / trainer.temperature
    return logits.log_softmax(-1).gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)


def seen_by_loss(trainer, batch):
    """The batch as TRL's loss reads it, once it has computed log-probabilities."""
    seen = {}
    original = trainer._compute_loss

    def look(model, inputs):
        loss = original(model, inputs)
        seen.update(inputs)
        return loss

    trainer._compute_loss = look
    trainer.compute_loss(trainer.model, batch)
    trainer._compute_loss = original
    return seen


def trainer_factory(tmp_path, layers=2):
    """`build(reward=..., **options)` makes a trainer: 2 prompts x 4 generations a step, 4 steps an epoch. Of what costs
    time nothing is measured, unless the options say so (`MEASURED`): of four steps that is nearly half."""
    base = tmp_path / "base"

    def build(
        reward=even_digits, *, scheme=None, dataset=None, eval_dataset=None, policy=None, peft_config=None,
        callbacks=None, tokenizer=TOKENIZER, given=None, kind=MXFP4GRPOTrainer, **options,
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
            "gradient_checkpointing": False, "disable_tqdm": True, "aqn": True, "aqn_num_stages": 4,
            "error_every": 0, "report_every": 0, **options,
        }  # fmt: skip
        data = prompts() if dataset is None else dataset, eval_dataset
        others = {"processing_class": tokenizer, "peft_config": peft_config, "callbacks": callbacks}
        others |= given or {}
        return kind(policy, reward, MXFP4GRPOConfig(**settings), *data, **others)

    return build


#: What a log has of times, and means over what was trained since a run was started.
TIMES = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos")


def everything(trainer):
    """Weights, optimizer, schedule, random state and logs of a trainer. The choice of steps whose movement is measured
    starts with the run."""
    entries = trainer.state.log_history
    return {
        "weights": dict(trainer.model.state_dict()),
        "optimizer": trainer.optimizer.state_dict(),
        "schedule": trainer.lr_scheduler.state_dict(),
        "logs": [{k: v for k, v in e.items() if k not in TIMES and not k.startswith("movement")} for e in entries],
        "entropy": trainer.entropy_callback.history,
        "random": torch.get_rng_state(),
    }


def with_adapters(model, **options):
    """LoRA of some size, on a policy of frozen masters or packed weights."""
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "lora_alpha": 8, **options}))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


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


class Pushes:
    """A policy, ``of``, and what TRL pushes of it to a colocated vLLM, with noise of ``sigma``; its metrics are in
    ``records``."""

    def __init__(self, model, engine=None, norms=False, sleeps=False, walk=None, **options):
        scheme = next(m.config for m in model.modules() if hasattr(m, "config") and isinstance(m.config, MXFP4RLConfig))
        engine = engine or vllm_llm(scheme=scheme, settings=EngineSettings("packed", 4))
        self.sigma = 0.0
        self.records = {}
        self.last = {}
        args = MXFP4GRPOConfig(use_cpu=True, bf16=False, use_vllm=True, **options)
        accelerator = Accelerator(cpu=True)
        generation = SimpleNamespace(llm=engine, mode="colocate", enable_sleep_mode=sleeps)
        generation._iter_named_params = walk or (lambda: trl_walk(model, accelerator))
        generation.sync_weights = lambda: self.last.update(generation._iter_named_params())
        noise = NormNoise(model, seed=0) if norms else None
        record = lambda name, value: self.records.setdefault(name, []).append(value)  # noqa: E731
        self.of = VLLMPolicy(generation, model, args, noise, lambda: (4, self.sigma), record)
        self._generation = generation

    def __call__(self):
        """One push: names and tensors."""
        self.last.clear()
        self._generation.sync_weights()
        return dict(self.last)


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
    trainer.vllm_generation = Generation()
    trainer._last_loaded_step = -1
    trainer._push_rollout_policy_to_vllm()
    return pushed
