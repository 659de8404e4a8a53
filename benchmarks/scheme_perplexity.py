# SPDX-License-Identifier: Apache-2.0
"""Perplexity and divergence of schemes on a real model; writes `benchmarks/results/scheme_perplexity.json`.

    python -m benchmarks.scheme_perplexity --model SmolLM2-135M-Instruct --text gsm8k/test.jsonl

What `hf-mxfp4 eval` measures, and, first, how long it takes in full precision beside a plain loop over
``model(ids, labels=ids).loss``: processor seconds, alternating, the median over rounds; and by how much a process grows
on windows of 2,048 tokens, each way in a process of its own.
"""

import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from hf_mxfp4.cli.console import TokenProgress
from hf_mxfp4.lab.perplexity.checkpoint import Job, texts_to_predict
from hf_mxfp4.lab.perplexity.evaluate import evaluate, reference_of
from hf_mxfp4.lab.perplexity.load import load
from hf_mxfp4.lab.perplexity.results import Evaluation, Row
from hf_mxfp4.lab.perplexity.schemes import read_schemes
from hf_mxfp4.lab.texts import TextOptions

from .memory import resident
from .records import made, median_ratio, option_parser, write


PACKAGES = ("torch", "transformers")
SCHEMES = (
    "w4a16:even+mbs128-blockwise",
    "w4a16:even",
    "w4a16:rceil+mbs128-dynamic",
    "w4a16:rceil",
    "w4a16:rceil+of0.5",
    "even+mbs128-blockwise",
    "rceil+mbs128-hybrid",
    "rceil+mbs128-static",
    "even",
    "mse",
    "rceil",
    "floor",
    "paper_b",
    "rceil+mbs128-hybrid+of0.5",
    "rceil+of0.5",
    "even+mbs128-blockwise+of1",
    "even+mbs128-blockwise+of1@0.1",
)


def plain_loop(model: torch.nn.Module, batches: Sequence[torch.Tensor]) -> float:
    """Nats per token as transformers computes them."""
    with torch.no_grad():
        sums = [model(ids, labels=ids).loss.item() * (ids.shape[1] - 1) for ids in batches]
    return math.fsum(sums) / sum(ids.shape[1] - 1 for ids in batches)


def times(model: torch.nn.Module, batches: Sequence[torch.Tensor], rounds: int) -> dict[str, list[float]]:
    """Processor seconds of a plain loop and of ours, in alternating order."""
    found: dict[str, list[float]] = {"plain loop": [], "hf-mxfp4 eval": []}
    ways = {"plain loop": plain_loop, "hf-mxfp4 eval": reference_of}
    for _ in range(rounds + 1):  # the first warms up
        for name, way in ways.items():
            began = time.process_time()
            way(model, batches)
            found[name].append(time.process_time() - began)
    return {name: seconds[1:] for name, seconds in found.items()}


#: Windows that memory is measured on, and their tokens.
WINDOWS, WINDOW = 2, 2048
WAYS = {
    "plain loop": plain_loop,
    "full precision": reference_of,
    "one scheme": lambda model, batches: evaluate(model, batches, read_schemes(["w4a16:rceil"])),
}


def growth(way: str, model: str, ids: list[int]) -> int:
    """Bytes that this process grows by at its peak, beyond what it has with the model in memory."""
    loaded = load(model, "bfloat16", "cpu").model
    windows = torch.tensor([ids]).split(WINDOW, dim=1)
    with torch.no_grad():
        loaded(windows[0][:, :16])  # its weights are read
    before = resident("VmHWM")
    WAYS[way](loaded, windows)
    return resident("VmHWM") - before


def memory_records(model: str, ids: list[int]) -> list[dict]:
    """What each way needs, in new processes."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        found = {way: pool.apply(growth, (way, model, ids)) for way in WAYS}
    return [
        {
            "name": f"memory of {way}",
            "shape": [len(ids) // WINDOW, WINDOW],
            "value": found[way] / 1e6,
            "unit": "MB",
            "baseline": found["plain loop"] / 1e6,
            "ratio": found[way] / found["plain loop"],
            "ceiling_fraction": None,
        }
        for way in WAYS
    ]


def compared(row: Row, base: Row, shape: list[int]) -> dict:
    """What is kept of a row beside the one in full precision; ``shape`` is texts and tokens."""
    own = row is base
    return {
        "name": row.name,
        "shape": shape,
        "value": row.perplexity,
        "unit": "perplexity",
        "baseline": base.perplexity,
        "ratio": row.perplexity / base.perplexity,
        "ceiling_fraction": None,
        "bits": None if own else row.scheme.bits,
        "nats_to_bf16": None if own else row.difference(base).value,
        "standard_error": None if own else row.difference(base).error,
        "kl": None if own else row.kl.value,
        "kl_standard_error": None if own else row.kl.error,
    }


def as_record(row: Row, evaluation: Evaluation) -> dict:
    """[`compared`] of a row of an evaluation, and what only that knows."""
    return {
        **compared(row, evaluation.base, [evaluation.texts, evaluation.tokens]),
        "same_top": None if row is evaluation.base else row.same_top,
        "weight_sqnr_db": row.weight_sqnr_db,
        "on_front": row in evaluation.front,
    }


def main() -> None:
    parser = option_parser(__doc__, "scheme_perplexity")
    parser.add_argument("--model", type=Path, required=True, help="folder of a full-precision checkpoint")
    parser.add_argument("--text", type=Path, required=True, help=".jsonl with questions and answers, or plain text")
    parser.add_argument("--problems", type=int, default=40, help="how many texts of the file")
    parser.add_argument("--rounds", type=int, default=5, help="of the comparison with a plain loop")
    options = parser.parse_args()
    text = f"{options.text.parent.name}/{options.text.name}"
    loaded = load(str(options.model), "bfloat16", "cpu")
    source = TextOptions(str(options.text), samples=options.problems)
    batches = texts_to_predict(source, loaded.tokenizer, source.read())
    seconds = times(loaded.model, batches[:8], options.rounds)
    ratio = median_ratio(seconds["hf-mxfp4 eval"], seconds["plain loop"])
    print(f"full precision takes {ratio:.3f} of a plain loop's time", flush=True)
    everything = "\n".join(TextOptions(str(options.text), samples=400).read())
    ids = loaded.tokenizer(everything).input_ids[: WINDOWS * WINDOW]
    memory = memory_records(str(options.model), ids)
    schemes = read_schemes(list(SCHEMES))
    with tempfile.TemporaryDirectory() as folder:
        job = Job(loaded, source, batches, schemes)
        with job.open_log(Path(folder, "progress.jsonl")) as log, TokenProgress(job.total) as progress:
            evaluation = job.run(log, progress)
    shared = {
        "model": options.model.name,
        "text": text,
        **made(f"python -m benchmarks.scheme_perplexity --model {options.model.name} --text {text}", PACKAGES),
    }
    time_record = {
        "name": "time in full precision",
        "shape": [len(batches[:8]), sum(ids.shape[1] - 1 for ids in batches[:8])],
        "value": statistics.median(seconds["hf-mxfp4 eval"]),
        "unit": "s",
        "baseline": statistics.median(seconds["plain loop"]),
        "ratio": ratio,
        "ceiling_fraction": None,
    }
    found = [time_record, *memory, *(as_record(row, evaluation) for row in evaluation.rows)]
    write([{**record, **shared} for record in found], options.out)


if __name__ == "__main__":
    main()
