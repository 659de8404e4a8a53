# SPDX-License-Identifier: Apache-2.0
"""What `grpo.py` can be told, in YAML or on the command line."""

from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import NamedTuple

from trl import ModelConfig

from hf_mxfp4 import MXFP4GRPOConfig, MXFP4RLConfig
from recipes.common.options import Command, exit_on_wrong_options, parse_command, read_command, read_none, read_yaml
from recipes.common.stored import is_adapter
from recipes.common.terminal import errors_as_messages, tell
from recipes.tasks import TASKS, Task, load_task
from recipes.tasks.file import SCORES
from recipes.tasks.tiny_model import TINY_MODELS


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
    prompt_column: str | None = field(default=None, metadata={"help": "file: column of the prompts; prompt."})
    answer_column: str | None = field(default=None, metadata={"help": "file: column of the answers; answer."})
    score: str | None = field(
        default=None,
        metadata={
            "help": f"file: what is right, {', '.join(SCORES)} or FILE.py:function, called as f(completion, answer)."
        },
    )
    reward: str | None = field(
        default=None,
        metadata={
            "help": "FILE.py:function in place of the task's reward, called as f(completions, answer, **kwargs)."
        },
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
    #: The options that the command line or the YAML file names.
    named: frozenset[str] = field(default=frozenset(), init=False)


_SAME_NAME = (
    "train_file test_file dataset_name dataset_config n_train n_test prompt_template conversational problem_count "
    "problem_steps prompt_column answer_column score reward"
).split()
#: Options of a recipe that make its task, to the arguments of `load_task`.
TASK_OPTIONS = {"task": "name", "data_seed_split": "seed", **{name: name for name in _SAME_NAME}}

#: Options of `MXFP4RLConfig` that are mappings or lists of them: nested in a YAML file, as YAML or JSON on the command
#: line.
_YAML_OPTIONS = ("fprop", "dgrad", "wgrad")


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

#: Options that mean another model or task than those of the demo.
OTHER_THAN_THE_DEMO = ("model_name_or_path", "train_file", "test_file", "dataset_name")
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
        options[name] = read_yaml(name, options[name])
    return MXFP4RLConfig(**options)


class Options(NamedTuple):
    """Everything that a run of `grpo.py` was told."""

    recipe: RecipeArguments
    quantization: MXFP4RLConfig
    training: MXFP4GRPOConfig
    model: ModelConfig


def parse(argv: list[str]) -> Options:
    """Parse the command line and the YAML file that `--config` names; without one, and without another model or task
    than the demo's, `tiny_cpu.yaml`.

    A preset or mode on the command line resets the options of the scheme that the file has. Raises `ValueError` for an
    option that does not exist, with the nearest names, or has a value outside its set.
    """
    command = read_command(argv, GROUPS)
    if command.path is None:
        _read_demo(command)
    named = command.named
    command.keep_scheme()
    # The task's own, and not TRL's, where nobody says how long completions may be.
    command.file.setdefault("max_completion_length", None)
    recipe, quantization, training, model = parse_command(command, GROUPS)
    recipe.named = named
    for arguments in (recipe, quantization, model):
        read_none(arguments)
    if model.load_in_4bit or model.load_in_8bit:
        raise ValueError("load_in_4bit and load_in_8bit are bitsandbytes' schemes; here `preset` says what is MXFP4")
    if recipe.tiny_architecture not in TINY_MODELS:
        raise ValueError(f"tiny_architecture={recipe.tiny_architecture!r} must be one of {', '.join(TINY_MODELS)}")
    scheme = quantization_config(quantization)
    if scheme.mode == "packed" and not recipe.full_precision:
        check_packed(model)
    return Options(recipe, scheme, training, model)


def _read_demo(command: Command) -> None:
    """Take the options of the demo, unless it is another model or task that is to be trained."""
    given = command.given
    others = ["task"] if given.get("task", "arithmetic") != "arithmetic" else []
    others += [name for name in OTHER_THAN_THE_DEMO if given.get(name) is not None]
    if not others:
        command.read(DEFAULT_CONFIG, [option.name for group in GROUPS for option in fields(group)])
        return
    tell(
        "options",
        f"no --config, and --{others[0]} is not the demo's: options that are not named have their defaults, and not "
        f"those of {DEFAULT_CONFIG.name}",
    )


def check_packed(model: ModelConfig) -> None:
    """Raise `ValueError` where nothing could be trained on packed weights, before a model is made or loaded."""
    if not model.use_peft and not (model.model_name_or_path and is_adapter(model)):
        raise ValueError(
            "mode='packed' freezes the weights; train adapters on them with --use_peft true, or use mode='qat'"
        )
    if model.use_dora:
        raise ValueError("use_dora needs full-precision weights, which mode='packed' does not keep; use mode='qat'")


# ---- messages instead of tracebacks ---------------------------------------------------------------------------------


def parse_or_exit(argv: list[str]) -> Options:
    """Parsed arguments; a message instead of a traceback for wrong options and for a missing GPU."""
    return exit_on_wrong_options(
        parse,
        argv,
        "Run it on a GPU machine, or on the CPU with --use_cpu true (and a model small enough for it); with no options "
        "at all a small model trains there.",
    )


def load_task_or_exit(recipe: RecipeArguments, training: MXFP4GRPOConfig) -> Task:
    """The task, whose longest completion fills in what ``training`` leaves open. A message about data that is missing
    or malformed, or about lengths that do not fit together, before a model is made."""
    options = {argument: getattr(recipe, option) for option, argument in TASK_OPTIONS.items()}
    with errors_as_messages(ImportError, OSError, RuntimeError, ValueError):
        task = load_task(options.pop("name"), **options)
    training.max_completion_length = training.max_completion_length or task.max_completion_length
    with errors_as_messages(ValueError):
        training.check_overlong_buffer()
    return task
