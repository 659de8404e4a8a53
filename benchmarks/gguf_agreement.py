# SPDX-License-Identifier: Apache-2.0
"""The same model and text in llama.cpp and in transformers; writes `benchmarks/results/gguf_agreement.json`.

    python -m benchmarks.gguf_agreement --model SmolLM2-135M-Instruct --text gsm8k/test.jsonl --f16 smollm2-f16.gguf \\
        --llamacpp FOLDER

``--f16`` is the model as llama.cpp's `convert_hf_to_gguf.py --outtype f16` writes it: beside transformers in bfloat16
it says how far the two are apart without 4 bits. Then the MXFP4 file of `hf-mxfp4 export --format gguf`, beside what
`hf-mxfp4 import` makes of it in transformers. Both sides predict the second half of each window of 512 tokens, as
`llama-perplexity` does. llama.cpp rounds the inputs of products with MXFP4 weights to 8-bit integers.
"""

import math
import re
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_mxfp4.checkpoint import export, import_checkpoint

from . import perplexity
from .gguf_perplexity import CONTEXT, PACKAGES, gguf_parser, run
from .records import made, write


RULE = "even"
_FINAL = re.compile(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)")


def in_llama_cpp(tools: Path, file: Path, text: Path, threads: int) -> float:
    """Perplexity by `llama-perplexity`. Raises `ValueError` where it printed none."""
    printed = run([tools / "llama-perplexity", "-m", file, "-f", text, "-c", CONTEXT, "-t", threads])
    if (found := _FINAL.search(printed)) is None:
        raise ValueError(f"llama-perplexity printed no final estimate:\n{printed[-2000:]}")
    return float(found[1])


def windows_of(tokens: list[int]) -> torch.Tensor:
    """``[windows, CONTEXT]``; tokens that fill no window are left out. Raises `ValueError` where none is filled."""
    count = len(tokens) // CONTEXT
    if not count:
        raise ValueError(f"the text has {len(tokens)} tokens, a window takes {CONTEXT}")
    return torch.tensor(tokens[: count * CONTEXT]).view(count, CONTEXT)


@torch.no_grad()
def in_transformers(model: torch.nn.Module, windows: torch.Tensor) -> float:
    """Perplexity of the second halves of windows, each predicted from all of its window before."""
    first, total = CONTEXT // 2, 0.0
    for window in windows:
        logits = model(window[None]).logits[0, first:-1].float()
        total += torch.nn.functional.cross_entropy(logits, window[first + 1 :], reduction="sum").item()
    return math.exp(total / (len(windows) * (CONTEXT - first - 1)))


def main() -> None:
    options = gguf_parser(__doc__, "gguf_agreement", "--f16").parse_args()
    tools = options.llamacpp / "build" / "bin"
    source = f"{options.text.parent.name}/{options.text.name}"
    command = f"python -m benchmarks.gguf_agreement --model {options.model.name} --text {source} --f16 FILE "
    records = []
    with tempfile.TemporaryDirectory() as temporary:
        folder, text = Path(temporary), Path(temporary) / "text.txt"
        text.write_text("\n\n".join(perplexity.read_texts(options.text, options.problems)), encoding="utf-8")
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        windows = windows_of(tokenizer(text.read_text(encoding="utf-8")).input_ids)
        export(options.model, folder / "exported", "gguf", scale_rule=RULE)
        file = folder / "exported" / "model-MXFP4.gguf"
        import_checkpoint(file, folder / "imported")
        for name, gguf_file, checkpoint in (
            ("F16; bfloat16", options.f16, options.model),
            (f"MXFP4, `{RULE}`; imported, bfloat16", file, folder / "imported"),
        ):
            model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
            there, here = in_llama_cpp(tools, gguf_file, text, options.threads), in_transformers(model, windows)
            records.append(
                {
                    "name": name,
                    "shape": list(windows.shape),
                    "value": there,
                    "unit": "perplexity",
                    "baseline": here,
                    "ratio": there / here,
                    "ceiling_fraction": None,
                    "nats": math.log(there / here),
                    "model": options.model.name,
                    "text": source,
                    **made(command + "--llamacpp FOLDER", PACKAGES),
                }
            )
            print(
                f"{name}: llama.cpp {there:.3f}, transformers {here:.3f}, {math.log(there / here):+.4f} nats",
                flush=True,
            )
    write(records, options.out)


if __name__ == "__main__":
    main()
