# SPDX-License-Identifier: Apache-2.0
"""Two checkpoints side by side, and the random data of `simulate`."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_mxfp4.lab import SourceError, compare_checkpoints, error_statistics, open_source, sample
from hf_mxfp4.numerics import QuantScheme


RCEIL = QuantScheme()


def compared(a, b, scheme=RCEIL):
    return compare_checkpoints(open_source(str(a)), open_source(str(b)), scheme)


def folder_of(path, tensors):
    path.mkdir()
    save_file({name: x.clone() for name, x in tensors.items()}, path / "model.safetensors")
    return path


def test_two_checkpoints(checkpoint):
    a, b = checkpoint(seed=0), checkpoint(seed=1, shard_size="60KB")
    result = compared(a, b)
    assert len(result.sums) == 14 and not result.problems and not result.only_first and not result.only_second
    mine = load_file(Path(a, "model.safetensors"))
    theirs = {name: x for file in Path(b).glob("*.safetensors") for name, x in load_file(file).items()}
    for name, sums in result.sums.items():
        x, y = mine[name], theirs[name]
        pair, first, second = result.derive(sums), error_statistics(x, RCEIL), error_statistics(y, RCEIL)
        assert pair["first_relative_mse"] == first.relative_mse and pair["second_relative_mse"] == second.relative_mse
        assert pair["mse_ratio"] == pytest.approx(second.relative_mse / first.relative_mse, rel=1e-12)
        assert pair["sqnr_gain_db"] == pytest.approx(second.sqnr_db - first.sqnr_db, rel=1e-9, abs=1e-12)
        assert pair["relative_difference"] == pytest.approx(float((x - y).norm() / x.norm()), rel=1e-5)
    assert set(result.by_layer_type()) == {name.split(".", 3)[3].removesuffix(".weight") for name in result.sums}
    ratios = {name: result.derive(sums)["mse_ratio"] for name, sums in result.sums.items()}
    assert [ratios[name] for name in result.worst(5)] == sorted(ratios.values(), reverse=True)[:5]


@pytest.mark.parametrize(
    ("name", "stored", "message"),
    [
        ("v", torch.ones(4, 32), "a and b have no tensor to quantize in common"),
        ("w", torch.ones(4, 16).byte(), r"b stores quantized weights already, such as layers.0.w.weight \(uint8\)"),
    ],
)
def test_what_cannot_be_compared(tmp_path, name, stored, message):
    a = folder_of(tmp_path / "a", {"layers.0.w.weight": torch.ones(4, 32)})
    b = folder_of(tmp_path / "b", {f"layers.0.{name}.weight": stored})
    with pytest.raises(SourceError, match=message):
        compared(a, b)


def test_names_shapes_and_nan(tmp_path):
    one, nan = torch.ones(4, 32), torch.full((4, 32), math.nan)
    a = folder_of(tmp_path / "a", {f"layers.{i}.w.weight": x for i, x in enumerate((one, one, one[:2], nan, 0 * one))})
    b = folder_of(tmp_path / "b", {f"layers.{i}.w.weight": one for i in (0, 2, 3, 4, 7)})
    result = compared(a, b)
    assert list(result.sums) == ["layers.0.w.weight", "layers.4.w.weight"]
    assert result.only_first == ["layers.1.w.weight"] and result.only_second == ["layers.7.w.weight"]
    assert [(p.where, p.reason) for p in result.problems] == [
        ("layers.2.w.weight", "shapes differ: [2, 32] and [4, 32]"),
        ("layers.3.w.weight", "128 elements of a slice are NaN or infinite"),
    ]
    zero = result.derive(result.sums["layers.4.w.weight"])
    assert all(math.isnan(zero[name]) for name in ("relative_difference", "mse_ratio", "sqnr_gain_db"))
    assert result.worst() == []  # ones have no error, hence no ratio


@pytest.mark.parametrize("distribution", ["gaussian", "laplace", "student-t", "uniform", "outliers"])
def test_samples(distribution):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    x = sample(distribution, 2**16 - 5, seed=3)
    assert torch.equal(torch.rand(3), expected)  # the global generator is left alone
    assert x.shape == (64, 1024) and x.dtype == torch.float32 and x.isfinite().all()
    assert torch.equal(x, sample(distribution, 2**16, seed=3)) and not torch.equal(x, sample(distribution, 2**16, 4))
    assert int((x.square().mean(dim=0).sqrt() > 10).sum()) == (8 if distribution == "outliers" else 0)
    if distribution == "uniform":  # standard deviations of rows spread over one octave
        assert 0.97 < x.abs().amax(dim=-1).min() < 1.1 and 1.9 < x.abs().amax(dim=-1).max() <= 2.0
