# SPDX-License-Identifier: Apache-2.0
"""Options of `pretrain.py`, in YAML or on the command line."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from recipes.common.options import build, exit_on_wrong_options, option, read_command, read_file, read_yaml

from .arms import BASELINE, NAMED_ARMS, Arm, choose_arms


DEFAULT_CONFIG = Path(__file__).parents[1] / "configs" / "pretrain_tiny_cpu.yaml"
CORPORA = ("generated", "files", "hub")
_NO_RESETS = "resets of oscillating weights made no difference (docs/backward.md); leave it out"
#: Options that are gone, see [`recipes.common.options`].
REMOVED = {
    "backend": ("auto", "give it in extra_arms, as an option of MXFP4RLConfig"),
    "corpus_seed": (0, "the generated language is always that of seed 0"),
    "oscireset_start": (0.6, _NO_RESETS),
    "oscireset_ratio": (8.0, _NO_RESETS),
    "oscireset_period": (200, _NO_RESETS),
    "oscireset_window": (50, _NO_RESETS),
    "target_fraction": (0.9, "the target is the baseline's loss after 0.9 of max_steps"),
    "validation_split": ("validation", "use a dataset with a split 'validation', or corpus: files"),
}
TARGET_FRACTION = 0.9


@dataclass
class StudyArguments:
    """Arms, seeds, the corpus and the model."""

    arms: list[str] = option(
        [BASELINE, "all"], f"Arms to train, of {', '.join(NAMED_ARMS)} and the names in extra_arms."
    )
    extra_arms: str | None = option(None, "Further arms: a mapping of names to options of MXFP4RLConfig.")
    seeds: list[int] = option(
        [0], "One run of every arm for each: initial weights, data order and random rounding follow it."
    )
    scale_rule: str = option(
        "floor", "Of the named arms: 'floor' (OCP; the paper does not say), 'rceil', 'even' or 'mse'."
    )
    extra_tokens: float = option(
        0.4,
        "How much longer than max_steps every arm trains, as a share of it, so that one that needs more "
        "tokens than the baseline can still reach its loss. The learning rate follows steps alone, never the "
        "arm.",
    )

    corpus: str = option("generated", "'generated', 'files' (text or JSON lines) or 'hub' (streamed).")
    data_files: list[str] | None = option(None, "Files to train on: .txt, .json, .jsonl.")
    validation_files: list[str] | None = option(None, "Files to validate on, of the same kind.")
    dataset_name: str = option("allenai/c4", "Hub dataset for corpus 'hub'.")
    dataset_config: str | None = option("en", "Its configuration.")
    text_column: str = option("text", "Where the text is, in JSON lines and Hub datasets.")
    tokenizer_name: str | None = option(
        None, "Tokenizer of a checkpoint; by default bytes, for the generated corpus its characters."
    )
    sequence_length: int = option(128, "Tokens in a sequence; documents are packed.")
    validation_sequences: int = option(32, "Sequences in the fixed validation set.")

    hidden_size: int = option(128, "Width of the model.")
    num_layers: int = option(4, "Its depth.")
    intermediate_size: int = option(256, "Width of its MLPs.")
    num_heads: int = option(4, "Query heads.")
    num_kv_heads: int = option(4, "Key and value heads.")
    initializer_range: float = option(
        0.02, "Standard deviation of initial weights; 1 / sqrt(width) suits narrow models."
    )
    tie_word_embeddings: bool = option(False, "One matrix for embedding and head.")

    def __post_init__(self):
        if not 0 <= self.extra_tokens < 10:
            raise ValueError(f"extra_tokens={self.extra_tokens} must be a share of max_steps, 0 or more")
        if self.corpus not in CORPORA:
            raise ValueError(f"corpus={self.corpus!r} must be one of {', '.join(CORPORA)}")
        files = (bool(self.data_files), bool(self.validation_files))
        if files != ((True, True) if self.corpus == "files" else (False, False)):
            raise ValueError("corpus='files' needs data_files and validation_files, and they need corpus='files'")
        if self.corpus == "generated" and self.tokenizer_name:
            raise ValueError("the generated corpus has its own tokenizer; leave tokenizer_name out")
        for name in ("sequence_length", "validation_sequences"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 2")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds={self.seeds} must be distinct numbers, at least one")


#: Options that a study can be continued with others of: they choose runs, or are part of an arm's scheme.
_FREE = ("arms", "extra_arms", "seeds", "scale_rule")
#: Options of the trainer that a result depends on.
_TRAINING = (
    "max_steps per_device_train_batch_size gradient_accumulation_steps learning_rate lr_scheduler_type "
    "lr_scheduler_kwargs warmup_steps weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm optim bf16 fp16 "
    "eval_steps"
).split()


@dataclass(frozen=True)
class Study:
    """A parsed study: options, trainer options, and arms with the baseline first."""

    options: StudyArguments
    training: TrainingArguments
    arms: tuple[Arm, ...]

    @property
    def total_steps(self) -> int:
        """Steps of every run: `max_steps` and the extra ones, up to the next evaluation."""
        steps = self.training.max_steps * (1 + self.options.extra_tokens)
        every = int(self.training.eval_steps)
        return -int(-round(steps, 6) // every) * every

    @property
    def sequences_per_step(self) -> int:
        """Sequences in an optimizer step, over all processes."""
        t = self.training
        return t.train_batch_size * t.gradient_accumulation_steps * t.world_size

    @property
    def tokens_per_step(self) -> int:
        """Tokens in an optimizer step, over all processes."""
        return self.sequences_per_step * self.options.sequence_length

    @property
    def budget_tokens(self) -> int:
        """Tokens in `max_steps`."""
        return self.training.max_steps * self.tokens_per_step

    @property
    def precision(self) -> str:
        """What the baseline, and whatever is not quantized, computes in."""
        return "BF16" if self.training.bf16 else "FP16" if self.training.fp16 else "full precision (float32)"

    def scheme_text(self, arm: Arm) -> str:
        """Describe what an arm does, in one line."""
        if arm.config is None:
            return self.precision
        return arm.config.describe()

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that a run's result depends on, but for its arm and seed; JSON."""
        options = {f.name: getattr(self.options, f.name) for f in fields(self.options) if f.name not in _FREE}
        training = self.training.to_dict()
        return {**options, **{name: training[name] for name in _TRAINING}, "world_size": self.training.world_size}


def parse(argv: list[str]) -> Study:
    """Parse the command line and the YAML file that `--config` names; without one, `pretrain_tiny_cpu.yaml`.

    Raises `ValueError` for an option that does not exist, with the nearest names, or has a value outside its set.
    """
    groups = (StudyArguments, TrainingArguments)
    given = read_command(argv, groups, removed=REMOVED)
    file = read_file(Path(given.pop("config", None) or DEFAULT_CONFIG), groups, REMOVED)
    options, training = build(groups, {**file, **given})
    if training.max_steps < 1:
        raise ValueError("max_steps must be the number of optimizer steps of the token budget")
    if training.eval_steps is None or training.eval_steps < 1:
        raise ValueError("eval_steps must be the number of steps between evaluations, at least 1")
    arms = choose_arms(options.arms, read_yaml("extra_arms", options.extra_arms), options.scale_rule)
    return Study(options, training, tuple(arms))


def parse_or_exit(argv: list[str]) -> Study:
    """Parse as [`parse`]; end with a message for wrong options and for a missing GPU."""
    return exit_on_wrong_options(parse, argv, "On a CPU use pretrain_tiny_cpu.yaml or pretrain_study_cpu.yaml.")
