# SPDX-License-Identifier: Apache-2.0
"""The tile decoder of the W4A16 kernels: every code at every scale byte."""


def test_every_code_at_every_scale_byte(run_script):
    report = run_script("run_decode_tile.py", interpret=True)
    assert report == {"cases": 8, "wrong": []}
