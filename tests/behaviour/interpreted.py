# SPDX-License-Identifier: Apache-2.0
"""Section ``interpreted``: the Triton kernels, in Triton's interpreter; for a process with TRITON_INTERPRET=1."""

import os

import torch

from .inputs import hard_matrix, save_base
from .launches import launches
from .models import DENSE, MOE, load, record_steps
from .numerics import RULES, record_scheme
from .record import Record


#: Of tensors: what goes with every scale rule.
_SCHEMES = (
    {},
    {"macro_block": 128, "outlier_fallback": 0.5},
    {"macro_block": "row"},
    {"macro_block": 64, "macro_search": "dynamic", "block_rows": 32},
    {"macro_block": 128, "macro_search": "blockwise", "outlier_fallback": 0.3},
)
#: Of models: mode and options.
_MODELS = {
    "w4a4": ("qat", {"preset": "w4a4"}),
    "w4a4g8": ("qat", {"preset": "w4a4g8", "matmul_backend": "fp8", "macro_block": None, "outlier_fallback": None}),
    "w4a4g4": ("qat", {"preset": "w4a4g4", "matmul_backend": "fp8", "macro_block": None, "outlier_fallback": None}),
    "paper_b": ("qat", {"preset": "paper_b", "matmul_backend": "fp8"}),
    "tuned": ("qat", {"preset": "w4a4g4_tuned"}),
    "packed": ("packed", {"preset": "w4a16"}),
    "packed w4a4": ("packed", {"preset": "w4a4", "macro_block": None}),
}
_SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}


def record(record: Record) -> None:
    """Record everything of this section."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("kernels are interpreted under TRITON_INTERPRET=1 alone; `record` sets it")
    x = hard_matrix(32, 160)
    for rule in RULES:
        for options in _SCHEMES:
            options = {"scale_rule": rule, **options}
            name = "+".join(map(str, options.values()))
            record_scheme(record, f"tensors/{name}", x, options, backend="triton")
    options = {"scale_rule": "even", "macro_block": 128, "rounding": "stochastic"}
    record_scheme(record, "tensors/stochastic", x, options, backend="triton", seed=99)
    for name, launch in launches("cpu", small=True).items():
        with record.errors(f"functions/{name}"):
            results = launch()
            results = results if isinstance(results, tuple) else (results,)
            for number, result in enumerate(flat(results)):
                keep = record.tensor if isinstance(result, torch.Tensor) else record.value
                keep(f"functions/{name}/{number}", result)
    for family in (DENSE, MOE):
        base = save_base(family, record.workplace / family, **_SMALL)
        for name, (mode, options) in _MODELS.items():
            with record.errors(f"models/{family}/{name}"):
                model = load(base, mode, backend="triton", **options)
                record_steps(record, f"models/{family}/{name}", model, steps=1, length=4)


def flat(results: object) -> list:
    """What nested tuples hold."""
    if isinstance(results, (tuple, list)):
        return [tensor for result in results for tensor in flat(result)]
    return [results]
