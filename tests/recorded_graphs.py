# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs without a GPU: operators are recorded with the tensors that they read and write, and run again on these.

As with a CUDA graph, a replay runs no Python of the model, and reads memory at the addresses of the capture. Kernels
that PyTorch does not dispatch, as ours in C++, are not recorded.
"""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.generation.continuous_batching import initialization, model_runner


class RecordedGraph(TorchDispatchMode):
    """The operators of one forward pass.

    Attributes:
        replays: of all graphs since the patches were made.
        is_capturing: whether one is recorded now.
    """

    replays = 0
    is_capturing = False

    def __init__(self):
        super().__init__()
        self._calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        outputs = function(*args, **kwargs)
        self._calls.append((function, args, kwargs, outputs))
        return outputs

    @contextlib.contextmanager
    def capture(self):
        RecordedGraph.is_capturing = True
        try:
            with self:
                yield
        finally:
            RecordedGraph.is_capturing = False

    def reset(self):
        self._calls.clear()

    def replay(self):
        RecordedGraph.replays += 1
        for function, args, kwargs, recorded in self._calls:
            outputs = function(*args, **kwargs)
            for place, output in zip(tree_leaves(recorded), tree_leaves(outputs), strict=True):
                # Views and results of operators that write in place are in their place already.
                if isinstance(output, torch.Tensor) and output.data_ptr() != place.data_ptr():
                    place.copy_(output)


def record_graphs(monkeypatch):
    """Have continuous batching capture and replay recorded graphs on the CPU."""
    RecordedGraph.replays = 0
    monkeypatch.setattr(initialization, "get_accelerator_graph_name", lambda: "CUDAGraph")
    monkeypatch.setattr(model_runner, "get_memory_pools", lambda: (None, 0))
    monkeypatch.setattr(model_runner, "memory_pool_context", lambda pool: contextlib.nullcontext())
    monkeypatch.setattr(model_runner, "create_accelerator_graph", RecordedGraph)
    capture = lambda graph, stream, pool: graph.capture()  # noqa: E731
    monkeypatch.setattr(model_runner, "accelerator_graph_capture_context", capture)
    for module in ("hf_mxfp4.ops.cache", "hf_mxfp4.rl.noise"):
        monkeypatch.setattr(f"{module}.is_captured", lambda tensor: RecordedGraph.is_capturing)
