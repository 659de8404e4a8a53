# SPDX-License-Identifier: Apache-2.0
"""The policy of a run: what it starts from, how it is loaded, and how it is loaded again once it is saved."""

from pathlib import Path

from accelerate import PartialState
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from recipes.common.terminal import tell
from recipes.post_training.arguments import Options
from recipes.post_training.output_folder import resume_choice
from recipes.tasks import Task, build_tokenizer
from recipes.tasks.tiny_model import TINY_MODELS, supervised_warmup


def starting_point(options: Options, task: Task, folder: Path) -> tuple[str, str]:
    """The model to start from and what to call it: the one that was named, or a small one made in ``folder``."""
    named = options.model.model_name_or_path
    if named is not None:
        return named, named
    recipe = options.recipe
    size = f"{recipe.tiny_num_layers} layers, width {recipe.tiny_hidden_size}"
    return str(make_base_model(options, task, folder)), f"{recipe.tiny_architecture} made on the spot ({size})"


def make_base_model(options: Options, task: Task, folder: Path) -> Path:
    """Build, warm up and save a small full-precision model and its tokenizer; an existing one is reused on resume."""
    recipe, training = options.recipe, options.training
    if resume_choice(training) is not None and (folder / "config.json").is_file():
        return folder
    if PartialState().is_main_process:
        tokenizer = build_tokenizer(task.name)
        model = TINY_MODELS[recipe.tiny_architecture](
            tokenizer,
            hidden_size=recipe.tiny_hidden_size,
            num_layers=recipe.tiny_num_layers,
            intermediate_size=2 * recipe.tiny_hidden_size,
            max_positions=recipe.tiny_max_positions,
            seed=training.seed,
        )
        size = f"{model.num_parameters() / 1e6:.2f} M parameters"
        tell("model", f"{recipe.tiny_architecture} with {size}, made on the spot")
        if recipe.sft_steps:
            supervised_warmup(
                model,
                tokenizer,
                task.train,
                steps=recipe.sft_steps,
                batch_size=recipe.sft_batch_size,
                learning_rate=recipe.sft_learning_rate,
                seed=training.seed,
                target_loss=recipe.sft_target_loss,
            )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    PartialState().wait_for_everyone()
    return folder


def load_policy(source: str, options: Options) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The policy under its scheme, and its tokenizer; a message when the checkpoint is missing or unsuitable."""
    recipe, quantization, training, model_args = options
    if source.startswith((".", "/", "~")) and not Path(source).is_dir():
        raise SystemExit(f"error: cannot load the model {source!r}: there is no such folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source,
            revision=model_args.model_revision,
            padding_side="left",
            trust_remote_code=training.trust_remote_code,
        )
        policy = AutoModelForCausalLM.from_pretrained(
            source,
            revision=model_args.model_revision,
            dtype=model_args.dtype,
            attn_implementation=model_args.attn_implementation,
            trust_remote_code=training.trust_remote_code,
            quantization_config=None if recipe.full_precision else quantization,
        )
    except OSError as error:
        raise SystemExit(
            f"error: cannot load the model {source!r}: {error}\nGive --model_name_or_path a local folder, or a Hub id "
            "while the Hub is reachable; leave it out to make a small model on the spot."
        ) from error
    except ValueError as error:
        raise SystemExit(f"error: cannot load the model {source!r} under this scheme: {error}") from error
    carried = getattr(policy.config, "quantization_config", None)
    if not recipe.full_precision and carried != quantization:
        raise SystemExit(
            f"error: {source!r} was saved under the scheme {carried.describe()} (mode {carried.mode!r}), not "
            f"{quantization.describe()} (mode {quantization.mode!r}); give the same options, or remove "
            "quantization_config from its config.json"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return policy, tokenizer


def load_saved(saved: Path, source: str, options: Options) -> PreTrainedModel | PeftModel:
    """A policy that this run saved, or an adapter on the model ``source`` that it was trained on."""
    if options.model.use_peft:
        base, _ = load_policy(source, options)
        return PeftModel.from_pretrained(base, saved)
    return AutoModelForCausalLM.from_pretrained(
        saved,
        attn_implementation=options.model.attn_implementation,
        trust_remote_code=options.training.trust_remote_code,
    )
