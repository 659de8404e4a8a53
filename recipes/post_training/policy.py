# SPDX-License-Identifier: Apache-2.0
"""The policy of a run: what it starts from, how that is prepared and loaded, and loaded again once it is saved."""

import contextlib
import functools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from peft import PeftModel
from peft.utils.error import NoMatchingPeftModuleError
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, Trainer
from transformers.integrations import deepspeed
from trl import get_peft_config
from trl.data_utils import maybe_apply_chat_template

from hf_mxfp4 import MXFP4RLConfig, dither_masters
from hf_mxfp4.files import replace_file, write_json
from hf_mxfp4.lab import TextOptions, rewrite_checkpoint, round_model
from hf_mxfp4.layers import MXFP4PackedLinear, gathered
from hf_mxfp4.prepare import smooth_loaded
from hf_mxfp4.recipes.common.checkpoints import Stored, differences, load_tokenizer, load_whole, read_stored
from hf_mxfp4.recipes.common.reporting import INPUT_ERRORS, errors_as_messages, tell
from hf_mxfp4.recipes.post_training.arguments import Options, StartStudy, check_packed
from hf_mxfp4.recipes.post_training.output import resume_choice
from hf_mxfp4.recipes.tasks import Task, build_tokenizer, of_task
from hf_mxfp4.recipes.tasks.tiny_model import TINY_MODELS, supervised_warmup


#: Options of adapters, and their names in PEFT's configuration.
_ADAPTER_OPTIONS = {
    "lora_r": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save", "use_rslora": "use_rslora", "use_dora": "use_dora",
}  # fmt: skip
#: Texts that rounding measures on, and tokens of each, as by default in the command line.
_ROUNDED_ON = 128
_LONGEST = 512
#: The usual learning rate, for weights of size 1, and how many layers the size is measured in.
_RATE_PER_SIZE = 5e-5
_LAYERS_MEASURED = 16


def find_start(options: Options) -> tuple[Stored | None, Options]:
    """Find out what a run starts from, before anything is made or loaded: what is stored, or None for a model that is
    still to be made; and the options with the scheme of the checkpoint where none was asked for. The adapter of a
    folder is continued. Ends with a message where the model is missing, or was saved with another scheme or adapter
    than what is named."""
    recipe, scheme, training, model = options
    name = model.model_name_or_path
    if name is None:
        return None, options
    with errors_as_messages(OSError, ValueError):
        stored = read_stored(name, revision=model.model_revision, trust_remote_code=training.trust_remote_code)
    if stored.adapter is not None:
        _check_adapter(name, stored.adapter, options)
        model.use_peft = True
    if stored.scheme is None or recipe.full_precision:
        return stored, options
    asked = recipe.named & {*vars(stored.scheme)}
    if not asked:
        tell("scheme", f"that of {name}, since no option names one")
        if stored.scheme.mode == "packed":
            with errors_as_messages(ValueError):
                check_packed(model)
    elif scheme != stored.scheme:
        differing = differences(stored.scheme, scheme)
        named = sorted(asked & {text.partition("=")[0] for text in differing} or asked)
        raise SystemExit(
            f"error: {name!r} was saved with another scheme: {', '.join(differing)}; give the same options, or leave "
            f"out {', '.join(named)} (of the command line or the YAML file) to take the scheme that it has"
        )
    stored_scheme = stored.scheme
    # This option says how masters are loaded, not what is stored.
    if "dither_ties" in asked:
        stored_scheme = replace(stored_scheme, dither_ties=scheme.dither_ties)
    return stored, options._replace(quantization=stored_scheme)


def _check_adapter(name: str, adapter: dict, options: Options) -> None:
    """End with a message where options of the adapter are named and differ from those that it has."""
    for option, key in _ADAPTER_OPTIONS.items():
        asked = getattr(options.model, option)
        has = adapter.get(key)
        if asked == "all-linear" or option not in options.recipe.named:
            continue
        if _without_order(asked) != _without_order(has):
            raise SystemExit(
                f"error: the adapter {name!r}, which is continued, has {key}={has}, not {option}={asked}; leave "
                f"{option} out, or start from its base {adapter.get('base_model_name_or_path')} to train a new adapter"
            )


def _without_order(value: Any) -> Any:
    """Return what options of adapters are compared by: lists of layers as sets, and None for all that is empty."""
    if isinstance(value, list):
        value = set(value)
    return value or None


def make_trainer(
    kind: type[Trainer], policy: PreTrainedModel | PeftModel, stored: Stored, options: Options, **given: Any
):
    """Make a trainer with the adapter that the options ask for, unless what is stored has one. Ends with a message for
    what the trainer refuses."""
    adapter = None
    if stored.adapter is None:
        adapter = get_peft_config(options.model)
    with errors_as_messages(*INPUT_ERRORS):
        try:
            return kind(policy, args=options.training, peft_config=adapter, **given)
        except NoMatchingPeftModuleError as error:
            linears = [name for name, module in policy.named_modules() if hasattr(module, "in_features")]
            names = sorted({name.rpartition(".")[2] for name in linears})
            raise ValueError(f"{error} The layers for --lora_target_modules are {', '.join(names)}") from error


class Start(NamedTuple):
    """What a run starts from.

    Attributes:
        stored: the weights or the adapter that are loaded.
        options: those of the run, with the scheme of ``stored``.
        origin: a name for it, with what was done to prepare it.
        original: the checkpoint in full precision that it was made of.
    """

    stored: Stored
    options: Options
    origin: str
    original: str


def load_task(options: Options, stored: Stored | None) -> Task:
    """Load the task of a run, with prompts in the form that the tokenizer of ``stored`` asks for. Ends with a message
    where it cannot be read."""
    with errors_as_messages(*INPUT_ERRORS):
        trust = options.training.trust_remote_code
        tokenizer = None
        if stored is not None:
            tokenizer = load_tokenizer(stored, trust_remote_code=trust)
        task = options.recipe.load_task(tokenizer)
    form = "chat messages, by the tokenizer's template"
    if isinstance(task.test["prompt"][0], str):
        form = "text"
    tell("task", f"{task.name}: {len(task.train)} training and {len(task.test)} test problems, prompts as {form}")
    return task


def prepare_start(stored: Stored | None, options: Options, task: Task | None, output: Path) -> Start:
    """Return what a run starts from: a small model made in the folder ``output`` where none is ``stored``, and weights
    there that are rounded if the options say so, or smoothed before they are packed."""
    tell("scheme", "full precision" if options.recipe.full_precision else options.quantization.describe())
    if stored is None:
        stored, name = _make_start(options, task, output / "base")
    elif stored.adapter is None:
        name = stored.source
    else:
        name = f"{stored.source}, an adapter on {stored.weights}"
    if not options.recipe.gptq and not _smooths_before_packing(stored, options):
        return Start(stored, options, name, stored.weights)
    prepared = output / "prepared"
    with errors_as_messages(*INPUT_ERRORS):
        if stored.adapter is not None or options.model.model_revision not in (None, "main"):
            raise ValueError(
                "gptq and smooth for packed weights read whole weights, of the main revision of a model on the Hub; "
                "give --gptq false --smooth false"
            )
        done = prepare_weights(stored.source, options, task, prepared)
    # Smoothed again, rounded weights would leave the grid.
    if options.quantization.smooth:
        options = options._replace(quantization=replace(options.quantization, smooth=False))
    return Start(read_stored(str(prepared)), options, f"{name}, {done}", stored.weights)


def _smooths_before_packing(stored: Stored, options: Options) -> bool:
    """Return whether weights are smoothed in a folder of their own: those that are packed one by one as they are
    loaded. Others are smoothed in memory, once all are loaded."""
    scheme = options.quantization
    is_plain = stored.adapter is None and stored.quantization is None
    if not is_plain or options.recipe.full_precision or scheme.mode != "packed" or not scheme.smooth:
        return False
    if options.training.trust_remote_code:
        tell("not smoothed", "a model with code of its own (trust_remote_code) is packed as it is")
        return False
    return True


def usual_learning_rate(policy: nn.Module, options: Options) -> float:
    """Return a learning rate of RL for a policy: 5e-5 of the size of its weights (the root mean square of linear
    layers), to one digit, and ten times as much for adapters. All processes call it together.

    A step of AdamW changes all weights by about the rate, be they large or small. SmolLM2-135M (size 0.2) learned best
    at 1e-5, Gemma 3 270M (0.04) at 1e-6, and at 5e-6 it forgot what it knew (docs/evidence.md).

    Raises `ValueError` for weights that are all zero or not loaded, at whose rate nothing would be learned.
    """
    layers = [layer for name, layer in policy.named_modules() if isinstance(layer, nn.Linear) and "lora_" not in name]
    measured = layers[:: math.ceil(len(layers) / _LAYERS_MEASURED)]
    rate = _RATE_PER_SIZE * math.sqrt(fmean(_mean_square(layer) for layer in measured))
    if options.model.use_peft:
        rate *= 10
    [rate] = broadcast_object_list([rate])
    if not rate:
        raise ValueError("the weights of the policy are zero or not loaded yet, so name a --learning_rate")
    return float(f"{rate:.0e}")


def _mean_square(layer: nn.Linear) -> float:
    """Return the mean square of a weight; 0 for one that this process has not loaded."""
    if isinstance(layer, MXFP4PackedLinear):
        return layer.dequantized_weight().float().square().mean().item()
    with gathered(layer.weight) as weight:
        return 0.0 if weight.is_meta else weight.float().square().mean().item()


def _make_start(options: Options, task: Task | None, folder: Path) -> tuple[Stored, str]:
    """Make a small model; return it and a name for it. A run that is resumed finds it in ``folder``."""
    study = options.recipe.study
    if resume_choice(options.training) is None or not (folder / "config.json").is_file():
        if PartialState().is_main_process:
            make_base_model(study, task, options.training.seed, folder)
        PartialState().wait_for_everyone()
    size = f"{study.tiny_num_layers} layers, width {study.tiny_hidden_size}"
    return read_stored(str(folder)), f"{study.tiny_architecture} made for this run ({size})"


def make_base_model(study: StartStudy, task: Task, seed: int, folder: Path) -> None:
    """Build, warm up and save a small full-precision model and its tokenizer."""
    tokenizer = build_tokenizer(task.name)
    model = TINY_MODELS[study.tiny_architecture](
        tokenizer,
        hidden_size=study.tiny_hidden_size,
        num_layers=study.tiny_num_layers,
        intermediate_size=2 * study.tiny_hidden_size,
        max_positions=2048,
        seed=seed,
    )
    tell("model", f"{study.tiny_architecture} with {model.num_parameters() / 1e6:.2f} M parameters is made")
    if study.sft_steps:
        sft = {"steps": study.sft_steps, "batch_size": study.sft_batch_size, "target_loss": 0.55}
        supervised_warmup(model, tokenizer, task.train, seed=seed, **sft)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prepare_weights(model: str, options: Options, task: Task | None, folder: Path) -> str:
    """Smooth a checkpoint into ``folder`` where the scheme says so, and then round it for its scheme, on the texts that
    are trained on, where the options do; return what was done. A run that is resumed finds it there. Raises
    `ValueError` for a checkpoint that is quantized, where nothing can be rounded, and for a folder that was prepared in
    another way."""
    recipe, scheme, training, _ = options
    text = getattr(recipe, "text", None)
    asked = {"model": model, "text": text, "gptq": recipe.gptq and scheme.describe(), "smooth": scheme.smooth}
    record = folder / "preparation.json"
    if PartialState().is_main_process and (resume_choice(training) is None or not record.is_file()):
        texts = None
        if recipe.gptq and text is None:
            texts = TextOptions(_write_texts(model, task, folder.with_suffix(".jsonl")), None, _ROUNDED_ON, _LONGEST)
        elif recipe.gptq:
            texts = TextOptions(text, recipe.text_field, _ROUNDED_ON, _LONGEST)
        change = functools.partial(_smooth_and_round, scheme=scheme)
        device = "cpu" if training.use_cpu else "auto"
        with _loading_alone():
            done = rewrite_checkpoint(model, folder, texts, change, device=device, overwrite=True)
        write_json(record, {"asked": asked, "done": done})
    PartialState().wait_for_everyone()
    prepared = json.loads(record.read_text())
    if asked != prepared["asked"]:
        raise ValueError(f"{folder} was prepared with {prepared['asked']}; resume with the same options")
    tell("prepared", f"{prepared['done']}; in {folder}")
    return prepared["done"]


@contextlib.contextmanager
def _loading_alone() -> Iterator[None]:
    """Within it one process loads a model by itself. Under ZeRO-3, `from_pretrained` waits for all otherwise."""
    known = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if known is not None:
            deepspeed.set_hf_deepspeed_config(known())


def _smooth_and_round(model: PreTrainedModel, batches: Sequence[torch.Tensor] | None, scheme: MXFP4RLConfig) -> str:
    done = []
    if scheme.smooth:
        smoothing = smooth_loaded(model)
        done.append("not smoothed" if smoothing is None else f"smoothed at {len(smoothing.places)} places")
    if batches is not None:
        rounded = round_model(model, batches, scheme)
        done.append(f"{len(rounded.layers)} layers rounded (GPTQ)")
    return ", ".join(done)


def _write_texts(model: str, task: Task, file: Path) -> str:
    """Write training problems with their completions as JSON lines."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = of_task(task.train.select(range(min(_ROUNDED_ON, len(task.train)))), "text")
    begin = tokenizer.decode(tokenizer("")["input_ids"])  # written again where texts are tokenized
    lines = []
    for row in rows:
        text = maybe_apply_chat_template(row, tokenizer)["text"]
        lines.append(json.dumps({"text": text.removeprefix(begin)}) + "\n")
    replace_file(file, "".join(lines))
    return str(file)


def load_policy(stored: Stored, options: Options) -> tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerBase]:
    """Load the policy under its scheme, and its tokenizer; end with a message when the checkpoint is unsuitable."""
    name = stored.source
    with errors_as_messages(OSError, ValueError, where=f"cannot load the model {name!r} under this scheme: "):
        trust = options.training.trust_remote_code
        tokenizer = load_tokenizer(stored, trust_remote_code=trust)
        policy = load_weights(stored, options)
        if stored.adapter is not None:
            policy = PeftModel.from_pretrained(policy, name, revision=stored.source_revision, is_trainable=True)
            tell("adapter", f"{name} is trained further, on {stored.weights}")
    return policy, tokenizer


def load_weights(stored: Stored, options: Options) -> PreTrainedModel:
    """Load the whole weights under the scheme of the run, without an adapter."""
    scheme = None
    if not options.recipe.full_precision:
        scheme = options.quantization
    model = load_whole(stored, scheme, dtype=options.model.dtype, **_loading_options(options))
    if options.recipe.study.dither_masters:
        report = dither_masters(model, options.training.seed)
        if report.n_weights == 0:
            raise ValueError(
                f"dither_masters moves nothing: {report}; it needs --dtype float32 and a 16-bit checkpoint"
            )
        tell("masters", str(report))
    return model


def load_saved(saved: Path, stored: Stored, options: Options) -> PreTrainedModel | PeftModel:
    """Load a policy that this run saved, or an adapter on the weights that it was trained on."""
    if options.model.use_peft:
        return PeftModel.from_pretrained(load_weights(stored, options), saved)
    return AutoModelForCausalLM.from_pretrained(saved, **_loading_options(options))


def _loading_options(options: Options) -> dict[str, Any]:
    return {
        "attn_implementation": options.model.attn_implementation,
        "trust_remote_code": options.training.trust_remote_code,
    }
