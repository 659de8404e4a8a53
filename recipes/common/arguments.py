# SPDX-License-Identifier: Apache-2.0
"""What `grpo.py` can be told, in YAML or on the command line."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import TypeVar

import torch
import yaml
from trl import ModelConfig, TrlParser

from hf_mxfp4 import MXFP4GRPOConfig, MXFP4RLConfig
from hf_mxfp4.config import unknown_key_message
from tasks import TASKS
from tasks.tiny_model import TINY_MODELS


Parsed = TypeVar("Parsed")

DEFAULT_CONFIG = Path(__file__).parents[1] / "configs" / "tiny_cpu.yaml"


@dataclass
class RecipeArguments:
    """The task, the model made on the spot when none is named, and what is reported."""

    task: str = field(default="arithmetic", metadata={"help": f"One of {', '.join(TASKS)}."})
    dataset_name: str | None = field(
        default=None, metadata={"help": "gsm8k, math500: Hub dataset; openai/gsm8k, HuggingFaceH4/MATH-500."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Its configuration; gsm8k: main."})
    train_file: str | None = field(default=None, metadata={"help": "JSON lines to train on instead of a Hub dataset."})
    test_file: str | None = field(default=None, metadata={"help": "JSON lines to evaluate on instead."})
    n_train: int | None = field(default=None, metadata={"help": "Rows of the train split to use; default all."})
    n_test: int | None = field(default=None, metadata={"help": "Rows of the test split to use; default all."})
    data_seed_split: int = field(default=0, metadata={"help": "Seed of the task's split and subsets."})
    problem_count: int | None = field(default=None, metadata={"help": "word_problems: problems to generate; 40000."})
    problem_steps: list[int] | None = field(
        default=None, metadata={"help": "word_problems: fewest and most steps of a problem; 2 4."}
    )
    conversational: bool = field(default=False, metadata={"help": "Send prompts as chat messages."})
    prompt_template: str | None = field(default=None, metadata={"help": "Prompt text with the field {question}."})

    full_precision: bool = field(default=False, metadata={"help": "Do not quantize: the baseline of this recipe."})
    tiny_architecture: str = field(
        default="qwen2", metadata={"help": "Model made on the spot: 'qwen2', or 'qwen3_moe' (8 experts, 2 a token)."}
    )
    tiny_hidden_size: int = field(default=128, metadata={"help": "Width of the model made on the spot."})
    tiny_num_layers: int = field(default=4, metadata={"help": "Its depth."})
    tiny_max_positions: int = field(default=512, metadata={"help": "Its longest sequence, in tokens."})
    sft_steps: int = field(default=400, metadata={"help": "Supervised steps before RL, at the most; 0: none."})
    sft_target_loss: float | None = field(
        default=0.55, metadata={"help": "Stop the supervised steps when their mean loss over 20 steps is below this."}
    )
    sft_batch_size: int = field(default=128, metadata={"help": "Sequences in a supervised step."})
    sft_learning_rate: float = field(default=5e-4, metadata={"help": "Peak learning rate of the supervised steps."})

    greedy_batch_size: int = field(default=128, metadata={"help": "Prompts in a batch of the greedy evaluation."})
    evaluate_before: bool = field(default=True, metadata={"help": "Evaluate before RL too."})
    evaluate_every: int = field(
        default=0, metadata={"help": "Steps between greedy evaluations while training, logged as greedy/*; 0: none."}
    )
    evaluate_every_n: int = field(default=256, metadata={"help": "Test problems, from the first on, of each of these."})
    save_policy: bool = field(
        default=True, metadata={"help": "Save the trained policy; without, there is nothing to reload either."}
    )
    reload_check: int = field(
        default=64, metadata={"help": "Test prompts whose completions are compared after reloading; 0: no reload."}
    )
    samples_shown: int = field(default=3, metadata={"help": "Completions of the reloaded model to print."})
    overwrite: bool = field(
        default=False,
        metadata={"help": "Write into an output folder that is not empty; checkpoints in it are removed."},
    )


#: Options of `MXFP4RLConfig` that are mappings or lists of them: nested in a YAML file, as YAML or JSON on the command
#: line.
_YAML_OPTIONS = ("fprop", "dgrad", "wgrad", "layer_overrides")


def _quantization_arguments() -> type:
    """The options of `MXFP4RLConfig` as a plain dataclass, with types that an argument parser can read "none" as."""
    parser_types = {
        "macro_block": str | None,
        "outlier_fallback": str | None,
        "modules_to_not_convert": list[str] | None,
        **dict.fromkeys(_YAML_OPTIONS, str | None),
    }
    specs = []
    for option in fields(MXFP4RLConfig):
        if option.init and option.name != "format_version":
            kind = parser_types.get(option.name, option.type)
            specs.append((option.name, kind, field(default=option.default, metadata=dict(option.metadata))))
    return make_dataclass("QuantizationArguments", specs)


QuantizationArguments = _quantization_arguments()

#: Everything that has options of `grpo.py`.
GROUPS = (RecipeArguments, QuantizationArguments, MXFP4GRPOConfig, ModelConfig)


def quantization_config(arguments: object) -> MXFP4RLConfig:
    """The `MXFP4RLConfig` that parsed `QuantizationArguments` describe; raises `ValueError` as it does."""
    options = {option.name: getattr(arguments, option.name) for option in fields(QuantizationArguments)}
    if isinstance(options["outlier_fallback"], str):
        try:
            options["outlier_fallback"] = float(options["outlier_fallback"])
        except ValueError:
            raise ValueError(f"outlier_fallback={options['outlier_fallback']!r} must be a number or none") from None
    for name in _YAML_OPTIONS:
        if isinstance(options[name], str):
            try:
                options[name] = yaml.safe_load(options[name])
            except yaml.YAMLError as error:
                raise ValueError(f"{name}={options[name]!r} is neither YAML nor JSON: {error}") from None
    return MXFP4RLConfig(**options)


def read_none(arguments: object) -> None:
    """The word "none" on the command line means no value."""
    for option in fields(arguments):
        value = getattr(arguments, option.name)
        if isinstance(value, str) and value.lower() in ("none", "null"):
            setattr(arguments, option.name, None)


def parse(argv: list[str]) -> tuple[RecipeArguments, MXFP4RLConfig, MXFP4GRPOConfig, ModelConfig]:
    """Parse the command line and the YAML file that `--config` names; without one, `tiny_cpu.yaml`.

    Raises `ValueError` for an option that does not exist, with the nearest names, or has a value outside its set.
    """
    if not any(word == "--config" or word.startswith("--config=") for word in argv):
        argv = [*argv, "--config", str(DEFAULT_CONFIG)]
    refuse_unknown(argv, {option.name: option.default for group in GROUPS for option in fields(group)})
    recipe, quantization, training, model = TrlParser(GROUPS).parse_args_and_config(argv)
    for arguments in (recipe, quantization, model):
        read_none(arguments)
    if model.load_in_4bit or model.load_in_8bit:
        raise ValueError("load_in_4bit and load_in_8bit are bitsandbytes' schemes; here `preset` says what is MXFP4")
    if recipe.tiny_architecture not in TINY_MODELS:
        raise ValueError(f"tiny_architecture={recipe.tiny_architecture!r} must be one of {', '.join(TINY_MODELS)}")
    scheme = quantization_config(quantization)
    if scheme.mode == "packed" and not recipe.full_precision:
        _check_packed(model)
    return recipe, scheme, training, model


def _check_packed(model: ModelConfig) -> None:
    """Said before a model is made or loaded, which takes time."""
    if not model.use_peft:
        raise ValueError(
            "mode='packed' freezes the weights; train adapters on them with --use_peft true, or use mode='qat'"
        )
    if model.use_dora:
        raise ValueError("use_dora needs full-precision weights, which mode='packed' does not keep; use mode='qat'")


def refuse_unknown(argv: list[str], defaults: dict[str, object]) -> None:
    """Raise `ValueError` for an option, on the command line or in the YAML file, that is not in ``defaults`` (options
    and their defaults): the parsers name what they do not know, but not what was meant."""
    known = list(defaults)
    allowed = {*known, *(f"no_{name}" for name in known if defaults[name] is True), "config", "help"}
    for word in argv:
        name = word[2:].split("=")[0].replace("-", "_")
        if word.startswith("--") and name not in allowed:
            raise ValueError(unknown_key_message("the command line", name, known))
    path = next((word.split("=", 1)[1] for word in argv if word.startswith("--config=")), None)
    path = path or next((argv[i + 1] for i, word in enumerate(argv[:-1]) if word == "--config"), None)
    if path is None:
        raise ValueError("--config needs the name of a YAML file")
    with open(path, encoding="utf-8") as file:
        options = yaml.safe_load(file) or {}
    if not isinstance(options, dict):
        raise ValueError(f"{path} must hold one `option: value` per line")
    for name in options:
        if name not in known and name != "env":
            raise ValueError(unknown_key_message(path, name, known))


def exit_on_wrong_options(parse_options: Callable[[list[str]], Parsed], argv: list[str], gpu_hint: str) -> Parsed:
    """What ``parse_options`` makes of ``argv``; a message instead of a traceback for wrong options, and for a missing
    GPU with ``gpu_hint`` added."""
    try:
        return parse_options(argv)
    except FileNotFoundError as error:
        raise SystemExit(f"error: no configuration file {error.filename}") from error
    except OSError as error:
        raise SystemExit(f"error: cannot read {error.filename}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise SystemExit(f"error: the configuration is not valid YAML: {error}") from error
    except (TypeError, ValueError) as error:
        no_gpu = "gpu" in str(error).lower() and not torch.cuda.is_available()
        hint = f"\nThis configuration is made for a GPU and none was found. {gpu_hint}" if no_gpu else ""
        raise SystemExit(f"error: {error}{hint}") from error
