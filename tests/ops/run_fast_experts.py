# SPDX-License-Identifier: Apache-2.0
"""Trains experts on the FP8 engine and on the dense one; prints how far results are apart, as JSON.

TRITON_INTERPRET=1 python run_fast_experts.py [all]    on the CPU, few cases or all
python run_fast_experts.py cuda                        on a GPU, with engine="auto"
"""

import json
import sys

import torch
from factors import factors_config
from torch import nn

import mxfp4_kernels
from hf_mxfp4.gemm import gemm_kernel_counts, group_by_expert, linear, reset_gemm_kernel_counts
from hf_mxfp4.gemm.tensor_cores import fast_grouped
from hf_mxfp4.layers import MXFP4Experts, cached_weights
from hf_mxfp4.numerics import FP8


WHAT = sys.argv[1] if len(sys.argv) > 1 else "few"
DEVICE = "cuda" if WHAT == "cuda" else "cpu"
ENGINE = "auto" if WHAT == "cuda" else "fp8"
PLAIN, NO_FALLBACK = {"outlier_fallback": None, "macro_block": None}, {"outlier_fallback": None}
CONFIGS = {
    "w4a4": {"preset": "w4a4", **NO_FALLBACK},
    "w4a4g4": {"preset": "w4a4g4", **NO_FALLBACK},
    "w4a4g4 plain": {"preset": "w4a4g4", "saved_activations": "fp8", "scale_rule": "even", **PLAIN},
    "w4a4g8 plain": {"preset": "w4a4g8", "saved_activations": "mxfp4", **PLAIN},
    "w4a4g8": {"preset": "w4a4g8", **NO_FALLBACK},
    "paper_a": {"preset": "paper_a", **NO_FALLBACK},
    "paper_b": {"preset": "paper_b"},
    "fallback": {"preset": "w4a4"},
}
HIDDEN, INNER = (140, 12) if DEVICE == "cpu" else (1024, 384)
FEW = ("w4a4g4", "w4a4g8 plain", "paper_b")
EXPERTS, SIZES = 4, (5, 0, 130, 2)  # of the third more than one block of 128
SMALL = (3, 0, 5, 2) if WHAT == "few" else SIZES


class Plain(nn.Module):
    """Laid out as transformers' experts are."""

    def __init__(self, transposed: bool):
        super().__init__()
        self.num_experts, self.hidden_dim, self.intermediate_dim = EXPERTS, HIDDEN, INNER
        self.has_gate, self.has_bias, self.is_transposed, self.is_concatenated = True, True, transposed, True
        generator = torch.Generator().manual_seed(1)
        for name, (rows, columns) in {"gate_up_proj": (2 * INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}.items():
            weight = torch.randn(EXPERTS, rows, columns, generator=generator) * columns**-0.5
            weight = weight.mT.contiguous() if transposed else weight
            setattr(self, name, nn.Parameter(weight))
            setattr(self, f"{name}_bias", nn.Parameter(torch.randn(EXPERTS, rows, generator=generator)))
        self.act_fn = nn.SiLU()

    def _apply_gate(self, states):
        gate, up = states.chunk(2, dim=-1)
        return self.act_fn(gate) * up


def experts(engine: str, options: dict, transposed: bool = False, dtype=torch.float32) -> MXFP4Experts:
    config = factors_config(engine=engine, backend="eager" if engine == "dense" else "triton", **options)
    return MXFP4Experts.from_experts(Plain(transposed).to(DEVICE, dtype), config, "experts")


def routed(sizes=SIZES):
    ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return group_by_expert(ids.to(DEVICE), EXPERTS)[1]


def results(engine: str, dtype: torch.dtype, options: dict, transposed: bool, sizes=SIZES) -> dict[str, torch.Tensor]:
    """Of one projection: the second would quantize what the first is off by."""
    layer, groups = experts(engine, options, transposed, dtype), routed(sizes)
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(sum(sizes), size, generator=generator) for size in (HIDDEN, 2 * INNER))
    x, grad = x.to(DEVICE, dtype).requires_grad_(), (grad * 1e-3).to(DEVICE, dtype)
    out = layer.project("gate_up_proj", x, groups)
    out.backward(grad)
    if engine == ENGINE:
        assert "counts" not in vars(groups), "counts were read back"
    weight, bias = layer.gate_up_proj.grad, layer.gate_up_proj_bias.grad
    assert not sizes[1] and not weight[1].any() and not bias[1].any()
    found = {"out": out, "x": x.grad, "weight": weight, "bias": bias}
    return {name: value.detach().double() for name, value in found.items()}


def distance(found: torch.Tensor, dense: torch.Tensor) -> float:
    """Largest difference over the size of the result."""
    return float((found - dense).abs().max() / dense.abs().max())


def has_fp8_operands(options: dict) -> bool:
    """Whether gradients are E4M3 of their own, not folded MXFP4, of which FP8 tensor cores lose digits."""
    scheme = factors_config(**options).gemms()
    return any(FP8 in (gemm.left, gemm.right) for gemm in (scheme.dgrad, scheme.wgrad))


def compare(everything: bool) -> dict:
    report = {}
    for number, (name, options) in enumerate(CONFIGS.items()):
        for case in range(4) if everything else (number % 4,) if name in FEW else ():
            transposed, dtype = bool(case % 2), (torch.bfloat16, torch.float32)[case // 2]
            dense = results("dense", dtype, options, transposed)
            reset_gemm_kernel_counts()
            found = results(ENGINE, dtype, options, transposed)
            counts = gemm_kernel_counts()
            report[f"{name}, {transposed}, {str(dtype).removeprefix('torch.')}"] = {
                "distance": {part: distance(found[part], dense[part]) for part in dense},
                "engines": [next(iter(counts[gemm])) for gemm in ("fprop", "dgrad", "wgrad")],
                "inexact": counts["inexact_blocks"],
                "fp8 operands": has_fp8_operands(options),
            }
    return report


def weights_are_folded_once() -> list[int]:
    """Calls of the folding kernel for weights in two forward passes within [`cached_weights`], and in one after it."""
    calls, original = [], mxfp4_kernels.fold_e4m3

    def counted(x: torch.Tensor, **options):
        calls.append(tuple(x.shape))
        return original(x, **options)

    mxfp4_kernels.fold_e4m3 = counted
    layer = experts(ENGINE, CONFIGS["w4a4g8 plain"])
    x, ids, share = torch.randn(3, HIDDEN, device=DEVICE), torch.tensor([[0], [2], [2]]), torch.ones(3, 1)
    inputs, found = (x, ids.to(DEVICE), share.to(DEVICE)), []
    with torch.no_grad(), cached_weights("dense"):
        first, second = layer(*inputs), layer(*inputs)
        found.append(sum(rows > 3 for rows, _ in calls))
    with torch.no_grad():
        layer.down_proj.mul_(2)
        third = layer(*inputs)
    found.append(sum(rows > 3 for rows, _ in calls))
    mxfp4_kernels.fold_e4m3 = original
    assert torch.equal(first, second) and not torch.equal(first, third)
    return found


def no_rows() -> bool:
    """No row at all: an empty result, and zeros as gradients."""
    layer = experts(ENGINE, CONFIGS["w4a4g4 plain"])
    x = torch.empty(0, HIDDEN, device=DEVICE, requires_grad=True)
    out = layer.project("down_proj", x[:, :INNER], routed((0, 0, 0, 0)))
    out.sum().backward()
    return out.shape == (0, HIDDEN) and x.grad.shape == x.shape and not layer.down_proj.grad.any()


def saved_for_wgrad() -> dict[str, list[str]]:
    """The forms in which an input is saved, and what of the results is not, to the bit, what it is when its quantized
    values are saved, each read by a kernel of its own; last, of the gradient of the weight when its product is a dense
    one after all."""
    report, ways = {}, (linear._saved_operand, fast_grouped.gradients)
    for name in ("w4a4g8 plain", "w4a4g8", "w4a4g4"):
        forms, options = [], {**CONFIGS[name], "saved_activations": "full"}

        def noted(*arguments, _forms=forms):
            found = ways[0](*arguments)
            _forms.append("values" if found[1] is None else found[1].record.form)
            return found

        linear._saved_operand = noted
        found = results(ENGINE, torch.bfloat16, options, False, SMALL)
        fast_grouped.gradients = lambda *_: (None, None)
        late = results(ENGINE, torch.bfloat16, options, False, SMALL)["weight"]
        linear._saved_operand = lambda *_: (None, None)
        dense = results(ENGINE, torch.bfloat16, options, False, SMALL)["weight"]
        fast_grouped.gradients = ways[1]
        plain = results(ENGINE, torch.bfloat16, options, False, SMALL)
        linear._saved_operand = ways[0]
        wrong = [part for part in plain if not torch.equal(found[part], plain[part])]
        report[name] = [*forms, *wrong, *["dense"] * (not torch.equal(late, dense))]
    return report


if __name__ == "__main__":
    found = {"experts": compare(WHAT != "few"), "folds": weights_are_folded_once(), "no rows": no_rows()}
    if DEVICE == "cpu":
        found["saved"] = saved_for_wgrad()
    print(json.dumps(found))
