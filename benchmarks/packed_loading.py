# SPDX-License-Identifier: Apache-2.0
"""Memory and time of loading a large full-precision checkpoint into packed weights, and the size of what is saved.

    python -m benchmarks.packed_loading                      # 1.07 billion random weights, in a temporary folder
    python -m benchmarks.packed_loading --layers 2 --out -   # smaller, only printed

The checkpoint is written shard by shard and loaded in a new process, whose peak memory is its own.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

from .macro_factors import FACTORS
from .records import made, option_parser, write


SCHEMES = {"4.25 bits": {"scale_rule": "rceil", "macro_block": None}, "4.3125 bits": FACTORS}
COMMAND = "python -m benchmarks.packed_loading"


def llama_config(layers: int, hidden: int, vocabulary: int = 32000) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        num_key_value_heads=hidden // 128,
        tie_word_embeddings=False,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )


def shapes(config: transformers.LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the model's tensors, in the order of the layers."""
    hidden, inner = config.hidden_size, config.intermediate_size
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        for name in "qkvo":
            yield f"{layer}.self_attn.{name}_proj.weight", (hidden, hidden)
        yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inner)
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config.vocab_size, hidden)


def write_checkpoint(folder: Path, config: transformers.LlamaConfig, shard_bytes: int) -> tuple[int, int]:
    """A bfloat16 checkpoint of random weights in ``folder``; its size and that of its largest shard, in bytes."""
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    size = 0
    for name, shape in shapes(config):
        n_bytes = 2 * math.prod(shape)
        if shards[-1] and size + n_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append((name, shape))
        size += n_bytes
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    weight_map, sizes = {}, []
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = {
            name: torch.ones(shape, dtype=torch.bfloat16)
            if len(shape) == 1
            else torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
            for name, shape in shard
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        sizes.append(sum(tensor.numel() * 2 for tensor in tensors.values()))
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(folder)
    return sum(sizes), max(sizes)


#: Runs in a new process. VmHWM, unlike ru_maxrss, does not count what the parent process held before the fork.
LOAD = """
import json, sys, time
import torch, transformers
import hf_mxfp4

def memory(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))

source, target, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
config = hf_mxfp4.MXFP4RLConfig(mode="packed", **options)
hf_mxfp4.quantize(torch.ones(2, 64))  # compiles, or loads, the fused functions
from transformers import LlamaForCausalLM
before = memory("VmRSS:")
started = time.perf_counter()
model = LlamaForCausalLM.from_pretrained(source, quantization_config=config)
seconds = time.perf_counter() - started
peak = memory("VmHWM:")
report = model.quantization_report
result = {
    "before": before, "peak": peak, "seconds": seconds, "footprint": model.get_memory_footprint(),
    "n_weights": report.n_weights, "packed_bytes": report.packed_bytes, "sqnr_db": report.sqnr_db,
}
if target:
    model.save_pretrained(target, max_shard_size="500MB")
print(json.dumps(result))
"""


def load(source: Path, target: Path | None, options: dict) -> tuple[dict, str]:
    """Load ``source`` in packed mode in a new process and save it as ``target``; its measurements and its messages.

    Measured: memory in use before and at the peak of loading (``before``, ``peak``), the model's own (``footprint``),
    all in bytes, and ``seconds``.
    """
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(source), str(target or ""), json.dumps(options)],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "HF_HUB_DISABLE_PROGRESS_BARS"},
    )
    if done.returncode:
        raise RuntimeError(f"loading failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def bits_on_disk(folder: Path, unquantized_bytes: int, n_weights: int) -> float:
    """Bits per quantized weight in the safetensors files of ``folder``, headers included."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return 8 * (size - unquantized_bytes) / n_weights


def main() -> None:
    parser = option_parser(__doc__, "packed_loading")
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--shard-mb", type=int, default=500)
    parser.add_argument("--folder", type=Path, help="where to write the checkpoints; default: a temporary folder")
    options = parser.parse_args()
    config = llama_config(options.layers, options.hidden)
    records = []
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        source = Path(temporary, "bfloat16")
        total, largest = write_checkpoint(source, config, options.shard_mb * 10**6)
        print(
            f"{total / 2e9:.3f} billion weights, {total / 1e9:.2f} GB in bfloat16, shards up to {largest / 1e6:.0f} MB"
        )
        for scheme, arguments in SCHEMES.items():
            target = Path(temporary, "packed")
            result, messages = load(source, target, arguments)
            bits = bits_on_disk(target, total - 2 * result["n_weights"], result["n_weights"])
            for file in target.iterdir():
                file.unlink()
            print(
                f"{scheme}: peak {result['peak'] / 1e9:.3f} GB ({result['before'] / 1e9:.3f} before loading), model "
                f"{result['footprint'] / 1e9:.3f} GB, {result['seconds']:.1f} s, {bits:.4f} bits per weight on disk, "
                f"SQNR {result['sqnr_db']:.2f} dB, progress bar: {'Loading weights' in messages}"
            )
            common = {
                "shape": [result["n_weights"]],
                "ceiling_fraction": None,
                **made(COMMAND, ("torch", "transformers")),
                "progress_bar": "Loading weights" in messages,
                **result,
            }
            measured = [
                ("peak memory of the process", result["peak"], "bytes", "the checkpoint in bfloat16", total),
                ("growth while loading", result["peak"] - result["before"], "bytes", "footprint + largest shard",
                 result["footprint"] + largest),
                ("size on disk", bits, "bits per quantized weight", "the scheme's bits", float(scheme.split()[0])),
            ]  # fmt: skip
            for name, value, unit, baseline, reference in measured:
                record = {"name": f"{name} / {scheme}", "value": value, "unit": unit, "baseline": baseline}
                records.append({**record, "ratio": reference / value, **common})
    write(records, options.out)


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"{time.perf_counter() - started:.0f} s in all")
