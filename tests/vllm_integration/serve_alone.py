# SPDX-License-Identifier: Apache-2.0
"""Serve checkpoints with vLLM, one after the other, in a process that cannot import hf_mxfp4.

    python serve_alone.py OUT FOLDER...

OUT gets a JSON object: for each folder what reads its layers (the names of methods and schemes, and what inputs are
quantized to) and the log-probabilities of the harness's prompts.
"""

import json
import os
import sys
from pathlib import Path


sys.modules["hf_mxfp4"] = None  # importing it is an error from here on
os.environ["VLLM_PLUGINS"] = ""

from decoding import add_mxfp4_kernels  # noqa: E402
from harness import engine, served_model, vllm_logprobs  # noqa: E402
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS  # noqa: E402


def served(folder: str) -> dict:
    """What vLLM makes of one folder; the engine ends with the function."""
    with engine(folder) as llm:
        methods = [m.quant_method for m in served_model(llm).modules() if getattr(m, "quant_method", None)]
        schemes = [m.scheme for m in served_model(llm).modules() if hasattr(m, "scheme")]
        kernels = [getattr(scheme, "ocp_mx_linear", None) or getattr(scheme, "kernel", None) for scheme in schemes]
        return {
            "readers": sorted({type(reader).__name__ for reader in methods + schemes}),
            "inputs": sorted({str(kernel.config.activation_quant_key) for kernel in kernels}),
            "logprobs": vllm_logprobs(llm).tolist(),
        }


def main(out: str, *folders: str) -> None:
    add_mxfp4_kernels()
    found = {folder: served(folder) for folder in folders}
    assert "mxfp4_rl" not in QUANTIZATION_METHODS
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
