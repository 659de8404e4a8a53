# SPDX-License-Identifier: Apache-2.0
"""Products with packed weights: interpreted, against float64 products of the dequantized weight; their tile decoder,
and the layers on top of them."""

import contextlib
import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mxfp4_kernels
from hf_mxfp4 import numerics
from mxfp4_kernels.gemm.decode_plan import split_steps


def test_products_with_packed_weights(run_script):
    report = run_script("run_linear_w4a16.py", "few", interpret=True)
    assert report == {"cases": 13, "fused": 10, "split": 3, "wrong": []}


@pytest.mark.large
def test_the_matrix_of_shapes_dtypes_and_schemes(run_script):
    report = run_script("run_linear_w4a16.py", "matrix", interpret=True)
    assert report == {"cases": 540, "fused": 540, "split": 108, "wrong": []}


def test_special_values_sizes_and_repeated_calls(run_script):
    report = run_script("run_linear_special.py", interpret=True)
    assert report.pop("checks") == 10
    assert not any(report.values()), report


def test_every_code_at_every_scale_byte(run_script):
    report = run_script("run_decode_tile.py", interpret=True)
    assert report == {"cases": 16, "wrong": []}


def test_layers_compute_on_the_codes(run_script):
    report = run_script("run_packed_layers.py", interpret=True)
    # More rows than the kernel takes: a copy is made once in a context, where it is worth its memory.
    copies = {
        "packed layer": 1,
        "packed layer, no context": 2,
        "auto": 1,
        "auto, few rows": 0,
        "auto, very many rows": 2,
        "packed": 2,
        "dense": 0,
    }
    assert report == {"layers": 12, "launches": 17, "wrong": [], "rotated": [], "dequantized": copies}


@pytest.mark.parametrize(
    ("shape", "options", "route", "why"),
    [
        ((1, 4096, 4096), {}, "fused", " 8 splits"),
        ((16, 4096, 14336), {"macro_block": 128}, "fused", "splits"),
        ((256, 4096, 4096), {}, "fused", "1 splits"),
        ((257, 4096, 4096), {}, "dense", "257 rows"),
        ((1, 64, 4098), {}, "dense", "words of 32 bits"),
        ((1, 64, 4096), {"macro_block": 64}, "dense", "macro blocks of 64"),
    ],
)
def test_plans_say_what_and_why(shape, options, route, why):
    plan = mxfp4_kernels.plan_linear_w4a16(*shape, "90", **options)
    assert plan.route == route
    assert why in plan.reason
    assert bool(plan.configs) == (route == "fused")


@pytest.mark.parametrize("arch", ["80", "90", "120", "gfx942"])
@pytest.mark.parametrize("n_tokens", [1, 9, 64, 200])
def test_plans_cover_every_column_and_do_not_oversubscribe(arch, n_tokens):
    for n_rows, n_cols in ((1, 8), (4096, 4096), (151936, 2048), (896, 27648)):
        plan = mxfp4_kernels.plan_linear_w4a16(n_tokens, n_rows, n_cols, arch, multiprocessors=100)
        for config in plan.configs:
            splits = -(-n_cols // (config["BK"] * config["split_steps"]))
            tiles = -(-n_rows // config["BN"]) * -(-n_tokens // config["BM"])
            assert splits * config["split_steps"] * config["BK"] >= n_cols
            assert (splits - 1) * config["split_steps"] * config["BK"] < n_cols
            assert splits == 1 or splits * tiles <= 100 * 4 * 2


@pytest.mark.parametrize(
    ("steps", "tiles", "programs", "warps", "found"),
    [
        (32, 32, 528, 4, 4),  # 256 programs of 4 steps: two on a multiprocessor; 12 splits would make it three of 3
        (16, 96, 396, 4, 4),
        (6, 128, 396, 4, 3),
        (32, 512, 528, 4, 32),
        (112, 32, 528, 4, 14),
        (4, 1, 528, 2, 2),  # no shorter ones
    ],
)
def test_columns_are_split_so_that_the_busiest_multiprocessor_is_done_early(steps, tiles, programs, warps, found):
    assert split_steps(steps, tiles, programs, 132, warps) == found


PACKED = numerics.quantize(torch.ones(4, 64), macro_block=128)


def call(x=None, **changes):
    parts = {"codes": PACKED.codes, "scale": PACKED.scale, "macro": PACKED.macro, "macro_block": 128, "length": 64}
    return mxfp4_kernels.linear_w4a16(torch.ones(2, 64) if x is None else x, **parts | changes)


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (TypeError, "needs a tensor", {"x": 3}),
        (TypeError, "float64", {"x": torch.ones(2, 64, dtype=torch.float64)}),
        (ValueError, "last axis must be 64", {"x": torch.ones(2, 63)}),
        (ValueError, "last axis must be 64", {"x": torch.tensor(1.0)}),
        (TypeError, "codes must be uint8", {"codes": PACKED.codes.int()}),
        (ValueError, "codes has the shape", {"codes": PACKED.codes[:, 1:]}),
        (ValueError, "scale has the shape", {"scale": PACKED.scale[1:]}),
        (ValueError, "macro is missing", {"macro": None}),
        (ValueError, "macro is given", {"macro_block": None}),
        (ValueError, "residual_codes is missing", {"outlier_fallback": 0.5}),
        (ValueError, "macro_block=48", {"macro_block": 48}),
        (TypeError, "bias must be floating-point", {"bias": torch.ones(4, dtype=torch.int32)}),
        (ValueError, "bias has the shape", {"bias": torch.ones(5)}),
        (TypeError, "out is torch.float16", {"out": torch.ones(2, 4, dtype=torch.float16)}),
        (ValueError, "out must be contiguous", {"out": torch.ones(4, 2).T}),
        (ValueError, "scale is on meta", {"scale": PACKED.scale.to("meta")}),
        (ValueError, "needs GPU tensors", {}),
    ],
)
def test_wrong_arguments_are_refused(error, message, changes):
    with pytest.raises(error, match=message):
        call(**changes)


class _Launch:
    """Stands for a kernel: keeps what it was launched with."""

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.calls.append((grid, arguments, constants))


def test_a_launch_reads_no_value_of_any_tensor(monkeypatch):
    """Fake tensors have none: a host that waited for one would raise. What is left can be captured in a graph."""
    from mxfp4_kernels.gemm import decode

    kernel = _Launch()
    monkeypatch.setattr(decode, "linear_kernel", kernel)
    monkeypatch.setattr(decode, "INTERPRETED", True)
    with FakeTensorMode(allow_non_fake_inputs=False):
        x = torch.empty(3, 4096, dtype=torch.bfloat16)
        codes, scale = (torch.empty(256, 4096 // n, dtype=torch.uint8) for n in (2, 32))
        y = mxfp4_kernels.linear_w4a16(x, codes, scale, length=4096)
    assert y.shape == (3, 256)
    ((grid, arguments, _),) = kernel.calls
    assert grid == (2, 16, 1) and arguments[10] == 16
    # Where partial sums go, and the counters.
    sums, arrived = arguments[4]
    assert sums.shape == (16, 3, 256) and arrived.dtype == torch.int32


def test_captured_launches_never_share_counters(monkeypatch):
    from mxfp4_kernels.common import counters

    device = torch.device("cpu")
    monkeypatch.setattr(counters, "_for_graphs", {device: (torch.zeros(256, dtype=torch.int32), 0)})
    given = [counters._captured(count, device) for count in (1, 70, 64)]
    places = [part.storage_offset() for part in given]
    assert places == [0, 32, 128]
    # Used up: the graph clears some of its own.
    other = counters._captured(65, device)
    assert other.numel() == 65 and other.storage_offset() == 0 and not other.any()
    assert other.untyped_storage().data_ptr() != given[0].untyped_storage().data_ptr()


def test_counters_are_never_allocated_by_the_launching_thread(monkeypatch):
    """Its allocations may go to the memory of a CUDA graph that is warmed up, which later graphs overwrite."""
    from mxfp4_kernels.common import counters

    synchronized, threads = [], []

    class Stream:
        cuda_stream = 7

        def synchronize(self):
            synchronized.append(len(threads))

    def zeros(count, *, dtype, device):
        threads.append(threading.get_ident())
        return torch.empty(count, dtype=dtype).zero_()

    monkeypatch.setattr(counters, "_of_stream", {})
    monkeypatch.setattr(counters, "_for_graphs", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, contextlib.nullcontext)
    monkeypatch.setattr(torch, "zeros", zeros)
    device = torch.device("cuda", 0)
    few, same, many = (counters.zeros_of_a_launch(count, device) for count in (3, 4000, 5000))
    assert few is same and many.numel() >= 5000 and not many.any()
    # Those of graphs, those of the stream, and more of these; the first are cleared before any graph can run.
    assert len(threads) == 3 and threading.get_ident() not in threads
    assert synchronized == [1]
