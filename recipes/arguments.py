# SPDX-License-Identifier: Apache-2.0
"""What `grpo.py` can be told, in YAML or on the command line."""

from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path

from trl import ModelConfig, TrlParser

from hf_mxfp4 import MXFP4GRPOConfig, MXFP4RLConfig


DEFAULT_CONFIG = Path(__file__).parent / "configs" / "tiny_cpu.yaml"


@dataclass
class RecipeArguments:
    """The task, the model made on the spot when none is named, and what is reported."""

    task: str = field(default="arithmetic", metadata={"help": "'arithmetic' (made on the spot) or 'gsm8k'."})
    dataset_name: str | None = field(default=None, metadata={"help": "Hub dataset; gsm8k: openai/gsm8k."})
    dataset_config: str | None = field(default=None, metadata={"help": "Its configuration; gsm8k: main."})
    train_file: str | None = field(default=None, metadata={"help": "JSON lines to train on instead of a Hub dataset."})
    test_file: str | None = field(default=None, metadata={"help": "JSON lines to evaluate on instead."})
    n_train: int | None = field(default=None, metadata={"help": "Rows of the train split to use; default all."})
    n_test: int | None = field(default=None, metadata={"help": "Rows of the test split to use; default all."})
    data_seed_split: int = field(default=0, metadata={"help": "Seed of the task's split and subsets."})
    conversational: bool = field(default=False, metadata={"help": "Send prompts as chat messages."})
    prompt_template: str | None = field(default=None, metadata={"help": "Prompt text with the field {question}."})

    full_precision: bool = field(default=False, metadata={"help": "Do not quantize: the baseline of this recipe."})
    tiny_hidden_size: int = field(default=128, metadata={"help": "Width of the model made on the spot."})
    tiny_num_layers: int = field(default=4, metadata={"help": "Its depth."})
    tiny_max_positions: int = field(default=512, metadata={"help": "Its longest sequence, in tokens."})
    sft_steps: int = field(default=250, metadata={"help": "Supervised steps on the task before RL; 0: none."})
    sft_batch_size: int = field(default=128, metadata={"help": "Sequences in a supervised step."})
    sft_learning_rate: float = field(default=1e-3, metadata={"help": "Peak learning rate of the supervised steps."})

    greedy_batch_size: int = field(default=128, metadata={"help": "Prompts in a batch of the greedy evaluation."})
    reload_check: int = field(
        default=64, metadata={"help": "Test prompts whose completions are compared after reloading; 0: no reload."}
    )
    samples_shown: int = field(default=3, metadata={"help": "Completions of the reloaded model to print."})
    overwrite: bool = field(default=False, metadata={"help": "Write into an output folder that is not empty."})


def _quantization_arguments() -> type:
    """The options of `MXFP4RLConfig` as a plain dataclass: argument parsers know no union of int and str."""
    parser_types = {"macro_block": str | None, "modules_to_not_convert": list[str] | None}
    specs = []
    for option in fields(MXFP4RLConfig):
        if option.init and option.name != "format_version":
            kind = parser_types.get(option.name, option.type)
            specs.append((option.name, kind, field(default=option.default, metadata=dict(option.metadata))))
    return make_dataclass("QuantizationArguments", specs)


QuantizationArguments = _quantization_arguments()


def quantization_config(arguments: object) -> MXFP4RLConfig:
    """The `MXFP4RLConfig` that parsed `QuantizationArguments` describe; raises `ValueError` as it does."""
    return MXFP4RLConfig(**{option.name: getattr(arguments, option.name) for option in fields(QuantizationArguments)})


def parse(argv: list[str]) -> tuple[RecipeArguments, MXFP4RLConfig, MXFP4GRPOConfig, ModelConfig]:
    """Parse the command line and the YAML file that `--config` names; without one, `tiny_cpu.yaml`.

    Raises `ValueError` for an option that does not exist or has a value outside its set.
    """
    if not any(word == "--config" or word.startswith("--config=") for word in argv):
        argv = [*argv, "--config", str(DEFAULT_CONFIG)]
    parser = TrlParser((RecipeArguments, QuantizationArguments, MXFP4GRPOConfig, ModelConfig))
    recipe, quantization, training, model = parser.parse_args_and_config(argv)
    return recipe, quantization_config(quantization), training, model
