# SPDX-License-Identifier: Apache-2.0
"""The device that is measured, and how records name it."""

import os
import platform
from dataclasses import dataclass

import torch

from ..records import installed


#: What records of interpreted runs have in place of a GPU. The documents refuse them.
INTERPRETER = "CPU, Triton interpreter"
NO_GPU = (
    "no GPU that torch can use. On a machine with one, run it as it is; without one, "
    "`TRITON_INTERPRET=1 python -m benchmarks.gpu --tiny --out DIR` checks on tiny shapes that every section works "
    "(its times mean nothing)."
)
NOT_TINY = (
    "TRITON_INTERPRET=1 runs kernels in Triton's interpreter, thousands of times slower: add --tiny, or unset it."
)

_PACKAGES = (
    "torch", "triton", "transformers", "trl", "peft", "hf-mxfp4", "bitsandbytes", "gemlite", "torchao",
)  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """
    Attributes:
        device: where tensors live.
        interpreted: kernels run in Triton's interpreter on the CPU, and times mean nothing.
        tiny: tiny shapes, to see that everything runs.
        capability: CUDA compute capability, ``(0, 0)`` where there is none.
        l2_bytes: of the last-level cache.
    """

    device: torch.device
    interpreted: bool
    tiny: bool
    capability: tuple[int, int] = (0, 0)
    l2_bytes: int = 0

    @classmethod
    def find(cls, tiny: bool) -> "Machine":
        """The GPU, or the interpreter where TRITON_INTERPRET=1 asks for it.

        Raises `RuntimeError` when there is neither, in words that say what to do.
        """
        if os.environ.get("TRITON_INTERPRET") == "1":
            if not tiny:
                raise RuntimeError(NOT_TINY)
            return cls(torch.device("cpu"), interpreted=True, tiny=True)
        if not torch.cuda.is_available():
            raise RuntimeError(NO_GPU)
        properties = torch.cuda.get_device_properties(0)
        capability = (0, 0) if torch.version.hip else (properties.major, properties.minor)
        l2_bytes = getattr(properties, "L2_cache_size", 64 << 20)
        return cls(torch.device("cuda", 0), interpreted=False, tiny=tiny, capability=capability, l2_bytes=l2_bytes)

    @property
    def hardware(self) -> str:
        if self.interpreted:
            return INTERPRETER
        properties = torch.cuda.get_device_properties(self.device)
        runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        return f"{properties.name}, {memory}, {properties.multi_processor_count} multiprocessors, {runtime}"

    def synchronize(self) -> None:
        if not self.interpreted:
            torch.cuda.synchronize(self.device)

    def free_memory(self) -> None:
        if not self.interpreted:
            torch.cuda.empty_cache()


def versions() -> dict[str, str]:
    """Of Python and of the packages that have a part in the numbers, those that are installed."""
    return {"python": platform.python_version(), **installed(_PACKAGES)}
