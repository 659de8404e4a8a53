# SPDX-License-Identifier: Apache-2.0
"""The experts of the vLLM plugin on the grouped kernels against experts one after the other; prints a JSON report.

    TRITON_INTERPRET=1 python run_vllm_experts.py

Reported are the largest difference relative to the largest value, of one process and of the sum of two with half the
experts each, how often counts were read back, and launches. Memory that nothing was written to is not a number.
"""

import json
from collections import Counter
from functools import partial

import torch

import mxfp4_kernels
from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.gemm import Groups, quantize_weight
from hf_mxfp4.integrations.vllm import experts_operator


E, HIDDEN, INNER, TOKENS = 4, 128, 64, 6
CASES = {
    "packed w4a16": {"preset": "w4a16"},
    "packed w4a4": {"preset": "w4a4", "outlier_fallback": 0.5},
}
LAUNCHES = Counter()


def spy() -> None:
    """Count the launches of grouped products, and how often the host reads where rows of experts end."""

    def counted(name, function, *args, **kwargs):
        LAUNCHES[name] += 1
        return function(*args, **kwargs)

    mxfp4_kernels.linear_w4a16 = partial(counted, "linear_w4a16", mxfp4_kernels.linear_w4a16)
    counts = vars(Groups)["counts"].func
    Groups.counts = property(lambda groups: counted("read", counts, groups))


def weights(config: MXFP4RLConfig) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for shape in ((E, 2 * INNER, HIDDEN), (E, HIDDEN, INNER)):
        values = torch.randn(shape, generator=generator) * 0.3
        parts = [quantize_weight(value, config.weight_scheme) for value in values]
        found.append([torch.stack([part[name] for part in parts]) for name in parts[0]])
    return found


def compute(case: str, backend: str, places: list[list[int]]) -> torch.Tensor:
    """The sum over processes of which each has the experts named."""
    config = MXFP4RLConfig(mode="packed", **CASES[case])
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    ids = torch.tensor([[0, 1], [2, 1], [0, 2], [1, 0], [0, 1], [1, 3]])
    biases = [torch.randn(E, size, generator=generator).bfloat16() for size in (2 * INNER, HIDDEN)]
    inputs, out = config.activation_scheme, 0
    for own in places:
        expert_map = torch.tensor([own.index(expert) if expert in own else -1 for expert in range(E)])
        out = out + experts_operator(
            x,
            torch.rand(TOKENS, 2, generator=torch.Generator().manual_seed(2)),
            ids,
            None if len(own) == E else expert_map,
            *([part[own] for part in weight] for weight in weights(config)),
            [bias[own] for bias in biases],
            str(config.weight_scheme),
            "" if inputs is None else str(inputs),
            "swigluoai",
            backend,
        )
    return out


if __name__ == "__main__":
    spy()
    torch.use_deterministic_algorithms(True)
    report = {}
    for case in CASES:
        wanted = compute(case, "eager", [list(range(E))])
        LAUNCHES.clear()
        found = {"one": compute(case, "triton", [list(range(E))])}
        launches = dict(LAUNCHES)
        found["two"] = compute(case, "triton", [[0, 2], [1, 3]])
        differences = {name: ((out - wanted).abs().max() / wanted.abs().max()).item() for name, out in found.items()}
        report[case] = {"differences": differences, "launches": launches, "read": LAUNCHES["read"]}
    print(json.dumps(report))
