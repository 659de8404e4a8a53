# SPDX-License-Identifier: Apache-2.0
"""What [`MXFP4GRPOTrainer`] refuses or warns of before it begins: arguments, data, the policy and its reference."""

from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers.utils.peft_utils import find_adapter_config_file

from .._logging import get_logger
from ..layers import QUANTIZED, TRAINABLE, matrix_names
from .config import MXFP4GRPOConfig


def count_quantized(model: nn.Module) -> int:
    """Weight matrices in MXFP4; each projection of fused experts is one."""
    return sum(len(matrix_names("", module)) for module in model.modules() if isinstance(module, QUANTIZED))


def check_arguments(
    args: Any, quantization_config: Any, train_dataset: Any, eval_dataset: Any, needs_prompt: bool
) -> None:
    """Raise `TypeError` for another config or a scheme's name, and `ValueError` for a dataset that is empty or has no
    prompts (unless environments make them), and for lengths that contradict one another."""
    if not isinstance(args, MXFP4GRPOConfig):
        raise TypeError(f"args must be an MXFP4GRPOConfig, got {type(args).__name__}")
    check_scheme("quantization_config", quantization_config)
    check_scheme("quantization_config in model_init_kwargs", (args.model_init_kwargs or {}).get("quantization_config"))
    args.check_overlong_buffer()
    if args.overlong_buffer and args.max_completion_length is None:
        raise ValueError(f"overlong_buffer={args.overlong_buffer} needs max_completion_length")
    for name, dataset in _named(train_dataset, eval_dataset):
        if hasattr(dataset, "__len__") and len(dataset) == 0:
            raise ValueError(f"{name} is empty")
        columns = getattr(dataset, "column_names", None)
        if needs_prompt and columns is not None and "prompt" not in columns:
            raise ValueError(f"{name} has no column 'prompt'; it has {', '.join(columns)}")


def _named(train_dataset: Any, eval_dataset: Any) -> list[tuple[str, Any]]:
    """The datasets that there are, with their names."""
    evaluated = eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}
    named = [(f"eval_dataset {name}".strip(), dataset) for name, dataset in evaluated.items()]
    return [pair for pair in (("train_dataset", train_dataset), *named) if pair[1] is not None]


def check_tokens(tokenizer: Any, train_dataset: Any, eval_dataset: Any) -> None:
    """Raise `ValueError` for a tokenizer without an end-of-sequence token, and for prompts without any token."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"{type(tokenizer).__name__} has no end-of-sequence token, so no completion could end: set "
            "tokenizer.eos_token to the token that ends a text, and give the tokenizer as processing_class"
        )
    for name, dataset in _named(train_dataset, eval_dataset) if not tokenizer("").input_ids else ():
        has_prompts = hasattr(dataset, "__len__") and "prompt" in (getattr(dataset, "column_names", None) or ())
        for row, prompt in enumerate(dataset["prompt"] if has_prompts else ()):
            if prompt in ("", []):
                raise ValueError(f"row {row} of {name} has an empty prompt, from which nothing can be generated")


def check_policy(model: nn.Module, n_quantized: int, otherwise: str) -> None:
    """Raise `ValueError` for a model without an MXFP4 layer; warn of master weights that are trained in 16 bits."""
    if n_quantized == 0 and otherwise:
        raise ValueError(
            f"{type(model).__name__} has no MXFP4 layer: this run would train in full precision. Load it with "
            f"quantization_config=MXFP4RLConfig() (the trainer takes it too, beside a model's name), or {otherwise}"
        )
    layers = [module for module in model.modules() if isinstance(module, TRAINABLE)]
    trained = [p for layer in layers for p in layer.parameters(recurse=False) if p.requires_grad and p.dim() > 1]
    if trained and trained[0].dtype in (torch.bfloat16, torch.float16):
        get_logger().warning(
            "the master weights are trained in %s: updates smaller than a 256th (bfloat16) of a weight are rounded "
            "away, which at the learning rates of RL is most of them; load the model with dtype=torch.float32",
            trained[0].dtype,
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
    """Raise `ValueError` for a reference policy that does not compute under the scheme of the policy; `None`: none."""
    if reference is None:
        return
    expected, found = count_quantized(policy), count_quantized(reference)
    if found != expected:
        raise ValueError(
            f"the reference policy has {found} MXFP4 weight matrices and the policy {expected}: their divergence would "
            "include what quantization does. Load the policy by from_pretrained with quantization_config, which the "
            "reference is then loaded with"
        )
