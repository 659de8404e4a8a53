# SPDX-License-Identifier: Apache-2.0
"""How an engine computes with a policy: the one table that docs/vllm.md shows and that tests check cell by cell."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig


AS_TRAINED = "as trained"
SAME = "same weights"
ROUNDED = "weights in bfloat16"
OTHER = "other weights"
REFUSED = "refused"

#: Rows: options of `MXFP4RLConfig`.
_MANTISSAS = {"scale_rule": "even", "macro_block": 128, "macro_search": "block_mantissas", "outlier_fallback": None}
SCHEMES = {
    "w4a8": {"preset": "w4a8", **_MANTISSAS, "macro_search": "block_mantissas_fp8"},
    "w4a16": {"preset": "w4a16", **_MANTISSAS},
    "w4a4": {"preset": "w4a4", **_MANTISSAS},
    "paper_a": {"preset": "paper_a"},
    "w4a4, rotated": {"preset": "w4a4", **_MANTISSAS, "fprop": {"rotation": "deterministic-32"}},
    "w8a8": {"preset": "w8a8"},
}

#: Columns that need this package.
OWN = ("transformers", "vLLM")
#: Columns of exports: format and options. The engines are in the text of the docs.
EXPORTS = {
    "nvfp4": {},
    "quark": {"scale_rule": "even"},
    "compressed-tensors": {"scale_rule": "even"},
    "gguf": {"scale_rule": "even"},
    "bf16": {},
}

#: What llama.cpp does to inputs on CPUs is tested in tests/llamacpp_integration.
GGUF = f"{OTHER}, 8-bit inputs"
#: Inputs have 16 bits where a cell names no others.
TABLE = {
    "w4a8": [AS_TRAINED, AS_TRAINED, SAME, OTHER, OTHER, GGUF, SAME],
    "w4a16": [AS_TRAINED, AS_TRAINED, AS_TRAINED, OTHER, OTHER, GGUF, AS_TRAINED],
    "w4a4": [AS_TRAINED, AS_TRAINED, f"{SAME}, NVFP4 inputs", f"{OTHER}, MXFP4 inputs", OTHER, GGUF, SAME],
    "paper_a": [AS_TRAINED, AS_TRAINED, REFUSED, f"{OTHER}, MXFP4 inputs", OTHER, GGUF, ROUNDED],
    "w4a4, rotated": [AS_TRAINED, AS_TRAINED, REFUSED, REFUSED, REFUSED, REFUSED, ROUNDED],
    "w8a8": [AS_TRAINED, REFUSED, REFUSED, REFUSED, REFUSED, REFUSED, REFUSED],
}


def cell(scheme: str, column: str) -> str:
    """How the engine of a column computes with a policy of a scheme."""
    return TABLE[scheme][[*OWN, *EXPORTS].index(column)]


def save_policy(base: Path, folder: Path, scheme: str) -> Any:
    """Save a policy of a scheme whose weights moved away from ``base``, and return it."""
    config = MXFP4RLConfig(mode="qat", **SCHEMES[scheme])
    policy = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, quantization_config=config)
    generator = torch.Generator().manual_seed(0)
    for layer in policy.modules():
        if isinstance(layer, MXFP4Linear):
            layer.weight.data += 0.01 * torch.randn(layer.weight.shape, generator=generator)
    policy.save_pretrained(folder)
    return policy


def as_markdown() -> str:
    """The table of the docs."""
    own = [f"{engine}, this package" for engine in OWN]
    exports = [f"`{format}`" for format in EXPORTS]
    rows = [["scheme", *own, *exports], ["---"] * (1 + len(own) + len(exports))]
    rows += [[f"`{scheme}`", *cells] for scheme, cells in TABLE.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
