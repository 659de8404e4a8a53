# SPDX-License-Identifier: Apache-2.0
"""What an exported checkpoint predicts without this package; writes `benchmarks/results/export_perplexity.json`.

    python -m benchmarks.export_perplexity --model SmolLM2-135M-Instruct --text gsm8k/test.jsonl

Perplexity of a folder's model as it is, packed on load (``mode="packed"``) under the scheme of the format, and exported
with `hf-mxfp4 export` to compressed-tensors and loaded by plain transformers in a process without this package; and the
same of a checkpoint that was packed under the default scheme first, and so was quantized twice. Weights alone are
quantized, products are in bfloat16.
"""

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import variance

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_mxfp4 import MXFP4RLConfig, QuantScheme
from hf_mxfp4.backends.select import dequantize
from hf_mxfp4.checkpoint.convert.costs import LayerCost
from hf_mxfp4.gemm import packed_tensor

from . import perplexity
from .records import RESULTS, made, option_parser, write


PACKAGES = ("torch", "transformers", "compressed-tensors")
#: The scale rules that are exported.
RULES = ("even", "rceil")

Losses = Sequence[Sequence[float]]


def in_memory(model: Path, texts: list[str], options: dict | None) -> tuple[Losses, float | None]:
    """Losses of the model as it is, or packed as it is loaded; in the second case its weights' SQNR in decibels."""
    config = None if options is None else MXFP4RLConfig(mode="packed", preset="w4a16", **options)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, quantization_config=config)
    found = perplexity.losses(loaded.eval(), AutoTokenizer.from_pretrained(model), texts)
    return found, None if config is None else loaded.quantization_report.sqnr_db


def without_the_package(folder: Path, texts: list[str]) -> Losses:
    """Losses of a checkpoint in a new process that cannot import hf_mxfp4."""
    with tempfile.TemporaryDirectory() as temporary:
        given, out = Path(temporary, "texts.json"), Path(temporary, "losses.json")
        given.write_text(json.dumps(texts))
        _run([sys.executable, "-I", perplexity.__file__, str(folder), str(given), str(out)])
        return json.loads(out.read_text())


def convert(*arguments: str | Path) -> None:
    """Run a command of `hf-mxfp4`."""
    _run([sys.executable, "-m", "hf_mxfp4.cli", *map(str, arguments), "--json"])


def sqnr_db(model: Path, exported: Path) -> float:
    """The SQNR of exported weights against those of the full-precision ``model``, in decibels, from the files alone."""
    original, stored = tensors_in(model), tensors_in(exported)
    cost = LayerCost("all", "packed")
    for name in [name.removesuffix("_packed") for name in stored if name.endswith(".weight_packed")]:
        packed = {"weight": stored[f"{name}_packed"], "weight_scale": stored[f"{name}_scale"]}
        values = packed_tensor(packed, original[name].shape[1], QuantScheme(), torch.float32)
        cost.add(original[name], dequantize(values, torch.float32))
    return cost.sqnr_db


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update(load_file(file))
    return found


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


def difference(found: Losses, other: Losses) -> tuple[float, float]:
    """By how much the first losses are larger, in nats per token, and the standard error over texts."""
    by_text = [math.fsum(a) - math.fsum(b) for a, b in zip(found, other, strict=True)]
    tokens = sum(map(len, other))
    return math.fsum(by_text) / tokens, math.sqrt(len(by_text) * variance(by_text)) / tokens


def measure(model: Path, texts: list[str], folder: Path) -> dict[str, tuple[Losses, float | None, str | None]]:
    """Losses, the SQNR of the weights in decibels against those of ``model``, and what to compare with, by name."""
    found = {"bfloat16": (in_memory(model, texts, None)[0], None, None)}
    for rule in RULES:
        options = {"scale_rule": rule, "macro_block": None}
        name = f'{rule}, `mode="packed"`'
        found[name] = (*in_memory(model, texts, options), None)
        out = folder / rule
        convert("export", model, out, "--format", "compressed-tensors", "--scale-rule", rule)
        found[f"{rule}, exported"] = (without_the_package(out, texts), sqnr_db(model, out), name)
        _say(found)
    convert("pack", model, folder / "packed", "--scale-rule", "rceil", "--macro-search", "hybrid")
    twice = ["--format", "compressed-tensors", "--on-mismatch", "requantize"]
    convert("export", folder / "packed", folder / "twice", *twice)
    name = "packed with macro factors, then exported with `--on-mismatch requantize`"
    losses = without_the_package(folder / "twice", texts)
    found[name] = (losses, sqnr_db(model, folder / "twice"), f'{RULES[1]}, `mode="packed"`')
    _say(found)
    return found


def _say(found: dict) -> None:
    for name, (losses, _, _) in found.items():
        print(f"{name}: {math.exp(perplexity.mean_loss(losses)):.3f}", flush=True)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of a full-precision checkpoint")
    parser.add_argument("--text", type=Path, required=True, help=".jsonl with questions and answers, or plain text")
    parser.add_argument("--problems", type=int, default=40, help="how many texts of the file")
    options = parser.parse_args()
    text = f"{options.text.parent.name}/{options.text.name}"
    texts = perplexity.read_texts(options.text, options.problems)
    with tempfile.TemporaryDirectory() as temporary:
        found = measure(options.model, texts, Path(temporary))
    full = found["bfloat16"][0]
    baseline = math.exp(perplexity.mean_loss(full))
    records = []
    for name, (losses, sqnr_db, other) in found.items():
        value = math.exp(perplexity.mean_loss(losses))
        nats, error = difference(losses, full)
        records.append(
            {
                "name": name,
                "shape": [len(texts), sum(map(len, losses))],
                "value": value,
                "unit": "perplexity",
                "baseline": baseline,
                "ratio": value / baseline,
                "ceiling_fraction": None,
                "nats_to_bf16": nats,
                "standard_error": error,
                "nats_to_packed": None if other is None else difference(losses, found[other][0])[0],
                "weight_sqnr_db": sqnr_db,
                "model": options.model.name,
                "text": text,
                **made(f"python -m benchmarks.export_perplexity --model {options.model.name} --text {text}", PACKAGES),
            }
        )
    write(records, RESULTS / "export_perplexity.json")


if __name__ == "__main__":
    main()
