# SPDX-License-Identifier: Apache-2.0
"""Options of `grpo.py`, `sft.py` and `distill.py`, in YAML or on the command line."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from transformers import TrainingArguments
from transformers.utils.peft_utils import find_adapter_config_file
from trl import ModelConfig

from hf_mxfp4 import MXFP4GRPOConfig, MXFP4RLConfig
from hf_mxfp4.recipes.common.checkpoints import reset_scheme
from hf_mxfp4.recipes.common.options import (
    CONFIGS,
    build,
    exit_on_wrong_options,
    merge_options,
    read_command,
    read_file,
    read_yaml,
)
from hf_mxfp4.recipes.common.reporting import tell
from hf_mxfp4.recipes.tasks import TaskArguments, TaskStudy
from hf_mxfp4.recipes.tasks.tiny_model import TINY_MODELS
from hf_mxfp4.utils import SLOW_BFLOAT16, bfloat16_slowdown, option


DEFAULT_CONFIG = CONFIGS / "tiny_cpu.yaml"


@dataclass
class StartStudy(TaskStudy):
    """What tests, demos and studies set of any of the recipes."""

    dither_masters: bool = option(
        False, "With full_precision: move float32 master weights within their 16-bit numbers (docs/ties.md)."
    )
    tiny_architecture: str = option("qwen2", "Model to make: 'qwen2', or 'qwen3_moe' (8 experts, 2 a token).")
    tiny_hidden_size: int = option(128, "Width of the model to make.")
    tiny_num_layers: int = option(4, "Its depth.")
    sft_steps: int = option(400, "Supervised steps before RL, at the most, until a loss of 0.55; 0: none.")
    sft_batch_size: int = option(128, "Sequences in a supervised step.")
    save_policy: bool = option(True, "Save what was trained; without, there is nothing to reload or pack either.")

    def __post_init__(self):
        if self.tiny_architecture not in TINY_MODELS:
            raise ValueError(f"tiny_architecture={self.tiny_architecture!r} must be one of {', '.join(TINY_MODELS)}")
        for name, least in _LEAST.items():
            value = getattr(self, name, least)
            if value < least:
                raise ValueError(f"{name}={value} must be at least {least}")


@dataclass
class RunStudy(StartStudy):
    """What they set of `grpo.py`."""

    rollout_scheme: str | None = option(
        None, "With full_precision: sample and evaluate under this scheme, as for hf-mxfp4 eval (w4a8, w4a4:rceil)."
    )
    share_prompts: bool = option(False, "Compute the prompt of a group of completions once; in one process.")
    greedy_batch_size: int = option(128, "Prompts in a batch of the greedy evaluation.")
    evaluate_before: bool = option(True, "Evaluate before RL too.")
    evaluate_every_n: int = option(256, "Test problems, from the first on, of each evaluation while training.")
    pack: bool = option(True, "Write the policy in 4 bits beside it, too.")
    reload_check: int = option(64, "Test prompts whose completions are compared after reloading; 0: no reload.")


@dataclass
class StartArguments(TaskArguments):
    """The task, how the model is prepared, and the output folder."""

    STUDY: ClassVar[type] = StartStudy

    full_precision: bool = option(False, "Do not quantize: the baseline of this recipe.")
    gptq: bool = option(False, "Round the weights onto the grid of the scheme first (docs/gptq.md).")
    overwrite: bool = option(False, "Write into an output folder that is not empty; checkpoints in it are removed.")
    #: The options that the command line or the YAML file names.
    named: frozenset[str] = field(default=frozenset(), init=False)


@dataclass
class RecipeArguments(StartArguments):
    """What `grpo.py` does beside training."""

    STUDY: ClassVar[type] = RunStudy

    distill_steps: int = option(0, "Distil the policy towards its checkpoint before RL, for so many steps; 0: not.")
    evaluate_every: int = option(0, "Steps between greedy evaluations while training, logged as greedy/*; 0: none.")

    def __post_init__(self):
        super().__post_init__()
        for name in ("distill_steps", "evaluate_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")


@dataclass
class TextArguments(StartArguments):
    """What `sft.py` and `distill.py` learn and evaluate on."""

    learn: str = option("text", "Of the task: 'text' (prompts and completions), 'completion'; distill.py: 'generated'.")
    text: str | None = option(None, "Texts to learn in place of the task's: a file, folder or dataset (name:split).")
    text_field: str | None = option(None, "Their field, or several with commas between.")
    eval_text: list[str] = option([], "Held-out texts, each evaluated by itself; by default the task's test split.")


#: Options of `MXFP4RLConfig` that are mappings: nested in a YAML file, as YAML or JSON on the command line.
_YAML_OPTIONS = ("fprop", "dgrad", "wgrad")
#: Types that an argument parser can read.
_PARSER_TYPES = {
    "modules_to_not_convert": list[str] | None,
    **dict.fromkeys(("macro_block", *_YAML_OPTIONS), str | None),
}
#: The options of `MXFP4RLConfig` as a plain dataclass.
QuantizationArguments = make_dataclass(
    "QuantizationArguments",
    [
        (known.name, _PARSER_TYPES.get(known.name, known.type), field(default=known.default, metadata=known.metadata))
        for known in fields(MXFP4RLConfig)
        if known.init and known.name != "format_version"
    ],
)

#: The smallest values in a study.
_LEAST = {
    **dict.fromkeys(("sft_steps", "reload_check"), 0),
    **dict.fromkeys(("tiny_hidden_size", "tiny_num_layers", "sft_batch_size", "greedy_batch_size"), 1),
    "evaluate_every_n": 1,
}
#: Options that mean another model or task than those of the demo.
OTHER_THAN_THE_DEMO = ("model_name_or_path", "dataset", "eval_dataset", "text")


def groups_of(training: type[TrainingArguments], recipe: type[StartArguments] = RecipeArguments) -> tuple[type, ...]:
    """Return everything that has options of a recipe whose trainer has ``training``."""
    return recipe, QuantizationArguments, training, ModelConfig


#: Everything that has options of `grpo.py`.
GROUPS = groups_of(MXFP4GRPOConfig)


def quantization_config(arguments: object) -> MXFP4RLConfig:
    """Return the `MXFP4RLConfig` that parsed `QuantizationArguments` describe; raise `ValueError` as it does."""
    options = {known.name: getattr(arguments, known.name) for known in fields(QuantizationArguments)}
    for name in _YAML_OPTIONS:
        options[name] = read_yaml(name, options[name])
    return MXFP4RLConfig(**options)


class Options(NamedTuple):
    """All options of a run."""

    recipe: StartArguments
    quantization: MXFP4RLConfig
    training: TrainingArguments
    model: ModelConfig


def parse(argv: list[str], groups: tuple[type, ...] = GROUPS, demo: Path = DEFAULT_CONFIG) -> Options:
    """Parse the command line and the YAML file that `--config` names; without one, and without another model or task
    than the demo's, the file ``demo``. ``groups``: those of the script, see [`groups_of`].

    A preset or mode on the command line resets the options of the scheme that the file has. Raises `ValueError` for an
    option that does not exist, with the nearest names, or has a value outside its set.
    """
    modules = "modules_to_not_convert"
    if sum(word.replace("-", "_")[2:].partition("=")[0] == modules for word in argv) > 1:
        raise ValueError(f"--{modules} is given more than once; give all after one: --{modules} layers.0 down_proj")
    given = read_command(argv, groups)
    path = given.pop("config", None) or _demo(given, demo)
    file = read_file(path, groups) if path else {}
    kept, dropped = reset_scheme(file, given)
    if dropped:
        word = "preset" if "preset" in given else "mode"
        told = ", ".join(f"{name}={value}" for name, value in dropped.items())
        tell("scheme", f"--{word} {given[word]} resets what {Path(path).name} says of the scheme: {told}")
    options = make_options(for_this_machine(merge_options(kept, given)), groups)
    options.recipe.named = frozenset(file) | frozenset(given)
    return options


def make_options(options: Mapping[str, Any], groups: tuple[type, ...] = GROUPS) -> Options:
    """Make the options of a run of options by name, as a YAML file has them; raise as [`parse`] does."""
    if MXFP4GRPOConfig in groups:
        # The task's own, and not TRL's, where nobody says how long completions may be.
        options = {"max_completion_length": None, **options}
    recipe, quantization, arguments, model = build(groups, options)
    if model.load_in_4bit or model.load_in_8bit:
        raise ValueError("load_in_4bit and load_in_8bit are bitsandbytes' schemes; here `preset` says what is MXFP4")
    is_quantized = not recipe.full_precision
    if is_quantized and recipe.study.dither_masters:
        raise ValueError("dither_masters is for full_precision; quantized policies have dither_ties, which is on")
    if isinstance(recipe.study, RunStudy) and recipe.study.rollout_scheme:
        if is_quantized or model.use_peft or arguments.use_vllm:
            raise ValueError("rollout_scheme is for full_precision without use_peft and use_vllm")
    scheme = quantization_config(quantization)
    if is_quantized and scheme.mode == "packed":
        check_packed(model)
    return Options(recipe, scheme, arguments, model)


def for_this_machine(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return options with those of a processor where there is no GPU and none of them is named: trained on the CPU, in
    bfloat16 unless the CPU is slow in it, measured now."""
    if torch.accelerator.is_available() or not {"use_cpu", "bf16", "fp16", "tf32"}.isdisjoint(options):
        return options
    slowdown = bfloat16_slowdown()
    products = "float32" if slowdown > SLOW_BFLOAT16 else "bfloat16"
    tell("processor", f"no GPU: products in {products}, bfloat16 takes {slowdown:.2f} of the time of float32 here")
    return {**options, "use_cpu": True, "bf16": products == "bfloat16", "dataloader_pin_memory": False}


def _demo(given: dict, demo: Path) -> Path | None:
    """Return the file of the demo, unless it is another model or task that is to be trained."""
    others = [name for name in OTHER_THAN_THE_DEMO if given.get(name) is not None]
    if given.get("task", "arithmetic") != "arithmetic":
        others.insert(0, "task")
    if not others:
        return demo
    tell(
        "options",
        f"no --config, and --{others[0]} is not the demo's: options that are not named have their defaults, and not "
        f"those of {demo.name}",
    )
    return None


def check_packed(model: ModelConfig) -> None:
    """Raise `ValueError` where nothing could be trained on packed weights, before a model is made or loaded."""
    name = model.model_name_or_path
    revision = model.model_revision
    if not model.use_peft and not (name and find_adapter_config_file(name, revision=revision)):
        raise ValueError("mode='packed' freezes the weights; train adapters with --use_peft true, or use mode='qat'")
    if model.use_dora:
        raise ValueError("use_dora needs full-precision weights, which mode='packed' does not keep; use mode='qat'")


def parse_or_exit(argv: list[str], *of: Any) -> Options:
    """Parse as [`parse`], which ``of`` is for; end with a message for wrong options and for a missing GPU."""
    hint = "Run it on a GPU machine, or a small model on the CPU with --use_cpu true; without options one is made."
    return exit_on_wrong_options(lambda words: parse(words, *of), argv, hint)
