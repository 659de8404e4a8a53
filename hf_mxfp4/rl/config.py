# SPDX-License-Identifier: Apache-2.0
"""`MXFP4GRPOConfig`: TRL's `GRPOConfig` with the options of [`MXFP4GRPOTrainer`]; and what trainers refuse or warn of
before they begin: arguments, data, the policy and its reference."""

from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset, Value
from peft import PeftModel
from torch import nn
from transformers.generation import ContinuousBatchingManager
from transformers.utils.peft_utils import find_adapter_config_file
from trl import GRPOConfig

from .._logging import get_logger
from ..layers import QUANTIZED, TRAINABLE, WEIGHT_FORMS, matrix_names
from ..utils import described_options, option
from .noise import NoiseSchedule
from .rollout import check_correction, read_correction, share_with_trl


#: What `step_weights` and `vllm_weights` can be.
STEP_WEIGHTS = (*WEIGHT_FORMS, "uncached")
VLLM_WEIGHTS = ("packed", "dense", "checkpoint")


@described_options
@dataclass
class MXFP4GRPOConfig(GRPOConfig):
    """Options of [`MXFP4GRPOTrainer`], in addition to those of [`trl.GRPOConfig`]. Flat, so that YAML and the command
    line can set each one. Raises `ValueError` for values that mean nothing."""

    aqn: bool = option(
        False,
        "Adaptive quantization noise: Gaussian noise on the weights of RMSNorms during rollouts and nowhere else. "
        "The other `aqn_*` options need it. No benefit was measured so far (docs/aqn.md).",
    )
    aqn_sigma_start: float = option(1e-2, "Standard deviation of the noise where it sets in, absolute.")
    aqn_sigma_end: float = option(
        1e-3, "Standard deviation at the end of training: 1e-3 in arXiv 2605.20402, 1e-4 in QeRL."
    )
    aqn_num_stages: int = option(
        10,
        "Equal parts of training, each with its own standard deviation, the first without noise (1: it has some). "
        "They fall geometrically (QeRL, arXiv 2605.20402).",
    )
    rollout_correction: str = option(
        "token_truncate",
        "Importance weights on rollouts: token_truncate, token_mask, sequence_truncate, sequence_mask or none. "
        "They are ratios of the policy that trains to the one that sampled, of each token or of each sequence; those "
        "above the cap are set to the cap (truncate) or to zero (mask). 'none' only measures the mismatch.",
    )
    rollout_correction_cap: float = option(2.0, "Upper limit of an importance ratio.")
    vllm_importance_sampling_correction: bool | None = option(
        None, "TRL's option for vLLM, which `rollout_correction` sets."
    )
    vllm_importance_sampling_mode: str | None = option(
        None,
        "TRL's option for vLLM, which `rollout_correction` sets; `rollout_correction_cap` sets "
        "`vllm_importance_sampling_clip_max`.",
    )
    step_weights: str = option(
        "auto",
        "How quantized weights are kept through an optimizer step: auto, dense, packed, none or uncached. 'dense' "
        "keeps 2 or 4 bytes an element; 'packed' 4-bit codes and scales; 'auto' is packed where a kernel reads codes "
        "and dense elsewhere; 'none' keeps them only while a rollout lasts, as all of these do under FSDP and ZeRO-3; "
        "'uncached' quantizes again for each generated token, which is slow. Not for vLLM's own copy.",
    )
    vllm_weights: str = option(
        "packed",
        "How a colocated vLLM keeps quantized weights: packed, dense or checkpoint. 'packed' keeps 4-bit codes and "
        "scales in the scheme of the policy, with room for LoRA adapters; 'dense' 16 bits, as it does for adapters on "
        "experts; 'checkpoint' starts it on the checkpoint of the policy. Servers are started with their own choice.",
    )
    error_every: int = option(
        50,
        "Steps between measurements of the quantization error and of the movement of weights; 0: never. The movement, "
        "that of quantized weights over that of their FP32 masters, is measured on at most 16.8 M weights (64 MiB).",
    )
    report_every: int = option(
        100,
        "0: no run_log.jsonl, which the trainer writes otherwise. Recipes make run_report.html of it every so many "
        "steps; in Python, add `RunReportCallback` of hf_mxfp4.lab.",
    )
    router_replay: bool = option(
        False, "Mixture of experts: train with the experts of the rollout (R3, arXiv 2510.11370)."
    )
    allow_full_precision: bool = option(
        False, "Train a model without any MXFP4 layer, for a baseline. Otherwise such a model is refused."
    )

    def __post_init__(self):
        self._check_noise()
        self.rollout_correction = read_correction(self.rollout_correction)
        check_correction(self)
        share_with_trl(self)
        for name in ("error_every", "report_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        self._check_weight_copies()
        if self.router_replay and self.use_vllm:
            self._check_replayed_rollouts()
        super().__post_init__()
        if self.use_transformers_continuous_batching:
            self._check_continuous_batching()

    @property
    def noise_schedule(self) -> NoiseSchedule:
        """The standard deviation over training that the `aqn_*` options describe."""
        return NoiseSchedule(self.aqn_sigma_start, self.aqn_sigma_end, self.aqn_num_stages)

    def _check_noise(self) -> None:
        """Raise `ValueError` for a schedule that means nothing; warn of one that noise is not switched on for."""
        schedule = self.noise_schedule
        if not self.aqn and schedule != NoiseSchedule():
            get_logger().warning("%s has no effect without aqn=True", schedule)

    def _check_weight_copies(self) -> None:
        """Raise `ValueError` for unknown forms of weights, and one of vLLM's that has no effect."""
        for name, known in (("step_weights", STEP_WEIGHTS), ("vllm_weights", VLLM_WEIGHTS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is not known; choose one of {', '.join(known)}")
        default = type(self).__dataclass_fields__["vllm_weights"].default
        if self.vllm_weights != default and not (self.use_vllm and self.vllm_mode == "colocate"):
            raise ValueError(
                f"vllm_weights={self.vllm_weights!r} has no effect without use_vllm=True and vllm_mode='colocate'; a "
                "server is told when it is started (docs/vllm.md)"
            )

    def _check_continuous_batching(self) -> None:
        """Raise `ValueError` for options that transformers' continuous batching leaves out; `ImportError` where it
        lacks what rollouts need."""
        if not hasattr(ContinuousBatchingManager, "pause"):
            raise ImportError(
                "use_transformers_continuous_batching=True needs transformers 5.24 or later: upgrade it, or set False"
            )
        if self.use_vllm:
            raise ValueError(
                "use_transformers_continuous_batching=True has no effect with use_vllm=True, which samples: set one of "
                "them alone"
            )
        if self.router_replay:
            raise ValueError(
                "router_replay=True records the experts of each sequence, and continuous batching runs tokens of many "
                "sequences as one: set use_transformers_continuous_batching=False, or use_vllm=True and "
                "vllm_mode='colocate'"
            )
        if (self.transformers_continuous_batching_config or {}).get("seed") is not None:
            raise ValueError(
                "seed in transformers_continuous_batching_config has no effect: rollouts draw from the random state of "
                "training, so that a resumed run repeats them; set seed of MXFP4GRPOConfig"
            )

    def _check_replayed_rollouts(self) -> None:
        """Raise `ValueError` where the experts that vLLM chose do not come back."""
        if self.vllm_mode != "colocate":
            raise ValueError(
                "router_replay=True needs the experts that were chosen in the rollout, and TRL drops them from what a "
                f"server answers (vllm_mode={self.vllm_mode!r}): use vllm_mode='colocate', or router_replay=False"
            )
        if self.vllm_tensor_parallel_size > 1:
            raise ValueError(
                f"router_replay=True with vllm_tensor_parallel_size={self.vllm_tensor_parallel_size}: vLLM returns the "
                "experts to the first of these processes alone; set vllm_tensor_parallel_size=1"
            )


# ---- checks of trainers ---------------------------------------------------------------------------------------------


def count_quantized(model: nn.Module) -> int:
    """Return the number of weight matrices in MXFP4; each projection of fused experts is one."""
    return sum(len(matrix_names("", module)) for module in model.modules() if isinstance(module, QUANTIZED))


def check_arguments(args: Any, quantization_config: Any) -> None:
    """Raise `TypeError` for another config or a scheme's name."""
    if not isinstance(args, MXFP4GRPOConfig):
        raise TypeError(f"args must be an MXFP4GRPOConfig, got {type(args).__name__}")
    check_scheme("quantization_config", quantization_config)
    check_scheme("quantization_config in model_init_kwargs", (args.model_init_kwargs or {}).get("quantization_config"))


def first_prompts(train_dataset: Any, eval_dataset: Any, needs_prompt: bool) -> dict[str, list]:
    """Return prompts of each dataset, by its name: a thousand texts, or the first prompt where it is a conversation or
    a transform makes it, either of which may open images; none of a stream.

    Raises `ValueError` for a dataset that is empty or has no prompts (unless environments make them).
    """
    datasets = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
    if isinstance(eval_dataset, dict):
        del datasets["eval_dataset"]
        datasets |= {f"eval_dataset {name}": dataset for name, dataset in eval_dataset.items()}
    prompts = {}
    for name, dataset in datasets.items():
        if hasattr(dataset, "__len__") and len(dataset) == 0:
            raise ValueError(f"{name} is empty")
        is_transformed = isinstance(dataset, Dataset) and dataset.format["type"] == "custom"
        columns = dataset[:1] if is_transformed else getattr(dataset, "column_names", None)
        if needs_prompt and columns is not None and "prompt" not in columns:
            raise ValueError(f"{name} has no column 'prompt'; it has {', '.join(columns)}")
        if is_transformed:
            prompts[name] = columns.get("prompt", [])
        elif isinstance(dataset, Dataset) and "prompt" in columns:
            is_text = dataset.features["prompt"] == Value("string")
            count = 1000 if is_text else 1
            prompts[name] = dataset.select_columns("prompt")[:count]["prompt"]
    return prompts


def check_tokens(tokenizer: Any, prompts: dict[str, list]) -> None:
    """Raise `ValueError` for a tokenizer without an end-of-sequence token or a vocabulary, and for prompts without any
    token. ``prompts``: those of each dataset, by its name."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"{type(tokenizer).__name__} has no end-of-sequence token, so no completion could end: set "
            "tokenizer.eos_token to the token that ends a text, and give the tokenizer as processing_class"
        )
    begins = tokenizer("").input_ids  # tokens that every text begins with
    unknown = {*begins, tokenizer.unk_token_id}
    for name, of_dataset in prompts.items():
        texts = [prompt for prompt in of_dataset if isinstance(prompt, str) and prompt]
        if texts and all({*tokenizer(text).input_ids} <= unknown for text in texts):
            raise ValueError(f"{type(tokenizer).__name__} knows no word of {texts[0]!r}: was it saved with the model?")
        for row, prompt in enumerate(of_dataset):
            if not begins and prompt in ("", []):
                raise ValueError(f"row {row} of {name} has an empty prompt, from which nothing can be generated")


def check_policy(model: nn.Module, n_quantized: int, otherwise: str) -> None:
    """Raise `ValueError` for a model without an MXFP4 layer; warn of master weights that are trained in 16 bits."""
    if n_quantized == 0 and otherwise:
        raise ValueError(
            f"{type(model).__name__} has no MXFP4 layer: this run would train in full precision. Load it with "
            f"quantization_config=MXFP4RLConfig() (the trainer takes it too, beside a model's name), or {otherwise}"
        )
    layers = [module for module in model.modules() if isinstance(module, TRAINABLE)]
    masters = [p for layer in layers for p in layer.parameters(recurse=False) if p.requires_grad and p.dim() > 1]
    if masters and masters[0].dtype in (torch.bfloat16, torch.float16):
        get_logger().warning(
            "the master weights are trained in %s: updates smaller than a 256th (bfloat16) of a weight are rounded "
            "away, which at the learning rates of RL is most of them; load the model with dtype=torch.float32",
            masters[0].dtype,
        )


def check_adapter(model: Any, peft_config: Any) -> None:
    """Raise `ValueError` for a trained adapter that would be replaced or stay frozen, before anything is loaded."""
    reason = None
    if isinstance(model, str):
        if find_adapter_config_file(model) is not None:
            reason = f"{model} holds an adapter and no model"
    elif getattr(model, "_hf_peft_config_loaded", False):
        reason = "the model was loaded from the folder of an adapter, which transformers freezes"
    elif isinstance(model, PeftModel) and peft_config is not None:
        reason = "the model has an adapter, and peft_config would make another"
    elif isinstance(model, PeftModel) and not any(parameter.requires_grad for parameter in model.parameters()):
        reason = "the adapter of the model is frozen, so that nothing would be trained"
    if reason:
        raise ValueError(
            f"{reason}: continue it with model=PeftModel.from_pretrained(base, folder, is_trainable=True) and no "
            "peft_config, where base is the quantized model that it was trained on"
        )


def check_scheme(option: str, given: Any) -> None:
    """Raise `TypeError` for the name of a scheme in the place of a config."""
    if isinstance(given, str):
        raise TypeError(
            f"{option} must be an MXFP4RLConfig, such as MXFP4RLConfig(preset='w4a4'), or its dict; got {given!r}"
        )


def check_reference(policy: nn.Module, reference: nn.Module | None) -> None:
    """Raise `ValueError` for a reference policy, if there is one, that does not compute under the scheme of the
    policy."""
    if reference is None:
        return
    n_policy = count_quantized(policy)
    n_reference = count_quantized(reference)
    if n_reference != n_policy:
        raise ValueError(
            f"the reference policy has {n_reference} MXFP4 weight matrices and the policy {n_policy}: their "
            "divergence would include what quantization does. Load the policy by from_pretrained with "
            "quantization_config, which the reference is then loaded with"
        )
