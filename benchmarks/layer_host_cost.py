# SPDX-License-Identifier: Apache-2.0
"""What a call of a linear layer costs the host, beside `nn.Linear`: what is in front of the arithmetic.

    python -m benchmarks.layer_host_cost               # about a minute; chrt -r 1 in front of it on a busy machine

Layers of 64 x 64 in bfloat16, one row, one thread, where the arithmetic is next to nothing, but for weights that are
not kept, which each call dequantizes or quantizes. In every round each layer is called some hundred
times, one layer after the other; `value` is the median over the rounds of the time of a call in microseconds, `over`
that of its difference to `nn.Linear` in the same round, without gradients and with gradients enabled (`grad`), of
which those of the weight (or of the adapters) are asked for. `calls` are the Python calls of this project and of PEFT
in one call without gradients.
"""

import argparse
import contextlib
import statistics
import time
from pathlib import Path
from typing import Any

import peft
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import hf_mxfp4
import hf_mxfp4.integrations.peft
from hf_mxfp4 import MXFP4Linear, MXFP4PackedLinear, MXFP4RLConfig, cached_weights

from .call_counts import Counter
from .macro_factors import FACTORS, FACTORS_OF
from .records import made, option_parser, write


COMMAND = "python -m benchmarks.layer_host_cost"
PACKAGES = ("torch", "peft", "hf-mxfp4")
PLAIN = "nn.Linear"
SIZE = 64


def plain() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16)


def trainable(preset: str) -> nn.Linear:
    return MXFP4Linear.from_linear(plain(), MXFP4RLConfig(preset=preset, **FACTORS_OF), "block.layer")


def packed(preset: str) -> nn.Linear:
    return MXFP4PackedLinear.from_linear(plain(), MXFP4RLConfig(mode="packed", preset=preset, **FACTORS), "block.layer")


def with_lora(layer: nn.Linear) -> nn.Module:
    """PEFT's layer around this one, with an adapter of rank 8."""
    model = get_peft_model(nn.ModuleDict({"layer": layer}), LoraConfig(r=8, target_modules=["layer"]))
    return model.base_model.model["layer"].eval()


def contenders() -> dict[str, tuple[nn.Module, bool]]:
    """The layers, and whether they run within `cached_weights`."""
    found: dict[str, tuple[nn.Module, bool]] = {PLAIN: (plain(), False)}
    for preset in ("w4a16", "w4a4"):
        found[f"MXFP4Linear, {preset}, weight kept"] = trainable(preset), True
        found[f"MXFP4PackedLinear, {preset}, weight kept"] = packed(preset), True
        found[f"MXFP4Linear, {preset}"] = trainable(preset), False
        found[f"MXFP4PackedLinear, {preset}"] = packed(preset), False
    found["LoRA on nn.Linear"] = with_lora(plain()), False
    found["LoRA on MXFP4Linear, w4a16, weight kept"] = with_lora(trainable("w4a16")), True
    found["LoRA on MXFP4PackedLinear, w4a16, weight kept"] = with_lora(packed("w4a16")), True
    found["LoRA on MXFP4PackedLinear, w4a16"] = with_lora(packed("w4a16")), False
    return found


def entered(layer: nn.Module, kept: bool) -> contextlib.AbstractContextManager:
    return cached_weights(layer) if kept else contextlib.nullcontext()


def seconds(layer: nn.Module, x: torch.Tensor, calls: int) -> float:
    """The time of one call, after some that fill caches."""
    for _ in range(10):
        layer(x)
    started = time.perf_counter()
    for _ in range(calls):
        layer(x)
    return (time.perf_counter() - started) / calls


def python_calls(layer: nn.Module, x: torch.Tensor) -> int:
    folders = tuple(f"{Path(module.__file__).parent}/" for module in (hf_mxfp4, peft))
    layer(x), layer(x)
    with Counter(folders) as counter:
        layer(x)
    return counter.calls


def measure(rounds: int, calls: int) -> list[dict[str, Any]]:
    """The records of all layers."""
    layers, x = contenders(), torch.randn(1, SIZE, generator=torch.Generator().manual_seed(0)).bfloat16()
    times: dict[tuple[str, bool], list[float]] = {(name, grad): [] for name in layers for grad in (False, True)}
    for _ in range(rounds):
        for (name, grad), own in times.items():
            layer, kept = layers[name]
            with torch.set_grad_enabled(grad), entered(layer, kept):
                own.append(1e6 * seconds(layer, x, calls))
    found = []
    for name, (layer, kept) in layers.items():
        with torch.no_grad(), entered(layer, kept):
            record: dict[str, Any] = {"name": name, "shape": [1, SIZE, SIZE], "calls": python_calls(layer, x)}
        for grad, prefix in ((False, ""), (True, "grad_")):
            own, baseline = times[name, grad], times[PLAIN, grad]
            record[f"{prefix}value"] = statistics.median(own)
            record[f"{prefix}over"] = statistics.median(a - b for a, b in zip(own, baseline, strict=True))
        record |= {"ratio": record["value"] / statistics.median(times[PLAIN, False]), "ceiling_fraction": None}
        found.append({**record, "unit": "us", "baseline": PLAIN, "rounds": rounds, **made(COMMAND, PACKAGES)})
        print(f"{name}: {record['value']:.1f} us (+{record['over']:.1f}), {record['calls']} Python calls")
    return found


def main() -> None:
    parser: argparse.ArgumentParser = option_parser(__doc__, "layer_host_cost")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--calls", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    write(measure(options.rounds, options.calls), options.out)


if __name__ == "__main__":
    main()
