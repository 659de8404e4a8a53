# SPDX-License-Identifier: Apache-2.0
"""Every preset under DDP and FSDP2 with two processes on the CPU, dense and with experts, against one process."""

import functools
from pathlib import Path

import pytest
import torch
from processes import run, script
from run_gemms_distributed import SCHEMES, train


#: Schemes of every run, each rule of what is saved, multiplied and drawn among them; the others are large.
FEW = (
    "w4a4g8", "w4a4g4_tuned", "experts_w4a4", "experts_paper_b", "saved_fp8", "experts_saved_mxfp4", "stochastic",
)  # fmt: skip
REST = tuple(name for name in SCHEMES if name not in FEW)


@pytest.fixture(scope="module")
def distributed(tmp_path_factory):
    """`distributed(engine, scheme)`: what two processes saw, which train all schemes of one kind when first asked."""

    @functools.cache
    def results(schemes: tuple[str, ...]) -> dict:
        out = tmp_path_factory.mktemp("gemms") / "results.pt"
        done = run(script(Path(__file__).with_name("run_gemms_distributed.py"), out, *schemes), ranks=2)
        assert done.returncode == 0, done.output[-3000:]
        return torch.load(out)

    return lambda engine, scheme: results(FEW if scheme in FEW else REST)[engine, scheme]


@functools.cache
def alone(scheme: str) -> dict:
    return train("none", scheme)


@pytest.mark.parametrize("scheme", [*FEW[:-1], *(pytest.param(name, marks=pytest.mark.large) for name in REST)])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_training_is_that_of_one_process(distributed, engine, scheme):
    expected, found = alone(scheme), distributed(engine, scheme)
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, grad in found["gradients"].items():
        torch.testing.assert_close(grad, expected["gradients"][name], rtol=1e-4, atol=1e-6)
    # Sums in another order can move a value over the edge between two codes, later steps more than the first.
    assert found["losses"] == pytest.approx(expected["losses"], rel=2e-3)
    assert found["losses"][0] == pytest.approx(expected["losses"][0], rel=1e-5)
    assert expected["losses"][-1] < expected["losses"][0] - 0.1


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_random_numbers_differ_by_rank_and_do_not_harm(distributed, engine):
    name = "model.layers.1.mlp.up_proj.weight"
    found = distributed(engine, "stochastic")["gradients"][name]
    expected, exact = (alone(scheme)["gradients"][name] for scheme in ("stochastic", "w4a4g4"))
    assert not torch.equal(found, expected)
    assert (found - exact).norm() < 0.5 * exact.norm()
