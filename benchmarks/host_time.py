# SPDX-License-Identifier: Apache-2.0
"""What the host does in front of the kernels of packed layers: Python frames, launches, guards and microseconds.

    python -m benchmarks.host_time

No GPU is needed, and none is measured: tensors are on the CPU, layers multiply as on an H100, and Triton compiles the
kernel and binds its arguments, but what would launch it does nothing. The plain layer is `nn.Linear(8, 8)`, whose
product takes next to no time. A packed layer of that size in C++, with its product, shows the same for CPUs.

Records of calls also have ``frames``, calls of Python functions, and ``launches`` of Triton kernels, stubbed. A
compiled step is a decoding step of `generate` with a static cache, whose graph does nothing: guards, and what hands
inputs to the graph. Its records have ``graph_inputs`` and ``guards`` of one decoder layer.
"""

import contextlib
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel

from hf_mxfp4 import MXFP4PackedLinear, MXFP4RLConfig, pack
from hf_mxfp4.ops import quantization
from mxfp4_kernels.decode import product
from tests.compiled_launches import without_machine_code

from .records import made, median_ratio, option_parser, write


ROUNDS = 201
CALLS = 50
#: Calls of `generate` for each model, and their decoding steps.
GENERATIONS = 15
STEPS = 40
#: Passes of a model until its products are planned, and joined where they have the same input.
WARM_UP = 3
#: Decoder layers of a model whose steps are timed.
LAYERS = 6
#: A projection of a model with 1.5B parameters.
SIZE = 1536


@contextlib.contextmanager
def stubbed_launches() -> Iterator[None]:
    """Let Triton kernels run on tensors of the CPU up to their launch for an H100, which does nothing."""
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    constants = product.weight_constants
    stand_ins: list[tuple[Any, str, Any]] = [
        (product, "weight_constants", lambda *arguments: constants(*arguments[:-1], on_gpu=True)),
        (triton.runtime.driver, "_active", driver),
        (CompiledKernel, "run", lambda *arguments: None),
        (CompiledKernel, "_init_handles", lambda kernel: None),
        (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_machine_code())
        for owner, name, stand_in in stand_ins:
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


def planned_for_gpu(layer: Callable[..., Any], *inputs: Any) -> None:
    """Let packed layers on the CPU plan their products with the Triton kernel."""
    with mock.patch.object(quantization, "choose_backend", lambda *_, **__: "triton"):
        layer(*inputs)


def packed_layer(size: int) -> MXFP4PackedLinear:
    """Return a packed layer in bfloat16."""
    linear = nn.Linear(size, size, dtype=torch.bfloat16)
    return MXFP4PackedLinear.from_linear(linear, MXFP4RLConfig(mode="packed"))


def microseconds(call: Callable[[], Any]) -> float:
    """Return the mean of some calls, in the time of this thread, which other processes do not prolong."""
    return 1e6 * timeit.timeit(call, timer=time.thread_time, number=CALLS) / CALLS


def counted(call: Callable[[], Any]) -> dict[str, int]:
    """Return the Python frames and Triton launches of a call that was called before."""
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        call()
    finally:
        sys.setprofile(None)
    with mock.patch.object(CompiledKernel, "run", mock.Mock()) as launch:
        call()
    return {"frames": events.count("call"), "launches": launch.call_count}


# ---- decoder layers -------------------------------------------------------------------------------------------------


def decoder(is_packed: bool, layers: int) -> LlamaForCausalLM:
    """Return a small model in bfloat16."""
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config).bfloat16().eval()
    return pack(model, MXFP4RLConfig(mode="packed")) if is_packed else model


def stack(is_packed: bool, layers: int) -> Callable[[], Any]:
    """Return the forward pass of one row through the decoder layers of a model, planned for a GPU."""
    model = decoder(is_packed, layers).model
    x = torch.randn(1, 1, 64).bfloat16()
    positions = model.rotary_emb(x, torch.zeros(1, 1, dtype=torch.int64))

    def run() -> torch.Tensor:
        hidden = x
        for layer in model.layers:
            hidden = layer(hidden, position_embeddings=positions)
        return hidden

    for _ in range(WARM_UP):
        planned_for_gpu(run)
    return run


def leaf_guards(manager: Any) -> int:
    """Return how many guards a manager checks, with those below it."""
    below = [child for pair in getattr(manager, "get_key_value_managers", dict)().values() for child in pair if child]
    return len(manager.get_leaf_guards()) + sum(map(leaf_guards, [*manager.get_child_managers(), *below]))


def of_graph(is_packed: bool, layers: int) -> tuple[int, int]:
    """Return the inputs and guards of the graph of decoder layers."""
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []
    run: Any = stack(is_packed, layers)

    def compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch.compile(run, backend=compiler, fullgraph=True)()
    (entry,) = _debug_get_cache_entry_list(run)
    n_inputs = sum(node.op == "placeholder" for node in graphs[0].graph.nodes)
    return n_inputs, leaf_guards(entry.guard_manager.root)


class Decoding:
    """`generate` with a model whose compiled decoding step does nothing.

    Args:
        is_packed: whether its layers are.
    """

    def __init__(self, is_packed: bool):
        self.model = decoder(is_packed, LAYERS)
        self.config = CompileConfig(backend=self._compiler, mode=None)
        self.config._compile_all_devices = True  # as on a GPU
        self.times: list[float] = []
        compiled_call = self.model.get_compiled_call
        self.model.get_compiled_call = lambda config: self._timed(compiled_call(config))
        planned_for_gpu(self.microseconds)

    def __deepcopy__(self, memo: Any) -> "Decoding":
        return self  # CompileConfig copies the compiler

    def microseconds(self) -> float:
        """Return the time of the fastest decoding step."""
        self.times.clear()
        options = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}
        ids = torch.arange(2, 8)[None]
        self.model.generate(ids, cache_implementation="static", compile_config=self.config, **options)
        return 1e6 * min(self.times)

    def _compiler(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        outputs = graph(*inputs)
        return lambda *arguments: outputs

    def _timed(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def run(**inputs: Any) -> Any:
            start = time.thread_time()
            outputs = step(**inputs)
            self.times.append(time.thread_time() - start)
            return outputs

        return run


def compiled_step(is_packed: bool) -> tuple[list[float], dict[str, int]]:
    """Return microseconds of compiled decoding steps, and the inputs and guards that a decoder layer brings."""
    one = of_graph(is_packed, 1)
    two = of_graph(is_packed, 2)
    torch._dynamo.reset()
    decoding = Decoding(is_packed)
    times = [decoding.microseconds() for _ in range(GENERATIONS)]
    return times, {"graph_inputs": two[0] - one[0], "guards": two[1] - one[1]}


# ---- records --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def main() -> None:
    """Measure calls in turns, then compiled steps, print medians and counts, and write records with quartiles."""
    options = option_parser(__doc__, "host_time").parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    row = torch.randn(1, SIZE).bfloat16()
    small_row = torch.randn(1, 8).bfloat16()
    plain = nn.Linear(8, 8, dtype=torch.bfloat16)
    on_gpu = packed_layer(SIZE)
    on_cpu = packed_layer(8)
    with stubbed_launches():
        planned_for_gpu(on_gpu, row)
        calls = {
            "nn.Linear(8, 8)": lambda: plain(small_row),
            f"packed {SIZE} x {SIZE}, launch stubbed": lambda: on_gpu(row),
            "packed 8 x 8 in C++, with the product": lambda: on_cpu(small_row),
            "decoder layer, plain": stack(False, 1),
            "decoder layer, packed": stack(True, 1),
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, call in calls.items():
                times[name].append(microseconds(call))
        counts = {name: counted(call) for name, call in calls.items()}
        for kind in ("plain", "packed"):
            name = f"compiled step of {LAYERS} layers, {kind}"
            times[name], counts[name] = compiled_step(kind == "packed")
    baseline, *_ = times.values()
    packages = ("torch", "triton", "transformers")
    common = made("python -m benchmarks.host_time", packages)
    records = []
    for name, found in times.items():
        ratio = median_ratio(found, baseline) if len(found) == len(baseline) else None
        record = {
            "name": f"host_time / {name}",
            "shape": [len(found), CALLS if name in calls else STEPS],
            "value": round(statistics.median(found), 2),
            "unit": "us",
            "baseline": round(statistics.median(baseline), 2),
            "ratio": None if ratio is None else round(ratio, 2),
            "ceiling_fraction": None,
            "quartiles": [round(quartile, 2) for quartile in statistics.quantiles(found, n=4)],
        }
        records.append({**record, **counts[name], **common})
        print(f"{name}: {record['value']:.1f} us, {counts[name]}", flush=True)
    write(records, options.out)


if __name__ == "__main__":
    main()
