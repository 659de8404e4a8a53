# SPDX-License-Identifier: Apache-2.0
"""The schemes of `benchmarks.evidence` on a real encoder, which none of them was chosen on.

    python -m benchmarks.encoder_evidence --model all-MiniLM-L6-v2 --text gsm8k/test.jsonl

Writes `benchmarks/results/encoder_evidence.json`: by how much sentence embeddings turn, ``1 - cos`` to those in full
precision, and for how many sentences the nearest other one stays the nearest.
"""

import math
import statistics
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer

from hf_mxfp4.analysis.perplexity.schemes import read_schemes
from hf_mxfp4.analysis.perplexity.swapped import swapped
from hf_mxfp4.analysis.texts import TextOptions
from hf_mxfp4.layers import cached_weights

from .evidence import AS_IT_IS, OURS, products, rotated
from .records import made, option_parser, write


PACKAGES = ("torch", "transformers")
MAX_LENGTH = 256


@torch.no_grad()
def embeddings(model: nn.Module, tokenizer, texts: list[str]) -> torch.Tensor:
    """Unit vectors ``[texts, hidden]``: the mean of the last hidden states over a text's tokens, one text at a time."""
    found = []
    with cached_weights("dense"):
        for text in texts:
            ids = tokenizer(text, truncation=True, max_length=MAX_LENGTH, return_tensors="pt").input_ids
            found.append(model(input_ids=ids).last_hidden_state[0].double().mean(0))
    return nn.functional.normalize(torch.stack(found), dim=1)


def nearest(vectors: torch.Tensor) -> torch.Tensor:
    """Of each sentence the index of the nearest other one."""
    return (vectors @ vectors.T).fill_diagonal_(-1).argmax(1)


def main() -> None:
    parser = option_parser(__doc__, "encoder_evidence")
    parser.add_argument("--model", type=Path, required=True, help="folder of a sentence encoder")
    parser.add_argument("--text", type=Path, required=True, help="JSON lines with the sentences")
    parser.add_argument("--field", default="question")
    parser.add_argument("--samples", type=int, default=400)
    options = parser.parse_args()
    text = f"{options.text.parent.name}/{options.text.name}"
    model, tokenizer = AutoModel.from_pretrained(options.model).eval(), AutoTokenizer.from_pretrained(options.model)
    texts = TextOptions(str(options.text), options.field, options.samples).read()
    exact = embeddings(model, tokenizer, texts)
    records = []
    for scheme in [*read_schemes(list(AS_IT_IS)), *rotated((OURS,))]:
        with swapped(model, scheme.config) as sqnr_db:
            vectors = embeddings(model, tokenizer, texts)
        turned = (1 - (vectors * exact).sum(1)).tolist()
        records.append(
            {
                "name": scheme.name,
                "shape": [len(texts), exact.shape[1]],
                "value": statistics.fmean(turned),
                "unit": "1 - cos",
                "baseline": None,
                "ratio": None,
                "ceiling_fraction": None,
                "standard_error": statistics.stdev(turned) / math.sqrt(len(turned)),
                "same_nearest": float((nearest(vectors) == nearest(exact)).double().mean()),
                "bits": scheme.bits,
                "products": products(scheme.config),
                "weight_sqnr_db": sqnr_db,
                "model": options.model.name,
                "text": text,
                **made(f"python -m benchmarks.encoder_evidence --model {options.model.name} --text {text}", PACKAGES),
            }
        )
        found = records[-1]
        print(
            f"{scheme.name}: {found['value']:.5f} +- {found['standard_error']:.5f}, {found['same_nearest']:.3f}",
            flush=True,
        )
        write(records, options.out)


if __name__ == "__main__":
    main()
