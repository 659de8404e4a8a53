# SPDX-License-Identifier: Apache-2.0
"""Saves over a checkpoint in a process that is killed (SIGKILL) at a random moment, again and again; prints as JSON
what was found in the folder after each kill.

    python run_killed_saves.py FOLDER TRIALS

Every save writes one number into all weights, so that a mixture of two checkpoints is seen at once. A process of its
own, because it forks.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from tiny_models import make_model
from transformers import AutoModelForCausalLM

import hf_mxfp4


SIZES = ["5GB", "30KB", "30KB", "60KB"]  # one file; several; as many again; fewer


def save(model, folder: Path, number: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
    model.save_pretrained(folder, max_shard_size=SIZES[number % len(SIZES)])


def save_until_killed(model, folder: Path, number: int, progress: int) -> None:
    while True:
        number += 1
        save(model, folder, number)
        os.write(progress, number.to_bytes(4, "little"))


def numbers_in(folder: Path) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.quantization_report.n_quantized == 14
    return sorted({value for parameter in model.parameters() for value in parameter.unique().tolist()})


def main(folder: Path, trials: int) -> list[dict]:
    make_model("qwen2").save_pretrained(folder / "base")
    # Whole numbers are numbers of bfloat16, and would be dithered as they are loaded.
    config = hf_mxfp4.MXFP4RLConfig(dither_ties=False)
    model = AutoModelForCausalLM.from_pretrained(folder / "base", quantization_config=config)
    target, rng, found = folder / "target", random.Random(0), []
    save(model, target, 0)
    (target / "tokenizer.json").write_text("{}")
    for _ in range(trials):
        last = int(numbers_in(target)[0])
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            save_until_killed(model, target, last, writer)
        os.close(writer)
        time.sleep(rng.uniform(0.0, 0.12))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        finished = [last]
        while number := os.read(reader, 4):
            finished.append(int.from_bytes(number, "little"))
        os.close(reader)
        found.append({"finished": finished[-1], "numbers": numbers_in(target), "left": len(list(target.glob(".s*")))})
    save(model, target, 1)
    found.append({"files": sorted(path.name for path in target.iterdir())})
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
