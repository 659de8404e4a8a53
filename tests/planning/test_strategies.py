# SPDX-License-Identifier: Apache-2.0
"""Bytes per GPU under each engine, by arithmetic on a made-up model."""

from dataclasses import replace

import pytest

from hf_mxfp4.planning.sizes import ModelSizes
from hf_mxfp4.planning.strategies import STRATEGIES, optimizer_bytes, reference_bytes, state_parts


#: 1000 float32 parameters, 400 of them in the larger of two layers, 300 outside of layers; all trained.
SIZES = ModelSizes(
    weights=4000,
    elements=1000,
    trained=4000,
    trained_elements=1000,
    factors=130,
    layer=1600,
    layer_elements=400,
    outside=1200,
    outside_elements=300,
    quantized_elements=600,
    cached_elements=600,
    largest_copy=100,
    vocabulary=10,
    hidden=10,
    widest=20,
    head_trained=True,
)
#: 500 bytes of packed weights and 100 bfloat16 numbers of adapters.
PACKED = replace(
    SIZES, weights=700, elements=100, trained=200, trained_elements=100, factors=60, layer=250, layer_elements=40,
    outside=100, outside_elements=50,
)  # fmt: skip
NAMED = {strategy.name: strategy for strategy in STRATEGIES}


def parts(name, gpus, sizes=SIZES, optimizer="adamw"):
    found = state_parts(NAMED[name], sizes, gpus, optimizer, compute=2)
    return [found[key] for key in ("weights", "gradients", "optimizer", "buffers of the engine")]


def test_ddp_holds_everything_and_buckets():
    assert parts("DDP", 1) == [4000, 4000, 8000, 0]
    assert parts("DDP", 4) == [4000, 4000, 8000, 4000]


def test_fsdp2_shards_all_and_gathers_layers():
    # Two layers, the gradients of one, and what is outside, in 16 bits.
    assert parts("FSDP2", 4) == [1000, 1000, 2000, 2 * (3 * 400 + 300)]
    assert parts("FSDP2", 1) == [4000, 4000, 8000, 0]


def test_zero_holds_16_bits_and_shares_of_float32():
    assert parts("ZeRO-2", 4) == [2000 + 1000, 500, 2000, 2000]
    assert parts("ZeRO-3", 4) == [500 + 1000, 500, 2000, 2000 + 2000]


def test_buffers_of_deepspeed_end_at_its_defaults():
    large = replace(SIZES, elements=10**10, trained_elements=10**10)
    assert parts("ZeRO-2", 4, large)[3] == 1e9
    assert parts("ZeRO-3", 4, large)[3] == 3e9


def test_packed_weights_under_ddp_and_fsdp2():
    assert parts("packed+LoRA, DDP", 1, PACKED) == [700, 200, 400, 0]
    assert parts("packed+LoRA, FSDP2", 4, PACKED) == [175, 50, 100, 2 * 250 + 100]


@pytest.mark.parametrize(
    ("optimizer", "expected"), [("adamw", 8000), ("adamw_8bit", 2031.25), ("adafactor", 520), ("sgd", 0)]
)
def test_optimizers(optimizer, expected):
    assert optimizer_bytes(optimizer, SIZES, 4) == expected


def test_adamw_on_16_bit_weights_keeps_16_bit_states():
    half = replace(SIZES, weights=2000, trained=2000)
    assert parts("DDP", 1, half)[2] == 4000


def test_an_unknown_optimizer():
    with pytest.raises(ValueError, match="'lion' is not known; choose one of adamw, adamw_8bit"):
        optimizer_bytes("lion", SIZES, 4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("DDP", 4000), ("FSDP2", 1000), ("ZeRO-2", 2000), ("ZeRO-3", 500), ("packed+LoRA, DDP", 0)],
)
def test_a_reference_model(name, expected):
    assert reference_bytes(NAMED[name], SIZES, 4) == expected
