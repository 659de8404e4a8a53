# SPDX-License-Identifier: Apache-2.0
"""One flipped bit, anywhere in the files of a checkpoint: `verify_folder` names it. Loading, which reads headers and
the index but no checksums, names it or is not affected, unless it is in the data of a tensor."""

import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from tiny_models import make_model
from transformers import AutoModelForCausalLM

import hf_mxfp4
from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint import verify_folder


IDS = torch.arange(8)[None]
INDEX = "model.safetensors.index.json"
MODES, PLACES = ["qat", "packed"], ["header", "data", "index"]


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Checkpoints in several files, and what is loaded from them."""
    base = tmp_path_factory.mktemp("flips")
    make_model("qwen2", layers=1, hidden=32, intermediate=64).save_pretrained(base / "base")
    result = {}
    for mode, size in zip(MODES, ("20KB", "7KB"), strict=True):
        model = AutoModelForCausalLM.from_pretrained(base / "base", quantization_config=MXFP4RLConfig())
        model = hf_mxfp4.pack(model) if mode == "packed" else model
        model.save_pretrained(base / mode, max_shard_size=size)
        assert len(list((base / mode).glob("*.safetensors"))) in (3, 4)
        result[mode] = base / mode, contents(base / mode)
    return result


def contents(folder: Path) -> dict[str, bytes]:
    """All bits of the model in a folder, and of its logits."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        tensors = {**model.state_dict(), "logits": model(IDS).logits}
    return {
        name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()
    }


def flip(folder: Path, place: str, rng: random.Random) -> Path:
    """Flip one bit in the header, with its length, or in the data of a file, or in the index; the file."""
    files = [folder / INDEX] if place == "index" else sorted(folder.glob("*.safetensors"))
    file = rng.choice(files)
    content = bytearray(file.read_bytes())
    end = 8 + int.from_bytes(content[:8], "little")
    first, last = {"header": (0, end), "data": (end, len(content)), "index": (0, len(content))}[place]
    content[rng.randrange(first, last)] ^= 1 << rng.randrange(8)
    file.write_bytes(content)
    return file


def names_of_damage(folder: Path, file: Path, original: Path) -> set[str]:
    """Words of which one must be in an error: the file, or what its index has and the undamaged one has not."""
    if file.name != INDEX:
        return {file.name}
    words = [set(), set()]
    for found, path in zip(words, (original / INDEX, folder / INDEX), strict=True):
        try:
            places = json.loads(path.read_text())["weight_map"]
            found |= places.keys() | set(places.values())
        except (ValueError, KeyError, AttributeError):
            pass
    return {INDEX} | (words[1] - words[0]) | (words[0] - words[1])


def outcome(mode: str, place: str, seed: int, originals, folder: Path) -> str:
    """Flip a bit and load and verify what is left: what loading did, "named" or "harmless"; fails for anything else."""
    original, expected = originals[mode]
    shutil.copytree(original, folder)
    file = flip(folder, place, random.Random(f"{mode} {place} {seed}"))
    words = names_of_damage(folder, file, original)
    problems = [problem.reason for problem in verify_folder(folder).problems]
    assert problems and all(any(word in problem for word in words) for problem in problems), problems
    if place == "data":
        return "named"
    try:
        loaded = contents(folder)
    except (ValueError, OSError) as error:
        assert any(word in str(error) for word in words), f"{type(error).__name__}: {error}"
        return "named"
    same = loaded == expected
    assert same, f"{mode} {place} {seed} loads as another model"
    return "harmless"


def drawn(count: int, seed: int) -> list[tuple[str, str, int]]:
    return [(MODES[i % 2], PLACES[i // 2 % 3], seed + i) for i in range(count)]


@pytest.mark.parametrize(("mode", "place", "seed"), drawn(36, 10_000))
def test_a_flipped_bit(originals, tmp_path, mode, place, seed):
    outcome(mode, place, seed, originals, tmp_path / "model")


@pytest.mark.large
def test_a_thousand_flipped_bits(originals, tmp_path):
    counts = Counter()
    for mode, place, seed in drawn(1000, 0):
        counts[place, outcome(mode, place, seed, originals, tmp_path / str(seed))] += 1
        shutil.rmtree(tmp_path / str(seed))
    # In the index, sizes are for nobody to rely on.
    assert (counts.total(), counts["data", "named"]) == (1000, 334)
    assert counts["header", "named"] > 200 and counts["index", "named"] > 300
