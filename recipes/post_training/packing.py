# SPDX-License-Identifier: Apache-2.0
"""The policy of a run in 4 bits, beside what was saved, and the commands that serve and evaluate it."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from hf_mxfp4.checkpoint import add_evaluation, pack_checkpoint, read_header
from hf_mxfp4.recipes.common.reporting import tell
from hf_mxfp4.recipes.post_training.arguments import RecipeArguments
from hf_mxfp4.recipes.post_training.policy import Start
from hf_mxfp4.recipes.tasks import TaskArguments


def pack_policy(saved: Path, start: Start, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Pack a trained policy into the folder `policy-packed` beside it, with the evaluation of the run in its card; of
    an adapter on weights that were packed as they were loaded, pack these into `base-packed`. For one process.

    Returns what the summary says of it: ``packed``, the folder, or None where nothing can be packed, for a reason that
    is printed; and the bytes of the weights of the original and of these.
    """
    stored = start.stored
    options = start.options
    nothing = {"packed": None, "bytes_packed": None, "bytes_of_start": None}
    is_adapter = summary["adapter"]
    if not summary["n_quantized"]:
        return nothing
    if is_adapter and (options.quantization.mode != "packed" or stored.quantization):
        return nothing
    try:
        original = _folder_of(start.original, options.model.model_revision)
        if is_adapter:
            base = _folder_of(stored.weights, stored.revision)
            folder = saved.with_name("base-packed")
            pack_checkpoint(base, folder, options.quantization, overwrite=True)
        else:
            folder = saved.with_name("policy-packed")
            pack_checkpoint(saved, folder, overwrite=True)
    except (OSError, ValueError) as error:  # such as a scheme that is not packed
        tell("not packed", str(error))
        return nothing
    if not is_adapter and summary["accuracy_before"] is not None:
        add_evaluation(folder, summary)
    now = weight_bytes(folder)
    before = weight_bytes(original)
    tell("packed", f"{now / 1e6:.1f} MB of weights were {before / 1e6:.1f} MB at the start; in {folder}")
    return {"packed": str(folder), "bytes_packed": now, "bytes_of_start": before}


def _folder_of(name: str, revision: str | None) -> Path:
    """Return the folder of a checkpoint; of a name on the Hub, that in the cache."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    return Path(snapshot_download(name, revision=revision, local_files_only=True))


def weight_bytes(folder: Path) -> int:
    """Return the size of the weight files of a checkpoint."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _is_on_experts(adapter: Path) -> bool:
    tensors = read_header(adapter / "adapter_model.safetensors").tensors
    return any(".experts." in tensor.name for tensor in tensors)


def print_commands(summary: Mapping[str, Any], recipe: RecipeArguments) -> None:
    """Print the commands that serve and evaluate what a run saved."""
    saved = summary["saved"]
    packed = summary.get("packed")
    if saved is None or not summary["n_quantized"]:
        return
    if not summary["adapter"]:
        command = shlex.join(["vllm", "serve", packed or saved, "--dtype", "bfloat16"])
        tell("serve", f"{command}  (in an environment with vLLM and hf-mxfp4)")
        tell("serve", f"{shlex.join(['hf-mxfp4', 'export', saved, 'exported'])}  (for engines without hf-mxfp4)")
    elif packed is not None and _is_on_experts(Path(saved)):
        tell("serve", "vLLM takes no adapters on experts; merge them first (docs/lora.md)")
    elif packed is not None:
        words = ["vllm", "serve", packed, "--dtype", "bfloat16", "--enable-lora", "--lora-modules", f"policy={saved}"]
        tell("serve", shlex.join(words))
    evaluated = saved
    if packed is not None and not summary["adapter"]:
        evaluated = packed
    words = ["hf-mxfp4", "evaluate", evaluated, "--task", recipe.task_name]
    for option in fields(TaskArguments):
        value = getattr(recipe, option.name)
        if option.name not in ("task", "reward", "study") and value is not None:
            words += [f"--{option.name}", str(value)]
    if recipe.study.conversational is not None:
        words += ["--study", json.dumps({"conversational": recipe.study.conversational})]
    tell("evaluate", shlex.join(words))
