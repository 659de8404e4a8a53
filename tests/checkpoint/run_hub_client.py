# SPDX-License-Identifier: Apache-2.0
"""Pushes to the Hub that the environment names, and pulls from it; prints what happened as JSON.

    python run_hub_client.py FOLDER REPOSITORY...

A process of its own: the client's settings, read when it was imported, are read again from the environment.
"""

import importlib
import json
import sys
import time
from pathlib import Path

import huggingface_hub
import peft
import torch
from packaging.version import parse
from transformers import AutoModelForCausalLM
from transformers.integrations.peft import MIN_PEFT_VERSION

import hf_mxfp4


IDS = torch.arange(12)[None]


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def failure(action, *args, **options) -> str:
    try:
        action(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def push(folder: Path) -> dict:
    from tiny_models import make_model

    time.sleep = lambda seconds: None  # between the client's attempts
    results: dict = {}
    make_model("qwen2", tie=True).save_pretrained(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(folder / "base", quantization_config=hf_mxfp4.MXFP4RLConfig())

    denied = {"repo_id": "org/denied", "token": "hf_wrong"}
    results["wrong token"] = failure(model.push_to_hub, **denied)
    results["wrong token, saving"] = failure(model.save_pretrained, folder / "kept", push_to_hub=True, **denied)

    results["broken"] = failure(model.push_to_hub, "org/broken")  # the server has been told to cut these uploads
    results["retried"] = failure(model.push_to_hub, "org/broken")

    model.push_to_hub("org/qat", commit_message="first", tags="extra")
    model.push_to_hub("org/qat", revision="dev")
    torch.save(logits(model), folder / "qat.pt")
    again = AutoModelForCausalLM.from_pretrained("org/qat")
    again.save_pretrained(folder / "again")

    packed = hf_mxfp4.pack(model)
    torch.save(logits(packed), folder / "packed.pt")
    packed.push_to_hub("org/packed", max_shard_size="20KB")
    packed.push_to_hub("org/single", max_shard_size="20KB")
    packed.push_to_hub("org/single")
    packed.push_to_hub("org/sharded")
    packed.push_to_hub("org/sharded", max_shard_size="20KB")
    (folder / "mine").mkdir()
    for name in ("notes.txt", "train.py", "adapter_config.json", "adapter_model.safetensors"):
        (folder / "mine" / name).write_text("not part of the model")
    packed.save_pretrained(folder / "mine", push_to_hub=True, repo_id="org/mine")
    for name in ("carded", "slow", "unreadable", "adapted"):
        packed.push_to_hub(f"org/{name}")
    packed.add_model_tags("of the model")
    packed.save_pretrained(folder / "tagged", push_to_hub=True, repo_id="org/tagged", tags="given")
    if parse(peft.__version__) >= parse(MIN_PEFT_VERSION):  # else transformers has no methods for adapters
        packed.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
        packed.push_to_hub("org/adapted")
        packed.save_pretrained(folder / "adapter", push_to_hub=True, repo_id="org/adapter", save_peft_format=False)
    return results


def pull(repositories: list[str]) -> dict:
    torch.load = None  # nothing may be unpickled
    pulled = {name: AutoModelForCausalLM.from_pretrained(name) for name in repositories}
    return {
        name: {"logits": logits(model).tolist(), "mode": model.config.quantization_config.mode}
        for name, model in pulled.items()
    }


if __name__ == "__main__":
    importlib.reload(huggingface_hub.constants)
    results = push(Path(sys.argv[1]))
    print(json.dumps([results, pull(sys.argv[2:])]))
