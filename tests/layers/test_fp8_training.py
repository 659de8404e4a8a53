# SPDX-License-Identifier: Apache-2.0
"""Linear layers that train on FP8 products (preset w4a8g8): what they launch on a GPU, what they keep for the backward
pass, and how a GPU converts a weight without being waited for."""

import importlib
import logging
from unittest import mock

import pytest
import torch
from tables import needs_fp8_on_cpu
from torch import nn

from benchmarks.launch_counts import both_passes
from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig, ops


fp8 = importlib.import_module("hf_mxfp4.ops.fp8")

#: Tokens, outputs and inputs.
M = 48
N = 32
K = 80


@pytest.mark.parametrize(("is_cached", "limit"), [(False, 12), (True, 7)])
def test_both_passes_launch_no_more_and_wait_for_nothing(is_cached, limit):
    launches = both_passes("w4a8g8", is_cached)
    assert launches.counts["aten::_scaled_mm_v2"] == 3
    assert launches.counts.total() <= limit
    assert launches.waits == 0


# ---- what is kept for the backward pass -----------------------------------------------------------------------------


def kept_by(n_tokens: int, **options) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Dtypes and shapes of what a layer saves, its weight and scales left out."""
    layer = MXFP4Linear.from_linear(nn.Linear(K, N), MXFP4RLConfig(preset="w4a8g8", **options))
    kept = []

    def note(tensor):
        kept.append((tensor.dtype, tuple(tensor.shape)))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(torch.randn(n_tokens, K).requires_grad_())
    return [found for found in kept if found[0] == torch.float8_e4m3fn]


def test_an_input_is_kept_once_as_wgrad_takes_it():
    assert kept_by(M) == [(torch.float8_e4m3fn, (K, M))]


@needs_fp8_on_cpu
@pytest.mark.parametrize(("n_tokens", "has_weight"), [(N, True), (N - 1, False)])
def test_a_weight_is_kept_where_there_are_as_many_tokens_as_outputs(n_tokens, has_weight):
    kept = kept_by(n_tokens, matmul_backend="fp8")
    assert kept == [(torch.float8_e4m3fn, (K, N))] * has_weight + [(torch.float8_e4m3fn, (K, n_tokens))]


@needs_fp8_on_cpu
@pytest.mark.parametrize(("n_tokens", "for_dgrad"), [(N, [True]), (N - 1, [False, True])])
def test_a_forward_pass_transposes_a_weight_only_if_that_is_kept(n_tokens, for_dgrad, monkeypatch):
    convert = fp8.WeightConversion.__call__
    made = []

    def noted(conversion, values, has_dgrad, out):
        made.append(has_dgrad)
        return convert(conversion, values, has_dgrad, out)

    monkeypatch.setattr(fp8.WeightConversion, "__call__", noted)
    layer = MXFP4Linear.from_linear(nn.Linear(K, N), MXFP4RLConfig(preset="w4a8g8", matmul_backend="fp8"))
    layer(torch.randn(n_tokens, K).requires_grad_()).sum().backward()
    assert made == for_dgrad


# ---- weights on a GPU -----------------------------------------------------------------------------------------------


#: What one scale for the matrix holds, what a scale for each row holds, and what neither holds.
EXACT = torch.tensor([[1.0, 0.5, 3.0], [2.0, 1.5, -6.0]])
ROWS = EXACT * torch.tensor([[1.0], [2.0**-20]])
BLOCKS = EXACT * torch.tensor([1.0, 2.0**-20, 1.0])


@pytest.fixture
def on_gpu(monkeypatch):
    """Tensors of the CPU claim to be on a GPU, which copies to the host at once."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ops.reset_matmul_counts()


@pytest.fixture
def no_wait(monkeypatch):
    """Return what makes it an error to ask for a value of the GPU."""
    return lambda: monkeypatch.setattr(torch.Tensor, "item", None)


def test_the_first_conversion_waits_and_later_ones_use_what_it_found(on_gpu, no_wait):
    conversion = fp8.WeightConversion()
    conversion(ROWS)
    assert conversion.scales == "rows"
    no_wait()
    found = conversion(ROWS)
    assert torch.equal(found.elements.float() * found.scale, ROWS)
    assert ops.matmul_counts()["inexact_elements"] == 0


def test_a_weight_that_spreads_is_rounded_once_counted_and_then_has_finer_scales(on_gpu, no_wait, caplog):
    conversion = fp8.WeightConversion()
    conversion(EXACT)
    no_wait()
    caplog.set_level(logging.WARNING)

    rounded = conversion(ROWS)
    exact = conversion(ROWS)

    assert rounded.column_scale is None
    assert not torch.equal(rounded.elements.float() * rounded.scale, ROWS)
    assert torch.equal(exact.elements.float() * exact.scale, ROWS)
    assert [record.args[0] for record in caplog.records] == [3]
    assert ops.matmul_counts()["inexact_elements"] == 3


def test_a_weight_that_no_scales_of_rows_hold_is_multiplied_in_16_bits(on_gpu, no_wait):
    conversion = fp8.WeightConversion()
    conversion(ROWS)
    no_wait()
    conversion(BLOCKS)
    assert conversion(BLOCKS) is None
    assert conversion.scales == "none"


def test_rounded_weights_are_counted_before_their_next_conversion(on_gpu):
    conversion = fp8.WeightConversion()
    conversion(EXACT)
    conversion(ROWS)
    assert ops.matmul_counts()["inexact_elements"] == 3
    assert ops.matmul_counts()["inexact_elements"] == 3
    ops.reset_matmul_counts()
    assert ops.matmul_counts()["inexact_elements"] == 0


def test_a_captured_graph_converts_with_known_scales_alone(on_gpu, monkeypatch):
    conversion = fp8.WeightConversion()
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
        assert conversion(EXACT) is None
    conversion(EXACT)
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
        found = conversion(EXACT)
    assert torch.equal(found.elements.float() * found.scale, EXACT)


def test_a_conversion_in_inference_mode_can_be_counted_outside_of_it(on_gpu):
    conversion = fp8.WeightConversion()
    with torch.inference_mode():
        conversion(EXACT)
    conversion(ROWS)
    assert ops.matmul_counts()["inexact_elements"] == 3


@pytest.mark.parametrize("values", [EXACT, EXACT.expand(2, 2, 3)], ids=["one", "experts"])
def test_on_a_cpu_every_conversion_finds_its_scales(values):
    conversion = fp8.WeightConversion()
    for expected in (values, values * torch.tensor([[1.0], [2.0**-20]]), values):
        found = conversion(expected, has_dgrad=True)
        assert torch.equal(found.elements.float() * found.scale, expected)
        assert (found.column_scale is not None) == (expected is values)
        assert (found.columns is not None) == (values.dim() == 2)
    assert conversion.scales is None
