# SPDX-License-Identifier: Apache-2.0
"""The counters of bytes, on tensors that one can count by hand, and of launches."""

import torch
from tiny_models import make_model
from torch import nn

from benchmarks import host_time
from benchmarks.counters import LiveTensors, SavedTensors, state_bytes


def test_states_of_an_optimizer():
    model = nn.Linear(8, 4)
    model.register_buffer("table", torch.zeros(5, dtype=torch.uint8))
    optimizer = torch.optim.AdamW(model.parameters())
    assert state_bytes(model, optimizer) == {"weights": 36 * 4 + 5, "gradients": 0, "optimizer": 0}
    model(torch.zeros(2, 8)).sum().backward()
    optimizer.step()
    # Two numbers per parameter, and a step counter of 4 bytes for each of the two tensors.
    assert state_bytes(model, optimizer) == {"weights": 149, "gradients": 144, "optimizer": 2 * 144 + 8}


def test_saved_tensors_of_a_product_and_an_activation():
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Sigmoid(), nn.Linear(16, 4, bias=False))
    x = torch.zeros(3, 8)
    with SavedTensors(model) as saved:
        model(x)
    # x for the first weight; the sigmoid's output, which is the input of the second product too. No weights.
    assert saved.held == x.nbytes + 3 * 16 * 4


def test_layers_are_told_apart_and_checkpointing_is_predicted_by_a_pass_without_it():
    ids = torch.arange(2, 30).view(2, 14)
    model = make_model("llama", layers=3, hidden=64).train()
    with SavedTensors(model) as plain:
        model(ids, labels=ids, use_cache=False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with SavedTensors(model) as checkpointed:
        model(ids, labels=ids, use_cache=False)
    assert plain.held_checkpointed == checkpointed.held_checkpointed < plain.held / 3
    # What goes into three layers: hidden states of 2 x 14 x 64 float32 numbers each.
    assert plain.held_checkpointed > 3 * 2 * 14 * 64 * 4


def test_live_tensors():
    kept = torch.zeros(100)
    with LiveTensors([kept, {"again": kept}]) as live:
        assert live.current == 400
        a = torch.zeros(1000)
        b = a + 1
        assert (live.current, live.peak) == (8400, 8400)
        view = b[:10]
        del a, b
        assert (live.current, live.peak) == (4400, 8400)
        del view
        assert (live.current, live.peak) == (400, 8400)
        torch.zeros(10)
        assert live.peak == 8400


@torch.no_grad()
def test_a_packed_decoder_layer_is_four_launches():
    """q, k and v are one, and so are gate and up."""
    with host_time.stubbed_launches():
        counts = host_time.counted(host_time.stack(is_packed=True, layers=1))
    assert counts["launches"] == 4
    assert counts["frames"] < 300


@torch.no_grad()
def test_kernels_without_machine_code_stay_out_of_the_cache_of_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    layer = host_time.packed_layer(224)
    with host_time.stubbed_launches():
        host_time.planned_for_gpu(layer, torch.randn(1, 224).bfloat16())
        layer(torch.randn(1, 224).bfloat16())
    assert [path.name for path in tmp_path.iterdir()] == ["without_machine_code"]
