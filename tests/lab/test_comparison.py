# SPDX-License-Identifier: Apache-2.0
"""Two checkpoints next to each other. Packed ones are in `tests/cli/test_cli_analyze.py`."""

import math

import pytest
import torch
from safetensors.torch import save_file
from same_bits import tensors_in

from hf_mxfp4 import lab
from hf_mxfp4.lab import error_statistics, open_source
from hf_mxfp4.numerics import QuantScheme


RCEIL = QuantScheme()


def compared(a, b, scheme=RCEIL):
    return lab.compare_checkpoints(open_source(str(a)), open_source(str(b)), scheme)


def folder_of(path, tensors):
    path.mkdir()
    save_file({name: x.clone() for name, x in tensors.items()}, path / "model.safetensors")
    return path


def test_two_checkpoints(checkpoint):
    a = checkpoint(seed=0)
    b = checkpoint(seed=1, shard_size="60KB")
    result = compared(a, b)
    assert len(result.sums) == 14
    mine = tensors_in(a)
    theirs = tensors_in(b)
    for name, sums in result.sums.items():
        x = mine[name]
        y = theirs[name]
        first = error_statistics(x, RCEIL)
        second = error_statistics(y, RCEIL)
        assert result.derive(sums) == pytest.approx(
            {
                "first_relative_mse": first.relative_mse,
                "second_relative_mse": second.relative_mse,
                "mse_ratio": second.relative_mse / first.relative_mse,
                "sqnr_gain_db": second.sqnr_db - first.sqnr_db,
                "relative_difference": float((x - y).norm() / x.norm()),
            },
            rel=1e-5,
        )


def test_the_worst_tensors_of_a_comparison(checkpoint):
    result = compared(checkpoint(seed=0), checkpoint(seed=1))
    ratios = {name: result.derive(sums)["mse_ratio"] for name, sums in result.sums.items()}
    assert result.worst(5) == sorted(ratios, key=ratios.get, reverse=True)[:5]


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
    with pytest.raises(lab.SourceError, match=message):
        compared(a, b)


def test_names_shapes_and_nan(tmp_path):
    one = torch.ones(4, 32)
    nan = torch.full((4, 32), math.nan)
    a = folder_of(tmp_path / "a", {f"layers.{i}.w.weight": x for i, x in enumerate((one, one, one[:2], nan))})
    b = folder_of(tmp_path / "b", {f"layers.{i}.w.weight": one for i in (0, 2, 3, 7)})
    result = compared(a, b)
    assert list(result.sums) == ["layers.0.w.weight"]
    assert result.only_first == ["layers.1.w.weight"]
    assert result.only_second == ["layers.7.w.weight"]
    assert [(problem.where, problem.reason) for problem in result.problems] == [
        ("layers.2.w.weight", "shapes differ: [2, 32] and [4, 32]"),
        ("layers.3.w.weight", "128 elements of a slice are NaN or infinite"),
    ]


def test_zeros_have_no_ratio(tmp_path):
    a = folder_of(tmp_path / "a", {"layers.0.w.weight": torch.zeros(4, 32)})
    b = folder_of(tmp_path / "b", {"layers.0.w.weight": torch.ones(4, 32)})
    result = compared(a, b)
    numbers = result.derive(result.sums["layers.0.w.weight"])
    assert all(math.isnan(numbers[name]) for name in ("relative_difference", "mse_ratio", "sqnr_gain_db"))
    assert result.worst() == []
