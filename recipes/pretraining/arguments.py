# SPDX-License-Identifier: Apache-2.0
"""Arms and options of `pretrain.py`.

An arm says which operands of which products are quantized, and by what. The named ones follow arXiv 2605.09825: the
forward product alone, then the gradient of the input, then that of the weight (progressively), and all three with each
stabiliser. Products that are not quantized run on full-precision operands, the master weight and the layer's input, and
not on the values of the forward product.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn
from transformers import TrainingArguments

from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig
from hf_mxfp4.numerics import FULL, GEMM_OPERANDS, REUSE
from hf_mxfp4.recipes.common.options import CONFIGS, build, check_mapping, read_command, read_file, read_yaml
from hf_mxfp4.utils import option
from mxfp4_kernels.scale_rules import SCALE_RULES


# ---- arms -----------------------------------------------------------------------------------------------------------

BASELINE = "baseline"
_FULL_DGRAD = {"grad": "full", "weight": "full"}
_FULL_WGRAD = {"grad": "full", "x": "full"}
_UNROTATED = {"rotation": "none"}
#: Options on top of `paper_b`; "{rule}" stands for the study's scale rule.
_NAMED: dict[str, dict[str, Any]] = {
    "fprop": {"dgrad": _FULL_DGRAD, "wgrad": _FULL_WGRAD},
    "fprop_dgrad": {"wgrad": _FULL_WGRAD},
    "all": {"wgrad": _UNROTATED},
    "all_sr": {"dgrad": {"grad": "{rule}+stochastic"}, "wgrad": {"grad": "{rule}+stochastic", **_UNROTATED}},
    "all_random16": {"wgrad": {"rotation": "random-16"}},
    "all_deterministic16": {"wgrad": {"rotation": "deterministic-16"}},
    "all_deterministic32": {"wgrad": {"rotation": "deterministic-32"}},
}
NAMED_ARMS = (BASELINE, *_NAMED)


@dataclass(frozen=True)
class Arm:
    """One way to train: its name in the results, and the scheme, `None` for the baseline."""

    name: str
    config: MXFP4RLConfig | None

    def seeded(self, seed: int) -> MXFP4RLConfig | None:
        """Return the scheme of a run with this seed, which random rounding and signs follow."""
        if self.config is None or not self.config.gemms().is_random:
            return self.config
        return replace(self.config, stochastic_seed=seed)


def choose_arms(names: Sequence[str], extra: Mapping[str, Mapping[str, Any]] | None, scale_rule: str) -> list[Arm]:
    """Return the arms of a study, the baseline first.

    ``extra`` has further arms, each a mapping of options of `MXFP4RLConfig`; ``scale_rule`` is that of the named arms.
    Raises `ValueError` for an unknown or repeated name, a study without baseline, or options that it refuses.
    """
    extra = {} if extra is None else extra
    if not isinstance(extra, Mapping) or not all(isinstance(options, Mapping) for options in extra.values()):
        raise ValueError(f"extra_arms={extra!r} must map names to options of MXFP4RLConfig")
    same = [name for name in extra if name in NAMED_ARMS]
    if same:
        raise ValueError(f"extra_arms has {', '.join(same)}, the name of a built-in arm; give it another")
    check_mapping(dict.fromkeys(names), "arms", [*NAMED_ARMS, *extra])
    if BASELINE not in names or len(set(names)) != len(names):
        raise ValueError(f"arms={list(names)} must be distinct, with {BASELINE!r}, which the others are compared with")
    others = [name for name in names if name != BASELINE]
    return [Arm(BASELINE, None), *(_arm(name, extra.get(name), scale_rule) for name in others)]


def _arm(name: str, options: Mapping[str, Any] | None, scale_rule: str) -> Arm:
    """Return an arm with these ``options``; without them, a named one."""
    if options is None:
        options = {"preset": "paper_b", "scale_rule": scale_rule}
        for key, value in _NAMED[name].items():
            if isinstance(value, dict):
                value = {operand: text.replace("{rule}", scale_rule) for operand, text in value.items()}
            options[key] = value
    try:
        return Arm(name, MXFP4RLConfig(**options))
    except (TypeError, ValueError) as error:
        raise ValueError(f"arm {name}: {error}") from None


def quantized_operands(model: nn.Module) -> dict[str, int]:
    """Count in how many layers each operand (``"fprop.x"``, ... ``"wgrad.x"``) is quantized for its product."""
    counts = {f"{gemm}.{operand}": 0 for gemm, operands in GEMM_OPERANDS.items() for operand in operands}
    for module in model.modules():
        if isinstance(module, MXFP4Linear):
            for gemm, names in GEMM_OPERANDS.items():
                product = getattr(module.gemms, gemm)
                for name, scheme in zip(names, (product.left, product.right), strict=True):
                    counts[f"{gemm}.{name}"] += scheme not in (FULL, REUSE)
    return counts


# ---- options ---------------------------------------------------------------------------------------------------------

DEFAULT_CONFIG = CONFIGS / "pretrain_tiny_cpu.yaml"
CORPORA = ("generated", "hub")
TARGET_FRACTION = 0.9

_OTHER_RULES = ", ".join(repr(rule) for rule in SCALE_RULES if rule != "floor")


@dataclass
class StudyArguments:
    """Arms, seeds, the corpus and the model."""

    arms: list[str] = option([BASELINE, "all"], f"Arms to train, of {', '.join(NAMED_ARMS)} and those in extra_arms.")
    extra_arms: str | None = option(None, "Further arms: a mapping of names to options of MXFP4RLConfig.")
    seeds: list[int] = option([0], "One run of each arm per seed: weights, data order and rounding follow the seed.")
    scale_rule: str = option("floor", f"Of the named arms: 'floor' (OCP; the paper has none), {_OTHER_RULES}.")
    extra_tokens: float = option(0.4, "Share of max_steps that every arm trains longer, to reach the baseline's loss.")

    corpus: str = option("generated", "'generated', or 'hub' (streamed).")
    dataset_name: str = option("allenai/c4", "Hub dataset for corpus 'hub'.")
    dataset_config: str | None = option("en", "Its configuration.")
    text_column: str = option("text", "Where its text is.")
    tokenizer_name: str | None = option(None, "Of a checkpoint; by default bytes, for generated text its characters.")
    sequence_length: int = option(128, "Tokens in a sequence; documents are packed.")
    validation_sequences: int = option(32, "Sequences in the fixed validation set.")

    hidden_size: int = option(128, "Width of the model.")
    num_layers: int = option(4, "Its depth.")
    intermediate_size: int = option(256, "Width of its MLPs.")
    num_heads: int = option(4, "Query heads.")
    num_kv_heads: int = option(4, "Key and value heads.")
    initializer_range: float = option(0.02, "Standard deviation of initial weights; narrow models: 1 / sqrt(width).")
    tie_word_embeddings: bool = option(False, "One matrix for embedding and head.")

    def __post_init__(self):
        if not 0 <= self.extra_tokens < 10:
            raise ValueError(f"extra_tokens={self.extra_tokens} must be a share of max_steps, 0 or more")
        if self.corpus not in CORPORA:
            raise ValueError(f"corpus={self.corpus!r} must be one of {', '.join(CORPORA)}")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds={self.seeds} must be distinct numbers, at least one")


SIZES = "hidden_size num_layers intermediate_size num_heads num_kv_heads tie_word_embeddings initializer_range".split()
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
        training = self.training
        return training.train_batch_size * training.gradient_accumulation_steps * training.world_size

    @property
    def tokens_per_step(self) -> int:
        """Tokens in an optimizer step, over all processes."""
        return self.sequences_per_step * self.options.sequence_length

    @property
    def precision(self) -> str:
        """What the baseline, and whatever is not quantized, computes in."""
        if self.training.bf16:
            return "BF16"
        return "FP16" if self.training.fp16 else "full precision (float32)"

    def scheme_text(self, arm: Arm) -> str:
        """Describe what an arm does, in one line."""
        return self.precision if arm.config is None else arm.config.describe()

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
    given = read_command(argv, groups)
    file = read_file(given.pop("config", DEFAULT_CONFIG), groups)
    options, training = build(groups, {**file, **given})
    if training.max_steps < 1:
        raise ValueError("max_steps must be the number of optimizer steps of the token budget")
    if training.eval_steps is None or training.eval_steps < 1:
        raise ValueError("eval_steps must be the number of steps between evaluations, at least 1")
    arms = choose_arms(options.arms, read_yaml("extra_arms", options.extra_arms), options.scale_rule)
    return Study(options, training, tuple(arms))
