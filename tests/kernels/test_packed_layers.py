# SPDX-License-Identifier: Apache-2.0
"""Layers on packed weights through the interpreted kernels, forward and backward."""


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
    assert report == {"layers": 12, "launches": 15, "wrong": [], "dequantized": copies}
