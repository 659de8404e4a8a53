# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware distillation: a quantized student learns the predictions of its full-precision checkpoint
(arXiv 2601.20088), by TRL's `DistillationTrainer`.

TRL computes the divergence in tiles over tokens and vocabulary, which the backward pass computes again, so memory does
not grow with their product. Added here: a teacher that shares frozen tensors with the student, given texts and
completions, and divergence and perplexity of held-out texts.
"""

from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from trl import DistillationConfig, DistillationTrainer
from trl.models import prepare_deepspeed, prepare_fsdp
from trl.trainer.utils import add_fused_lm_head, create_model_from_path

from .._logging import get_logger
from ..given import given_column, given_tokens
from ..layers import TRAINABLE, cached_weights, n_elements
from ..utils import described_options, evaluation_mode, option, replaced_method
from .config import check_adapter, check_policy, check_scheme, count_quantized
from .step_quantization import QuantizedTrainerMixin, StepQuantization


@described_options
@dataclass
class MXFP4DistillationConfig(DistillationConfig):
    """Options of [`MXFP4DistillationTrainer`], in addition to those of [`trl.DistillationConfig`]."""

    #: As of [`MXFP4GRPOConfig`].
    step_weights = "auto"

    learning_rate: float = option(1e-4, "The initial learning rate for AdamW.")
    beta: float = option(0.0, "0: KL(teacher || student); 1: KL(student || teacher).")
    max_length: int = option(1024, "Tokens that texts and given completions are cut to.")
    generate_with: str = option("student", "What samples completions of rows without one: 'student' or 'teacher'.")
    train_all: bool = option(False, "Train embeddings, norms and heads too, not quantized layers alone.")
    report_every: int = option(100, "Steps between run reports; 0: no run_log.jsonl either.")
    allow_full_precision: bool = option(False, "Accept a student without an MXFP4 layer.")

    def __post_init__(self):
        if self.generate_with not in ("student", "teacher"):
            raise ValueError(f"generate_with={self.generate_with!r} must be 'student' or 'teacher'")
        if self.use_vllm:
            raise ValueError("use_vllm=True would sample from a student that is not quantized; leave it out")
        super().__post_init__()


class MXFP4DistillationTrainer(QuantizedTrainerMixin, DistillationTrainer):
    """Train a quantized student to predict as its full-precision teacher does.

    Takes the arguments of [`trl.DistillationTrainer`]; `args` is an [`MXFP4DistillationConfig`]. Rows of datasets have

    * `text`, `messages`, or `input_ids`: every token but the first is learned;
    * or `prompt` and `completion`: the completion is learned;
    * or `prompt` alone: a completion is sampled, see `generate_with`.

    The tokens of given texts and completions are those of [`trl.SFTTrainer`]: with an end-of-sequence token after plain
    text, and with the row's `tools` and `chat_template_kwargs` or else the trainer's.

    Args:
        model: a student in mode `"qat"`, or with adapters on quantized layers.
        teacher_model: a model, or where to load one; by default `args.teacher_model_name_or_path`, or what the student
            was loaded from.

    Attributes:
        n_quantized: weight matrices of the student that are in MXFP4.
        shared: number and bytes of tensors that the teacher shares; none under FSDP and DeepSpeed, which shard them.
        tokens_distilled: tokens that were learned, in all processes and before resuming too.

    Evaluation logs `eval_kl` (KL(teacher || student), nats per token), `eval_perplexity` and `eval_teacher_perplexity`.

    Raises `ValueError` for a student without MXFP4 layer, a teacher that is quantized or has another vocabulary, models
    that read images, and rows without a token to learn.
    """

    _tag_names = ["trl", "distillation", "mxfp4", "hf-mxfp4"]

    def __init__(self, model: Any, teacher_model: Any = None, args: Any = None, *data: Any, **kwargs: Any):
        if args is None:
            args = MXFP4DistillationConfig()
        check_scheme("quantization_config", kwargs.get("quantization_config"))
        check_adapter(model, kwargs.get("peft_config"))
        super().__init__(model, None, args, *data, **kwargs)
        if self._is_vlm:
            raise ValueError("models that read images are not supported: give a tokenizer as processing_class")
        if args.train_all and isinstance(self.model, PeftModel):
            raise ValueError("train_all=True has no effect on a student with adapters, which are all that is trained")
        self.n_quantized = count_quantized(self.model)
        advice = "set allow_full_precision=True"
        if args.allow_full_precision:
            advice = ""
        check_policy(self.model, self.n_quantized, advice)
        n_trained = _choose_trained(self.model, args.train_all)
        self.teacher_model, self.shared = self._prepare_teacher(teacher_model)
        self.tokens_distilled = 0
        self._given: list[tuple[list[int], list[int]]] | None = None
        # Of an evaluation: divergence, negative log-likelihood of the student and of the teacher, and tokens.
        self._sums = torch.zeros(4, dtype=torch.float64)
        self.quantization = StepQuantization(self.model, None, args, self.accelerator, self._record)
        self._add_run_callbacks()
        get_logger().info(
            "MXFP4DistillationTrainer: n_quantized=%d, %d parameters are trained, %d tensors (%.1f MB) are shared with "
            "the teacher", self.n_quantized, n_trained, self.shared[0], self.shared[1] / 1e6,
        )  # fmt: skip

    def _prepare_teacher(self, teacher: Any) -> tuple[nn.Module, tuple[int, int]]:
        """Return the teacher, loaded and prepared, and number and bytes of the tensors that it shares."""
        if teacher is None or isinstance(teacher, str):
            teacher = self._load_teacher(teacher)
        if count_quantized(teacher):
            raise ValueError("the teacher is quantized; name the original with teacher_model_name_or_path")
        n_tokens = self.model.config.get_text_config().vocab_size
        n_teacher = teacher.config.get_text_config().vocab_size
        if n_teacher != n_tokens:
            raise ValueError(f"the teacher has a vocabulary of {n_teacher} tokens and the student of {n_tokens}")
        teacher.requires_grad_(False)
        for model in (self.model, teacher):
            add_fused_lm_head(_base_model(model))  # for evaluations
        if self.is_deepspeed_enabled:
            return prepare_deepspeed(teacher, self.accelerator), (0, 0)
        if self.is_fsdp_enabled:
            return prepare_fsdp(teacher, self.accelerator), (0, 0)
        teacher = self.accelerator.prepare_model(teacher, evaluation_mode=True).eval()
        return teacher, share_frozen(self.model, teacher, any_dtype=self.accelerator.native_amp)

    def _load_teacher(self, source: str | None) -> nn.Module:
        args = self.args
        options = {
            # Under autocast products are in 16 bits whatever the weights are in: the checkpoint's own dtype is enough.
            "dtype": "auto" if args.bf16 or args.fp16 else self.model.dtype,
            "device_map": None,
            "revision": args.teacher_model_revision or "main",
            "trust_remote_code": args.trust_remote_code,
            **(args.teacher_model_init_kwargs or {}),
        }
        source = source or args.teacher_model_name_or_path or self.model.config._name_or_path
        return create_model_from_path(source, **options)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        n_given = sum(given_column(row) is not None for row in inputs)
        if 0 < n_given < len(inputs):
            raise ValueError("a batch has rows with and without a completion or text; give all of them one, or none")
        if n_given:
            template = {"chat_template": self.chat_template, "tools": self.tools or None, **self.chat_template_kwargs}
            self._given = [_tokens_of(row, self._tokenizer, self.args.max_length, template) for row in inputs]
            inputs = [{"prompt": ""}] * len(inputs)
        try:
            batch = super()._generate_and_score_completions(inputs)
        finally:
            self._given = None
        if n_given:
            # Nobody sampled the completions whose lengths and truncation TRL measures.
            metrics = self._metrics["train" if self.model.training else "eval"]
            for name in [name for name in metrics if name.startswith("completions/")]:
                del metrics[name]
        if self.model.training:
            self.tokens_distilled += int(batch["num_items_in_batch"])
        return batch

    def _tokenize_prompts(self, prompts: list):
        if self._given is None:
            return super()._tokenize_prompts(prompts)
        return [prompt for prompt, _ in self._given], None, {}

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any):
        if self._given is not None:
            return [completion for _, completion in self._given]
        sampler = self.teacher_model
        if self.args.generate_with == "student":
            sampler = self.model_wrapped
        with (
            replaced_method(self, "model_wrapped", sampler),
            cached_weights(self.model, self.quantization.form),
            evaluation_mode(self.model),
            self.accelerator.autocast(),
        ):
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self.quantization.micro_batch(self.state.global_step):
            return super().training_step(*args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        # TRL computes it in the place of the forward functions that accelerate put autocast on.
        with self.accelerator.autocast():
            return super().compute_loss(*args, **kwargs)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any):
        self._sums.zero_()
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        sums = self.accelerator.reduce(self._sums.to(self.args.device, torch.float32))
        kl, nll, teacher_nll = sums[:3] / sums[3]
        output.metrics[f"{metric_key_prefix}_kl"] = kl.item()
        output.metrics[f"{metric_key_prefix}_perplexity"] = nll.exp().item()
        output.metrics[f"{metric_key_prefix}_teacher_perplexity"] = teacher_nll.exp().item()
        return output

    def _compute_loss(self, student: nn.Module, inputs: dict[str, Any], num_items: Any):
        if self.model.training:
            return super()._compute_loss(student, inputs, num_items)
        # Several processes repeat rows to fill the last batch; accelerate drops those when it gathers.
        n_rows = len(inputs["completion_mask"])
        places = torch.arange(n_rows, device=self.args.device) + n_rows * self.accelerator.process_index
        counted = torch.isin(places, self.accelerator.gather_for_metrics(places))
        inputs = {**inputs, "completion_mask": inputs["completion_mask"] * counted.unsqueeze(1)}

        # KL(teacher || student) of the predictions as they are, whatever is trained on.
        with replaced_method(self, "beta", 0.0), replaced_method(self, "temperature", 1.0):
            kl, entropy, tokens = super()._compute_loss(student, inputs, None)

        # Log-likelihoods of both models on the same tokens.
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        learned = torch.cat([torch.zeros_like(inputs["prompt_mask"]), inputs["completion_mask"]], 1)
        texts = {
            "input_ids": ids,
            "attention_mask": torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
            "labels": ids.masked_fill(learned == 0, -100),
        }
        log_likelihood = _log_likelihood(student, texts)
        teacher = self.accelerator.unwrap_model(self.teacher_model)
        # A wrapper of the teacher (FSDP, DeepSpeed) gathers its weights in its own forward pass alone.
        teacher_log_likelihood = self._forward_redirection(self.teacher_model, teacher, _log_likelihood, teacher, texts)
        sums = torch.stack([kl * tokens, -log_likelihood, -teacher_log_likelihood, tokens])
        self._sums += sums.double().cpu()
        return kl, entropy, tokens

    def _process_state(self) -> dict[str, Any]:
        return {**super()._process_state(), "tokens_distilled": self.tokens_distilled}

    def _load_process_state(self, state: dict[str, Any]) -> None:
        super()._load_process_state(state)
        self.tokens_distilled = state["tokens_distilled"]


def share_frozen(student: nn.Module, teacher: nn.Module, *, any_dtype: bool = False) -> tuple[int, int]:
    """Let the teacher use the frozen parameters of the student that have the same name and values, also of another
    dtype with ``any_dtype`` (for models under autocast). Return how many are in the same memory now, and their bytes.
    """
    frozen = {}
    for name, parameter in _base_model(student).named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            frozen[name.replace(".base_layer", "")] = parameter
    shared = {}
    for name, parameter in list(teacher.named_parameters(remove_duplicate=False)):
        other = frozen.get(name)
        if other is None or other.device != parameter.device:
            continue
        if other.dtype != parameter.dtype and not any_dtype:
            continue
        wide = torch.promote_types(other.dtype, parameter.dtype)
        if torch.equal(other.to(wide), parameter.to(wide)):
            module, _, leaf = name.rpartition(".")
            setattr(teacher.get_submodule(module), leaf, other)
            shared[id(other)] = other.nbytes
    return len(shared), sum(shared.values())


def _base_model(model: nn.Module) -> nn.Module:
    if isinstance(model, PeftModel):
        return model.get_base_model()
    return model


def _log_likelihood(model: nn.Module, texts: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the sum of the log-probabilities of the labels, with the adapters of a PEFT model."""
    return _base_model(model).forward(**texts, fused_lm_head=True).log_probs.sum()


def _choose_trained(model: nn.Module, train_all: bool) -> int:
    """Freeze what is not quantized, unless the student has adapters, and return how many parameters are trained."""
    layers = [module for module in model.modules() if isinstance(module, TRAINABLE)]
    if layers and not train_all and not isinstance(model, PeftModel):
        model.requires_grad_(False)
        for layer in layers:
            for parameter in layer.parameters(recurse=False):
                parameter.requires_grad_(True)
    return sum(n_elements(parameter) for parameter in model.parameters() if parameter.requires_grad)


def _tokens_of(
    row: dict[str, Any], tokenizer: Any, max_length: int, template: dict[str, Any]
) -> tuple[list[int], list[int]]:
    """Return the tokens of a row that are only read, and those that are learned. Raises `ValueError` for a row without
    a token to learn."""
    ids, start = given_tokens(row, tokenizer, **template)
    if start >= len(ids[:max_length]):
        text = str(row.get("prompt") or row[given_column(row)])[:60]
        raise ValueError(f"no token of the row {text!r} is left to learn within max_length={max_length} tokens")
    return ids[:start], ids[start:max_length]
