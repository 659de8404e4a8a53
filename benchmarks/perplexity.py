# SPDX-License-Identifier: Apache-2.0
"""How well a causal language model predicts texts, with nothing but torch and transformers.

    python benchmarks/perplexity.py FOLDER TEXTS OUT    # in a process that cannot import hf_mxfp4

TEXTS is a JSON list of strings, OUT gets what [`losses`] gives. Run as a file, so that nothing of this project is
needed, and hf_mxfp4 is made impossible to import.
"""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def losses(model: Any, tokenizer: Any, texts: Sequence[str]) -> list[list[float]]:
    """Negative log-likelihoods in nats of all tokens but the first of each text, in float32 from the model's logits."""
    import torch

    found = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].float()
        found.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").tolist())
    return found


def mean_loss(found: Sequence[Sequence[float]]) -> float:
    """Nats per token over all texts; its exponential is the perplexity."""
    return math.fsum(map(math.fsum, found)) / sum(map(len, found))


def read_texts(file: Path, limit: int) -> list[str]:
    """The first texts of a file: a question and its answer from each line of JSON, or else the paragraphs."""
    content = file.read_text(encoding="utf-8")
    if file.suffix == ".jsonl":
        lines = map(json.loads, filter(None, content.splitlines()[:limit]))
        return [f"{line['question']}\n{line['answer']}" for line in lines]
    return [part for part in content.split("\n\n") if part.strip()][:limit]


def main(folder: str, texts: str, out: str) -> None:
    sys.modules["hf_mxfp4"] = None  # importing it is an error from here on
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    if any(info.values()):
        sys.exit(f"{folder} does not load as it is: {info}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    Path(out).write_text(json.dumps(losses(model.eval(), tokenizer, json.loads(Path(texts).read_text()))))


if __name__ == "__main__":
    main(*sys.argv[1:])
