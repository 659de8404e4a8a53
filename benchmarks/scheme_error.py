# SPDX-License-Identifier: Apache-2.0
"""Relative squared error of the quantization schemes on random data; writes `benchmarks/results/scheme_error.json`.

    python -m benchmarks.scheme_error

Rows of 1024 elements whose standard deviations are spread over one octave, 2 million elements per distribution, seed 0.
The baseline is the macro-block scaling of arXiv 2605.20402: rceil with the static factor.
"""

import datetime
import importlib.metadata
import json
import platform
from pathlib import Path

import torch

from hf_mxfp4.numerics import decompose


RESULT = Path(__file__).parent / "results" / "scheme_error.json"
COMMAND = "python -m benchmarks.scheme_error"
SHAPE = (2048, 1024)
SCHEMES = {
    "rceil": {},
    "even": {"scale_rule": "even"},
    "rceil, static factor": {"macro_block": 128},
    "even, dynamic factor": {"scale_rule": "even", "macro_block": 128, "macro_search": "dynamic"},
    "rceil, block mantissas": {"macro_block": 128, "macro_search": "blockwise"},
    "even, block mantissas": {"scale_rule": "even", "macro_block": 128, "macro_search": "blockwise"},
    "mse, block mantissas": {"scale_rule": "mse", "macro_block": 128, "macro_search": "blockwise"},
    "rceil, static factor, fallback 0.5": {"macro_block": 128, "outlier_fallback": 0.5},
}
BASELINE = "rceil, static factor"


def samples() -> dict[str, torch.Tensor]:
    """The three distributions, float32 [2048, 1024]."""
    torch.manual_seed(0)
    spread = torch.exp2(torch.rand(SHAPE[0], 1))
    return {
        "Gaussian": torch.randn(SHAPE) * spread,
        "Laplace": torch.distributions.Laplace(0.0, 1.0).sample(SHAPE) * spread,
        "Student-t(4)": torch.distributions.StudentT(4.0).sample(SHAPE) * spread,
    }


def main() -> None:
    versions = {"torch": importlib.metadata.version("torch")}
    records = []
    data = samples()
    print("| scheme | " + " | ".join(data) + " |\n|---|" + "---|" * len(data))
    baseline = {kind: decompose(x, **SCHEMES[BASELINE]).relative_mse for kind, x in data.items()}
    for name, options in SCHEMES.items():
        row = []
        for kind, x in data.items():
            error = decompose(x, **options)
            row.append(f"{100 * error.relative_mse:.3f}")
            records.append(
                {
                    "name": f"{name} / {kind}",
                    "shape": list(SHAPE),
                    "value": error.relative_mse,
                    "unit": "relative squared error",
                    "baseline": baseline[kind],
                    "ratio": baseline[kind] / error.relative_mse,
                    "ceiling_fraction": None,
                    "energy_ratio": error.energy_ratio,
                    "cosine_scale_grid": error.cosine_scale_grid,
                    "hardware": f"{platform.machine()} CPU",
                    "versions": versions,
                    "command": COMMAND,
                    "date": datetime.date.today().isoformat(),
                }
            )
        print(f"| {name} | " + " | ".join(row) + " |")
    RESULT.write_text(json.dumps(records, indent=2) + "\n")


if __name__ == "__main__":
    main()
