# SPDX-License-Identifier: Apache-2.0
"""`generate` on the CPU, of quantized models as they come, within `cached_weights()`, and in bfloat16.

    python -m benchmarks.generate_cpu --model FOLDER      # a checkpoint, as of SmolLM2-135M-Instruct
    python -m benchmarks.generate_cpu                     # random weights in its shape: 30 layers of 576
    python -m benchmarks.generate_cpu --rounds 1 --batches 1 --threads 1 --out -

Greedy, a fixed number of new tokens after a prompt of random ones. In every round each contender generates once, one
after the other, with one thread and with two; `value` is the median of its tokens per second (the prompt's reading
included), `ratio` the median over the rounds of its speed over that of bfloat16 in the same round. Seconds are those of
the clock and, as `cpu_*`, those that processors spent on this process, in which other work on the machine shows less.
"""

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from hf_mxfp4 import MXFP4RLConfig, cached_weights
from recipes.common.hardware import hardware

from .records import made, median_ratio, option_parser, write


COMMAND = "python -m benchmarks.generate_cpu"
BASELINE = "bfloat16"
PLAIN, CACHED, KEPT = "QAT w4a4", "QAT w4a4 in cached_weights()", "QAT w4a4, further calls in one cached_weights()"
PACKED, PACKED_CACHED = "packed w4a16", "packed w4a16 in cached_weights()"
#: Contender to the one whose tokens it must repeat, and which its time is compared with.
SAME = {PLAIN: CACHED, KEPT: CACHED, PACKED: PACKED_CACHED}


@dataclass(frozen=True)
class Seconds:
    """What one call took: by the clock, and of processors."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Contender:
    """A model, and the context that each call of `generate` is made in."""

    model: PreTrainedModel
    context: Callable[[], AbstractContextManager] = contextlib.nullcontext
    # Whether the weights are quantized already as a call begins.
    warm: bool = False

    def run(self, ids: torch.Tensor, tokens: int) -> tuple[torch.Tensor, Seconds]:
        with self.context():
            if self.warm:
                self._generate(ids[:1, :1], 1)
            time.sleep(0.02)  # OpenMP's threads go on turning for a while
            wall, cpu = time.perf_counter(), time.process_time()
            found = self._generate(ids, tokens)
            # The end of the context is outside: it frees memory alone.
            return found, Seconds(time.perf_counter() - wall, time.process_time() - cpu)

    def _generate(self, ids: torch.Tensor, tokens: int) -> torch.Tensor:
        options = {"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": False}
        return self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)


def smollm2_config() -> LlamaConfig:
    """The shape of SmolLM2-135M."""
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


@contextlib.contextmanager
def model_folder(given: Path | None) -> Iterator[Path]:
    """The checkpoint to load, made on the spot where none is given."""
    if given is not None:
        yield given
        return
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(smollm2_config(), dtype=torch.bfloat16).save_pretrained(folder)
        yield Path(folder)


def contenders(folder: Path) -> dict[str, Contender]:
    """By name, the baseline first."""

    def load(config: MXFP4RLConfig | None) -> PreTrainedModel:
        options = {} if config is None else {"quantization_config": config}
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()

    qat, packed = load(MXFP4RLConfig()), load(MXFP4RLConfig(mode="packed"))
    return {
        BASELINE: Contender(load(None)),
        PLAIN: Contender(qat),
        CACHED: Contender(qat, cached_weights),
        KEPT: Contender(qat, cached_weights, warm=True),
        PACKED: Contender(packed),
        PACKED_CACHED: Contender(packed, cached_weights),
    }


def measure(found: dict[str, Contender], ids: torch.Tensor, tokens: int, rounds: int) -> dict[str, list[Seconds]]:
    """Seconds by contender and round, which take turns.

    Raises `RuntimeError` when one that must give the tokens of another does not, or another number of them than asked.
    """
    times: dict[str, list[Seconds]] = {name: [] for name in found}
    for _ in range(rounds):
        outputs = {}
        for name, contender in found.items():
            outputs[name], seconds = contender.run(ids, tokens)
            times[name].append(seconds)
            if outputs[name].shape[1] != ids.shape[1] + tokens:
                raise RuntimeError(f"{name} wrote {outputs[name].shape[1] - ids.shape[1]} tokens, not {tokens}")
        for name, other in SAME.items():
            if not torch.equal(outputs[name], outputs[other]):
                raise RuntimeError(f"{name} and {other} wrote different tokens")
    return times


def records_of(times: dict[str, list[Seconds]], written: int) -> list[dict]:
    """One record per contender; ``written`` tokens per call."""

    def over(name: str, other: str, clock: str) -> float:
        """Median of the time over that of another in the same round."""
        return median_ratio(*([getattr(each, clock) for each in times[which]] for which in (name, other)))

    records = []
    for name, seconds in times.items():
        wall, cpu = (statistics.median(getattr(each, clock) for each in seconds) for clock in ("wall", "cpu"))
        record = {
            "value": written / wall,
            "unit": "tokens per second",
            "baseline": BASELINE,
            "ratio": 1 / over(name, BASELINE, "wall"),
            "ceiling_fraction": None,
            "cpu_value": written / cpu,
            "cpu_ratio": 1 / over(name, BASELINE, "cpu"),
            "rounds": len(seconds),
        }
        if name in SAME:
            record |= {"compared_with": SAME[name], "time_over_it": over(name, SAME[name], "wall")}
            record |= {"cpu_time_over_it": over(name, SAME[name], "cpu")}
        records.append({"name": name, **record})
    return records


def command(options: argparse.Namespace) -> str:
    """What makes such records again."""
    model = "" if options.model is None else " --model FOLDER"
    threads = " ".join(map(str, options.threads))
    return f"{COMMAND}{model} --tokens {options.tokens} --threads {threads} --rounds {options.rounds}"


def described(record: dict) -> str:
    text = (
        f"{record['threads']} threads, batch {record['batch']}, {record['name']}: {record['value']:.1f} tokens/s "
        f"({record['ratio']:.2f}x of {BASELINE}), {record['cpu_value']:.1f} per CPU second ({record['cpu_ratio']:.2f}x)"
    )
    if "compared_with" not in record:
        return text
    return f"{text}; {record['cpu_time_over_it']:.2f}x the CPU time of {record['compared_with']}"


def main(arguments: list[str] | None = None) -> None:
    parser = option_parser(__doc__, "generate_cpu")
    parser.add_argument("--model", type=Path, help="folder of a checkpoint; without it, random weights")
    parser.add_argument("--name", help="of the model, for the records; default: the folder's")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    name = options.name or (options.model.name if options.model else "random weights, shape of SmolLM2-135M")
    load, before = os.getloadavg()[0], torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    records = []
    try:
        with model_folder(options.model) as folder:
            found = contenders(folder)
            vocabulary = found[BASELINE].model.config.vocab_size
            for threads in options.threads:
                torch.set_num_threads(threads)
                for contender in found.values():
                    contender.run(torch.zeros(1, 1, dtype=torch.long), 1)
                for batch in options.batches:
                    ids = torch.randint(vocabulary // 2, (batch, options.prompt), generator=generator)
                    times = measure(found, ids, options.tokens, options.rounds)
                    common = {
                        "shape": [batch, options.prompt, options.tokens],
                        "model": name,
                        "batch": batch,
                        "threads": threads,
                        **made(
                            command(options),
                            ("torch", "transformers", "hf-mxfp4"),
                            f"{hardware(threads)}, load average {load:.1f} as it began",
                        ),
                    }
                    records += [{**record, **common} for record in records_of(times, batch * options.tokens)]
                    for record in records[-len(found) :]:
                        print(described(record), flush=True)
                    write(records, options.out)  # what is measured so far, should the rest be cut off
    finally:
        torch.set_num_threads(before)


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"{time.perf_counter() - started:.0f} s in all")
