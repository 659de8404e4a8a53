# SPDX-License-Identifier: Apache-2.0
"""Checks the interpreted kernels; prints what is found of each family as JSON.

TRITON_INTERPRET=1 python run_self_checks.py
"""

import json

import torch

from hf_mxfp4.backends import self_check


if __name__ == "__main__":
    print(json.dumps(self_check.states(torch.device("cpu"), check=True)))
