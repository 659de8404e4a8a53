# SPDX-License-Identifier: Apache-2.0
"""`generate` on the CPU: quantized models in their several forms, and bfloat16, both also compiled.

    python -m benchmarks.generate_cpu --model FOLDER      # a checkpoint, as of SmolLM2-135M-Instruct
    python -m benchmarks.generate_cpu --shape llama-1b --tokens 4 --add   # random weights in the shape of Llama 3.2 1B
    python -m benchmarks.generate_cpu --rounds 1 --batches 1 --threads 1 --eager --out -

Greedy, a fixed number of new tokens after a prompt of random ones. In every round each contender generates once, one
after the other, with one thread and with two; `value` is the median of its tokens per second (the prompt's reading
included), `ratio` the median over the rounds of its speed over that of bfloat16 in the same round. Seconds are those of
the clock and, as `cpu_*`, those that processors spent on this process, in which other work on the machine shows less.
Compiled contenders have a static cache, and transformers compiles the forward pass of single tokens; what that takes is
`compile_seconds`, and not timed.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, CompileConfig, LlamaConfig, PreTrainedModel

from hf_mxfp4 import MXFP4RLConfig, cached_weights
from recipes.common.hardware import hardware

from .macro_factors import FACTORS, FACTORS_OF
from .records import made, median_ratio, option_parser, write


COMMAND = "python -m benchmarks.generate_cpu"
BASELINE = "bfloat16"
PLAIN, CACHED, KEPT = "QAT w4a4", "QAT w4a4 in cached_weights()", "QAT w4a4, further calls in one cached_weights()"
ROLLOUT = 'QAT w4a4, further calls in one cached_weights("packed")'
PACKED, PACKED_CACHED = "packed w4a16", "packed w4a16 in cached_weights()"
COMPILED = ", compiled"
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
    context: Callable[[PreTrainedModel], AbstractContextManager] = contextlib.nullcontext
    # Whether the weights are quantized already as a call begins.
    warm: bool = False
    compiled: bool = False

    def run(self, ids: torch.Tensor, tokens: int) -> tuple[torch.Tensor, Seconds]:
        with self.context(self.model):
            if self.warm:
                self._generate(ids, 1)
            time.sleep(0.02)  # OpenMP's threads go on turning for a while
            wall, cpu = time.perf_counter(), time.process_time()
            found = self._generate(ids, tokens)
            # The end of the context is outside: it frees memory alone.
            return found, Seconds(time.perf_counter() - wall, time.process_time() - cpu)

    def prepare(self, ids: torch.Tensor, tokens: int) -> float:
        """Run once as the timed calls will, so that all that happens once has happened; the seconds of compilation."""
        return self.run(ids, tokens)[1].wall - self.run(ids, tokens)[1].wall if self.compiled else 0.0

    def _generate(self, ids: torch.Tensor, tokens: int) -> torch.Tensor:
        options = {"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": False}
        if self.compiled:
            options |= {"cache_implementation": "static", "compile_config": _compile_config()}
        return self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)


@functools.cache
def _compile_config() -> CompileConfig:
    """By inductor into C++; without CUDA graphs, which are the default mode of transformers."""
    config = CompileConfig(mode=None)
    config._compile_all_devices = True  # otherwise transformers leaves CPUs out, silently
    return config


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


def llama_1b_config() -> LlamaConfig:
    """The shape of Llama 3.2 1B."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


#: Name of a model made on the spot, and its config.
SHAPES = {
    "smollm2": ("random weights, shape of SmolLM2-135M", smollm2_config),
    "llama-1b": ("random weights, shape of Llama 3.2 1B", llama_1b_config),
}


@contextlib.contextmanager
def model_folder(given: Path | None, config: Callable[[], LlamaConfig] = smollm2_config) -> Iterator[Path]:
    """The checkpoint to load, made on the spot where none is given."""
    if given is not None:
        yield given
        return
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16).save_pretrained(folder)
        yield Path(folder)


def contenders(folder: Path, compiled: bool = True) -> dict[str, Contender]:
    """By name, the baseline first."""

    def load(config: MXFP4RLConfig | None) -> PreTrainedModel:
        options = {} if config is None else {"quantization_config": config}
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()

    qat, packed = load(MXFP4RLConfig(**FACTORS_OF)), load(MXFP4RLConfig(mode="packed", **FACTORS))
    found = {
        BASELINE: Contender(load(None)),
        PLAIN: Contender(qat),
        CACHED: Contender(qat, cached_weights),
        KEPT: Contender(qat, cached_weights, warm=True),
        ROLLOUT: Contender(qat, functools.partial(cached_weights, form="packed"), warm=True),
        PACKED: Contender(packed),
        PACKED_CACHED: Contender(packed, cached_weights),
    }
    if compiled:
        for name in (BASELINE, KEPT, ROLLOUT, PACKED):
            found[name + COMPILED] = dataclasses.replace(found[name], compiled=True)
    return found


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
            if {name, other} <= outputs.keys() and not torch.equal(outputs[name], outputs[other]):
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
            "rounds": len(seconds),
            "cpu_value": written / cpu,
            "cpu_ratio": 1 / over(name, BASELINE, "cpu"),
        }
        if SAME.get(name) in times:
            record |= {"compared_with": SAME[name], "time_over_it": over(name, SAME[name], "wall")}
            record |= {"cpu_time_over_it": over(name, SAME[name], "cpu")}
        records.append({"name": name, **record})
    return records


def command(options: argparse.Namespace) -> str:
    """What makes such records again."""
    model = f" --shape {options.shape}" if options.model is None else " --model FOLDER"
    threads = " ".join(map(str, options.threads))
    return f"{COMMAND}{model} --tokens {options.tokens} --threads {threads} --rounds {options.rounds}"


def described(record: dict) -> str:
    text = (
        f"{record['threads']} threads, batch {record['batch']}, {record['name']}: {record['value']:.1f} tokens/s "
        f"({record['ratio']:.2f}x of {BASELINE}), {record['cpu_value']:.1f} per CPU second ({record['cpu_ratio']:.2f}x)"
    )
    if "compile_seconds" in record:
        text += f"; compiled in {record['compile_seconds']:.0f} s"
    if "compared_with" in record:
        text += f"; {record['cpu_time_over_it']:.2f}x the CPU time of {record['compared_with']}"
    return text


class Bench:
    """All measurements of one model.

    Args:
        found: its contenders.
        options: of the command line.
        name: of the model.
    """

    def __init__(self, found: dict[str, Contender], options: argparse.Namespace, name: str):
        self._found, self._options, self._name = found, options, name
        self._load = os.getloadavg()[0]

    def records(self, batch: int, threads: int, ids: torch.Tensor) -> list[dict]:
        """The records of prompts ``ids [batch, length]``."""
        tokens = self._options.tokens
        torch.compiler.reset()  # code is compiled for a batch and a number of threads
        compile_seconds = {
            name: contender.prepare(ids, tokens) for name, contender in self._found.items() if contender.compiled
        }
        times = measure(self._found, ids, tokens, self._options.rounds)
        common = {
            "shape": [batch, ids.shape[1], tokens],
            "model": self._name,
            "batch": batch,
            "threads": threads,
            **made(
                command(self._options),
                ("torch", "transformers", "hf-mxfp4"),
                f"{hardware(threads)}, load average {self._load:.1f} as it began",
            ),
        }
        records = []
        for record in records_of(times, batch * tokens):
            if record["name"] in compile_seconds:
                record["compile_seconds"] = compile_seconds[record["name"]]
            records.append({**record, **common})
            print(described(records[-1]), flush=True)
        return records


def main(arguments: list[str] | None = None) -> None:
    parser = option_parser(__doc__, "generate_cpu")
    parser.add_argument("--model", type=Path, help="folder of a checkpoint; without it, random weights")
    parser.add_argument("--shape", choices=SHAPES, default="smollm2", help="of random weights")
    parser.add_argument("--name", help="of the model, for the records; default: the folder's")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="leave compiled contenders out")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of contenders beside bfloat16, as the records have")
    parser.add_argument("--add", action="store_true", help="keep the file's records of other models")
    options = parser.parse_args(arguments)
    name = options.name or (options.model.name if options.model else SHAPES[options.shape][0])
    kept = records_of_others(options.out, name) if options.add else []
    generator, before = torch.Generator().manual_seed(0), torch.get_num_threads()
    records: list[dict] = []
    try:
        with model_folder(options.model, SHAPES[options.shape][1]) as folder:
            found = chosen(contenders(folder, not options.eager), options.only)
            bench = Bench(found, options, name)
            vocabulary = found[BASELINE].model.config.vocab_size
            for threads in options.threads:
                torch.set_num_threads(threads)
                for contender in found.values():
                    if not contender.compiled:
                        contender.run(torch.zeros(1, 1, dtype=torch.long), 1)
                for batch in options.batches:
                    ids = torch.randint(vocabulary // 2, (batch, options.prompt), generator=generator)
                    records += bench.records(batch, threads, ids)
                    write([*kept, *records], options.out)  # what is measured so far, should the rest be cut off
    finally:
        torch.set_num_threads(before)


def chosen(found: dict[str, Contender], names: Sequence[str] | None) -> dict[str, Contender]:
    """The baseline and those of ``names``, or all. Raises `ValueError` for one that there is not."""
    unknown = set(names or ()) - found.keys()
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: not among {', '.join(found)}")
    return {name: own for name, own in found.items() if names is None or name in (BASELINE, *names)}


def records_of_others(out: str, model: str) -> list[dict]:
    """The records that a file has of other models."""
    path = Path(out)
    return [r for r in json.loads(path.read_text()) if r["model"] != model] if path.is_file() else []


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"{time.perf_counter() - started:.0f} s in all")
