# SPDX-License-Identifier: Apache-2.0
"""Perplexity of MXFP4 files in llama.cpp, ours and its own; writes `benchmarks/results/gguf_perplexity.json`.

    python -m benchmarks.gguf_perplexity --model SmolLM2-135M-Instruct --text gsm8k/test.jsonl \\
        --bf16 smollm2-bf16.gguf --llamacpp FOLDER --calibrate gsm8k/train.jsonl

``--bf16`` is the model as llama.cpp's `convert_hf_to_gguf.py --outtype bf16` writes it, ``--llamacpp`` the folder that
`tests/llamacpp_lane/build.sh` prints. llama.cpp quantizes its own file (`llama-quantize`, attention and MLP, embeddings
and head in bfloat16 as in ours), `hf-mxfp4 export --format gguf` the checkpoint under each scale rule, and under the
default one with as many texts of ``--calibrate``; all are measured by `llama-perplexity`, which compares every
prediction with that of the bfloat16 file.
"""

import re
import subprocess
import tempfile
from argparse import ArgumentParser
from pathlib import Path

from hf_mxfp4.checkpoint import export

from . import perplexity
from .records import made, option_parser, write


PACKAGES = ("torch", "transformers", "gguf")
RULES = ("even", "mse", "rceil", "floor")
#: What llama.cpp's quantizer is told, by type: the same tensors in all.
OWN = {"MXFP4": "mxfp4", "Q4_0": "q4_0"}
CONTEXT = 512
_LINES = {
    "value": r"Mean PPL\(Q\)\s*:\s*([\d.]+)",
    "baseline": r"Mean PPL\(base\)\s*:\s*([\d.]+)",
    "nats_to_bf16": r"Mean ln\(PPL\(Q\)/PPL\(base\)\)\s*:\s*(-?[\d.]+)",
    "standard_error": r"Mean ln\(PPL\(Q\)/PPL\(base\)\)\s*:\s*-?[\d.]+\s*±\s*([\d.]+)",
    "divergence": r"Mean\s+KLD:\s*([\d.]+)",
    "same_top_percent": r"Same top p:\s*([\d.]+)",
}


def figures(printed: str) -> dict[str, float]:
    """What `llama-perplexity --kl-divergence` printed: perplexities, the logarithm of their ratio with its standard
    error, the divergence in nats, and how often the likeliest token is the same, in percent.

    Raises `ValueError` where a line is missing.
    """
    found = {name: re.search(pattern, printed) for name, pattern in _LINES.items()}
    if missing := [name for name, match in found.items() if match is None]:
        raise ValueError(f"llama-perplexity printed no {missing[0]}:\n{printed[-2000:]}")
    return {name: float(match[1]) for name, match in found.items()}


def bits_per_weight(file: Path, prefix: str = "blk.") -> float:
    """Bits of a matrix element in the layers of a file."""
    import gguf

    matrices = [t for t in gguf.GGUFReader(file).tensors if t.name.startswith(prefix) and len(t.shape) > 1]
    return 8 * sum(int(t.n_bytes) for t in matrices) / sum(int(t.n_elements) for t in matrices)


def make_files(model: Path, bf16: Path, tools: Path, folder: Path, texts: list[str]) -> dict[str, Path]:
    """The files to compare, by name."""
    files = {}
    for name, kind in OWN.items():
        files[f"llama-quantize, {name}"] = out = folder / f"own-{kind}.gguf"
        kinds = ["--tensor-type", f"attn_.*={kind}", "--tensor-type", f"ffn_.*={kind}"]
        kinds += ["--token-embedding-type", "bf16", "--output-tensor-type", "bf16"]
        run([tools / "llama-quantize", *kinds, bf16, out, "Q8_0"])
    for rule in RULES:
        export(model, folder / rule, "gguf", scale_rule=rule)
        files[f"hf-mxfp4 export, `{rule}`"] = folder / rule / "model-MXFP4.gguf"
    export(model, folder / "calibrated", "gguf", scale_rule=RULES[0], calibration=texts)
    files[f"hf-mxfp4 export, `{RULES[0]}`, `--calibrate`"] = folder / "calibrated" / "model-MXFP4.gguf"
    return files


def run(command: list[str | Path]) -> str:
    """What a program printed. Raises `RuntimeError` where it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{done.stderr[-2000:]}")
    return done.stdout + done.stderr


def gguf_parser(docstring: str, name: str, converted: str) -> ArgumentParser:
    """Options of benchmarks that run `llama-perplexity`; ``converted`` is that of the model as a GGUF file."""
    parser = option_parser(docstring, name)
    parser.add_argument("--model", type=Path, required=True, help="folder of a full-precision checkpoint")
    parser.add_argument(converted, type=Path, required=True, help="the same as a GGUF file, by llama.cpp's converter")
    parser.add_argument("--text", type=Path, required=True, help=".jsonl with questions and answers, or plain text")
    parser.add_argument("--problems", type=int, default=120, help="how many texts of the file")
    parser.add_argument("--llamacpp", type=Path, required=True, help="folder with build/bin")
    parser.add_argument("--threads", type=int, default=2)
    return parser


def main() -> None:
    parser = gguf_parser(__doc__, "gguf_perplexity", "--bf16")
    parser.add_argument("--calibrate", type=Path, required=True, help="texts to calibrate with, none of --text")
    options = parser.parse_args()
    tools = options.llamacpp / "build" / "bin"
    text = f"{options.text.parent.name}/{options.text.name}"
    files = "--bf16 FILE --llamacpp FOLDER --calibrate FILE"
    command = f"python -m benchmarks.gguf_perplexity --model {options.model.name} --text {text} {files}"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        texts = perplexity.read_texts(options.text, options.problems)
        (folder / "text.txt").write_text("\n\n".join(texts), encoding="utf-8")
        measure = ["-f", folder / "text.txt", "-c", CONTEXT, "-t", options.threads]
        measure += ["--kl-divergence-base", folder / "base.logits"]
        run([tools / "llama-perplexity", "-m", options.bf16, *measure])
        records = []
        calibration = perplexity.read_texts(options.calibrate, options.problems)
        for name, file in make_files(options.model, options.bf16, tools, folder, calibration).items():
            found = figures(run([tools / "llama-perplexity", "-m", file, *measure, "--kl-divergence"]))
            print(name, found, flush=True)
            records.append(
                {
                    "name": name,
                    "shape": [len(texts), CONTEXT],
                    "unit": "perplexity",
                    "ratio": found["value"] / found["baseline"],
                    "ceiling_fraction": None,
                    "bits_per_weight": bits_per_weight(file),
                    "file_bytes": file.stat().st_size,
                    "model": options.model.name,
                    "text": text,
                    **found,
                    **made(command, PACKAGES),
                }
            )
    write(records, options.out)


if __name__ == "__main__":
    main()
