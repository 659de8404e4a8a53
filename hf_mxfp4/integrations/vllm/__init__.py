# SPDX-License-Identifier: Apache-2.0
"""vLLM loads packed checkpoints of this package: the entry point `vllm.general_plugins` names [`register`]."""


def register() -> None:
    """Teach vLLM the quantization method `mxfp4_rl`. vLLM calls this in each of its processes, maybe more than once."""
    from .quantization import register_method

    register_method()
