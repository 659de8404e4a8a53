# SPDX-License-Identifier: Apache-2.0
"""Short help of the recipes: our options and the usual ones of TRL and transformers, under headings.

`hf-mxfp4 RECIPE --help` prints a file of `recipes/help`, since making the text imports torch, transformers and TRL.
After a change of options, write the files again:

    python -m hf_mxfp4.recipes.common.help
"""

import importlib
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any


#: Each recipe by its name, and what it does.
RECIPES = {
    "train": "Train a model on problems of your own by GRPO in 4 bits: prepared, evaluated, saved and packed. --smoke "
    "does everything in a few steps, to see that it works on this machine.",
    "grpo": "Train a quantized policy by GRPO, from one YAML file: evaluated, saved and reloaded.",
    "sft": "Fine-tune a quantized model on texts or on the completions of a task, all weights or adapters.",
    "distill": "Distil a model in full precision into its quantized self.",
    "evaluate": "Evaluate a model on a task under its own scheme: greedy and sampled, with intervals.",
}
#: Words behind the name of a recipe, where they are not options alone.
USAGE = dict.fromkeys(("train", "evaluate"), "MODEL [--option value ...]")
#: Options of TRL and transformers that are set in most runs.
USUAL = {
    "model_name_or_path": "Model to train: a folder, or a name on the Hugging Face Hub.",
    "dtype": "Precision of the weights that are trained: float32, bfloat16 or auto.",
    "use_peft": "Train LoRA adapters instead of all weights; see lora_r, lora_alpha and lora_target_modules.",
    "learning_rate": "Initial learning rate of AdamW.",
    "max_steps": "Optimizer steps in place of num_train_epochs; 0 only evaluates.",
    "num_train_epochs": "Passes through the training data.",
    "per_device_train_batch_size": "Sequences in a micro-batch of each process.",
    "gradient_accumulation_steps": "Micro-batches in an optimizer step.",
    "max_length": "Tokens that texts are cut to.",
    "num_generations": "Completions of each prompt.",
    "max_completion_length": "Longest completion, in tokens.",
    "temperature": "Temperature of sampling.",
    "use_vllm": "Sample with vLLM (grpo alone); see vllm_mode and vllm_gpu_memory_utilization.",
    "bf16": "Compute in bfloat16.",
    "use_cpu": "Train on the CPU, even if there is a GPU.",
    "gradient_checkpointing": "Compute activations again in the backward pass, which saves memory.",
    "seed": "Seed of training and sampling.",
    "output_dir": "Folder of checkpoints, the trained model and results.",
    "save_steps": "Steps between checkpoints.",
    "resume_from_checkpoint": "true continues from the newest checkpoint in output_dir; or a checkpoint's folder.",
    "logging_steps": "Steps between logs.",
    "report_to": "Trackers such as wandb, or none.",
}

#: Options in the order of the help.
HEADINGS = {
    "Model and data": (
        "model model_name_or_path base revision dtype bf16 use_cpu attn_implementation trust_remote_code use_peft "
        "full_precision allow_full_precision task dataset eval_dataset prompt_column answer_column score reward "
        "prompt_template chat_template_kwargs learn text text_field eval_text study"
    ),
    "Scheme": (
        "preset mode scale_rule macro_block macro_search outlier_fallback fprop dgrad wgrad "
        "modules_to_not_convert stochastic_seed backend matmul_backend dequantize"
    ),
    "Preparation": "smooth gptq distill_steps dither_ties",
    "Training": (
        "learning_rate max_steps num_train_epochs per_device_train_batch_size gradient_accumulation_steps max_length "
        "max_completion_length train_all generate_with gradient_checkpointing"
    ),
    "Sampling and noise": (
        "num_generations temperature samples k max_new_tokens batch_size use_vllm vllm_weights "
        "rollout_correction rollout_correction_cap step_weights router_replay aqn aqn_sigma_start aqn_sigma_end "
        "aqn_num_stages"
    ),
    "Evaluation and output": (
        "evaluate_n evaluate_every compare output_dir overwrite save_steps resume_from_checkpoint seed logging_steps "
        "report_to error_every report_every"
    ),
}
#: Heading of options that are not named above.
OTHERS = "Other options"

_WIDTH = 110
_INDENT = 33
#: Characters that always fit into two lines.
_TWO_LINES = 140


def help_text(usage: str, about: str, groups: Sequence[type], values: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Return the short help of a script whose options are those of the dataclasses ``groups``; ``values`` are those of
    the YAML file that it reads by itself."""
    described: dict[str, str] = {}
    for group in groups:
        of_libraries = _options_of_libraries(group)
        for option in fields(group):
            name = option.name
            if option.init and name not in of_libraries:
                default = None if option.default is MISSING else option.default
                described[name] = _describe(option.metadata["help"], values.get(name, default))
            elif name in USUAL:
                described.setdefault(name, _describe(USUAL[name], values.get(name)))
    parts = [f"Usage: {usage}", textwrap.fill(about, _WIDTH)]
    for heading, names in HEADINGS.items():
        parts.append(_section(heading, {name: described.pop(name) for name in names.split() if name in described}))
    parts.append(_section(OTHERS, described))
    parts.append(
        "--config names a YAML file of options, or one of ours; the command line wins. "
        "--help-all lists all options,\nthose of TRL and transformers too, with their full descriptions."
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def _options_of_libraries(group: type) -> set[str]:
    """Return the options that a dataclass inherits from TRL and transformers."""
    libraries = ("trl", "transformers")
    bases = [base for base in group.__mro__ if base.__module__.split(".")[0] in libraries and is_dataclass(base)]
    return {option.name for base in bases for option in fields(base)}


def _describe(text: str, default: Any) -> str:
    """Return the first sentence about an option, and its default, in at most two lines."""
    sentence = re.split(r"(?<=[\w')])\. ", text)[0].rstrip(".") + "."
    shown = ""
    if isinstance(default, bool):
        shown = f" [{str(default).lower()}]"
    elif default is not None:
        shown = f" [{default}]"
    return textwrap.shorten(sentence, _TWO_LINES - len(shown), placeholder=" ...") + shown


def _section(heading: str, described: dict[str, str]) -> str:
    """Return a heading with its options, each in one or two lines; nothing without options."""
    if not described:
        return ""
    lines = [f"{heading}:"]
    for name, text in described.items():
        first = f"  --{name}".ljust(_INDENT - 1) + " "
        lines += textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=" " * _INDENT)
    return "\n".join(lines)


def help_file(name: str) -> Path:
    """Return the file with the help of one of `RECIPES`."""
    return Path(__file__).parents[1] / "help" / f"{name}.txt"


def recipe_help(name: str) -> str:
    """Return the help of one of `RECIPES`."""
    module = {"grpo": "post_training.arguments", "evaluate": "evaluation.arguments"}.get(name, name)
    recipe = importlib.import_module(f"hf_mxfp4.recipes.{module}")
    options = importlib.import_module("hf_mxfp4.recipes.common.options")  # it imports torch, which --help does without
    file = getattr(recipe, "CONFIG", None)
    values = {} if file is None else options.load_yaml(options.config_path(file))
    usage = USAGE.get(name, "[--config FILE] [--option value ...]")
    return help_text(f"hf-mxfp4 {name} {usage}", RECIPES[name], recipe.GROUPS, values)


def main() -> None:
    """Write the help of all recipes."""
    for name in RECIPES:
        help_file(name).write_text(recipe_help(name), encoding="utf-8")


if __name__ == "__main__":
    main()
