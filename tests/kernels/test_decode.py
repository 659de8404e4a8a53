# SPDX-License-Identifier: Apache-2.0
"""Products with packed weights: interpreted against float64, their interface, tiles and counters."""

import contextlib
import threading

import pytest
import torch

from hf_mxfp4 import numerics
from mxfp4_kernels import Packed, Scheme, linear_w4a16
from mxfp4_kernels.decode import counters, product
from mxfp4_kernels.decode.config import Gpu, split_steps, tile_config


def test_interpreted_products_are_those_of_the_exact_weight(run_script):
    report = run_script("run_decode.py", "few", interpret=True)
    assert {name: wrong for name, wrong in report.items() if wrong is not None} == {}
    assert len(report) == 61


@pytest.mark.parametrize(("rows", "tile"), [(1, (8, 128, 4, 3)), (16, (16, 64, 2, 3)), (200, (64, 64, 4, 3))])
def test_tiles_grow_with_the_rows(rows, tile, monkeypatch):
    monkeypatch.setattr("mxfp4_kernels.decode.config.IN_REGISTERS", True)
    assert tile_config.__wrapped__(rows, False, Gpu("90", 132, 232448)) == tile


@pytest.mark.parametrize(
    ("steps", "tiles", "warps", "found"),
    [
        (32, 32, 4, 4),  # 256 programs of 4 steps: two on a multiprocessor; 12 splits would make it three of 3
        (16, 96, 4, 4),
        (6, 128, 4, 3),
        (32, 512, 4, 32),
        (4, 1, 2, 2),  # no shorter ones
    ],
)
def test_columns_are_split_so_that_the_busiest_multiprocessor_is_done_early(steps, tiles, warps, found):
    assert split_steps(steps, tiles, warps, 132) == found


@pytest.mark.parametrize(("counts", "tile"), [((5, 0, 33, 2), 16), ((1,) * 9, 8), ((0, 0, 100), 64), ((128,), 8)])
def test_there_are_slots_for_all_tiles_of_experts(counts, tile):
    needed = sum(-(-count // tile) for count in counts)
    assert product.tile_slots(sum(counts), len(counts), tile) >= needed


SCHEME = Scheme("rceil", 128)
WEIGHT = numerics.quantize(torch.ones(4, 64), macro_block=128)
X = torch.ones(2, 64).bfloat16()


def call(x: object = X, length: int = 64, scheme: Scheme = SCHEME, bias=None, offsets=None, **parts: torch.Tensor):
    packed = Packed(WEIGHT.codes, WEIGHT.scale, WEIGHT.macro)._replace(**parts)
    return linear_w4a16(x, packed, length, scheme, bias, offsets)


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (TypeError, "needs a tensor", {"x": 3}),
        (TypeError, "bfloat16, not torch.float32", {"x": torch.ones(2, 64)}),
        (ValueError, "last axis must be 64", {"x": X[:, 1:]}),
        (ValueError, "do not fill words", {"length": 60}),
        (TypeError, "codes must be uint8", {"codes": WEIGHT.codes.int()}),
        (ValueError, "scale has the shape", {"scale": WEIGHT.scale[1:]}),
        (ValueError, "macro is missing", {"macro": None}),
        (TypeError, "the bias is torch.float32", {"bias": torch.ones(4)}),
        (ValueError, "the bias has the shape", {"bias": torch.ones(5).bfloat16()}),
        (ValueError, "codes need 3 axes", {"offsets": torch.ones(4, dtype=torch.int32)}),
        (ValueError, "several devices", {"x": X.to("meta")}),
        (ValueError, "needs a GPU tensor", {}),
    ],
)
def test_wrong_arguments_are_refused(error, message, changes):
    with pytest.raises(error, match=message):
        call(**changes)


def test_captured_launches_never_share_counters(monkeypatch):
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
