# SPDX-License-Identifier: Apache-2.0
"""Analysis of checkpoints: against whole tensors, and with files that are broken in every way."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import hf_mxfp4
from hf_mxfp4.lab import Selection, SourceError, TensorLog, analyze_weights, error_statistics, open_source
from hf_mxfp4.lab import weights as module
from hf_mxfp4.numerics import QuantScheme, parse_scheme


RCEIL = QuantScheme()


def analyzed(folder, schemes=(RCEIL,), include=(), exclude=(), **options):
    source = open_source(str(folder))
    return analyze_weights(source, schemes, Selection.of(source, include, exclude), **options)


def tensors_of(folder):
    return {name: x for file in Path(folder).glob("*.safetensors") for name, x in load_file(file).items()}


def test_every_weight_of_a_sharded_checkpoint(checkpoint):
    folder = checkpoint(shard_size="60KB")
    schemes = [parse_scheme(text) for text in ("rceil", "even+mbs128-blockwise")]
    analysis = analyzed(folder, schemes)
    tensors = tensors_of(folder)
    assert len(analysis.results) == 14 and analysis.problems == []
    for result in analysis.results:
        x = tensors.pop(result.name)
        assert (result.shape, result.dtype) == (tuple(x.shape), "float32")
        assert result.statistics == {str(scheme): error_statistics(x, scheme) for scheme in schemes}
    skipped = {name for names in analysis.skipped.values() for name in names}
    assert skipped == set(tensors)
    assert {reason: len(names) for reason, names in analysis.skipped.items()} == {
        "head, router or other tower": 1,
        "embedding": 1,
        "norm, bias or other vector": 11,
    }


def test_groups_and_totals(checkpoint):
    analysis = analyzed(checkpoint())
    total = analysis.totals()["mxfp4+rceil"]
    types, depths = analysis.by_layer_type("mxfp4+rceil"), analysis.by_depth("mxfp4+rceil")
    assert list(depths) == [0, 1] and len(types) == 7 and "mlp.down_proj" in types
    for groups in (types, depths):
        assert (
            sum(s.elements for s in groups.values()) == total.elements == 2 * (64 * 64 * 2 + 2 * 32 * 64 + 3 * 64 * 96)
        )
        assert sum(s.total for s in groups.values()) == pytest.approx(total.total, rel=1e-12)
    worst = analysis.worst("mxfp4+rceil", 3)
    errors = [r.statistics["mxfp4+rceil"].relative_mse for r in analysis.results]
    assert [s.relative_mse for s in worst.values()] == sorted(errors, reverse=True)[:3]


def test_slices_give_the_whole(checkpoint, monkeypatch):
    folder = checkpoint()
    whole = analyzed(folder, [QuantScheme(block_rows=32)])
    monkeypatch.setattr(module, "SLICE_ELEMENTS", 64 * 32)
    sliced = analyzed(folder, [QuantScheme(block_rows=32)])
    for a, b in zip(whole.results, sliced.results, strict=True):
        x, y = a.statistics["mxfp4+rceil+32x32"], b.statistics["mxfp4+rceil+32x32"]
        assert x.histogram == y.histogram and x.total == pytest.approx(y.total, rel=1e-12)


def test_fused_experts(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(3, 64, 96)
    for model_type, axis in (("qwen3_moe", -1), ("gpt_oss", 1)):
        folder = tmp_path / model_type
        folder.mkdir()
        save_file({"model.layers.0.mlp.experts.down_proj": x}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        [result] = analyzed(folder).results
        expected = error_statistics(x, RCEIL, axis=axis)
        found = result.statistics["mxfp4+rceil"]
        assert found.histogram == expected.histogram and found.total == pytest.approx(expected.total, rel=1e-12)
    assert error_statistics(x, RCEIL, axis=1).total != error_statistics(x, RCEIL).total


def test_include_and_exclude(checkpoint):
    folder = checkpoint()
    names = [r.name for r in analyzed(folder, include=["layers.1"], exclude=["mlp"]).results]
    assert names == [f"model.layers.1.self_attn.{p}_proj.weight" for p in "koqv"]
    assert len(analyzed(folder, include=["re:.*up_proj"]).results) == 2


@pytest.mark.parametrize("options", [{"include": ["layer.1"]}, {"exclude": ["layers.1", "mlpp"]}])
def test_a_pattern_that_matches_nothing_is_an_error(checkpoint, options):
    with pytest.raises(SourceError, match="matches the pattern '(layer.1|mlpp)'"):
        analyzed(checkpoint(shard_size="60KB"), **options)


def test_nothing_selected_is_an_error(checkpoint):
    with pytest.raises(SourceError, match="no weight of .* would be quantized; skipped: .*1 embedding"):
        analyzed(checkpoint(), include=["embed_tokens", "norm"])


def test_a_model_of_conv1d_is_told_so(tmp_path):
    save_file({"transformer.h.0.attn.c_attn.weight": torch.ones(32, 96)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(SourceError, match="skipped: 1 not the weight of a linear layer. This .* Conv1D, as GPT-2 does"):
        analyzed(tmp_path)


def test_own_scheme_and_skips(checkpoint, tmp_path):
    config = hf_mxfp4.MXFP4RLConfig(scale_rule="even", modules_to_not_convert=["layers.0"])
    folder = Path(checkpoint())
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "quantization_config": config.to_dict()}))
    assert open_source(str(folder)).scheme == config
    analysis = analyzed(folder, [config.weight_scheme])
    assert len(analysis.results) == 7 and len(analysis.skipped["modules_to_not_convert"]) == 7


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "fp8"}, "stores quantized weights already \\(quant_method 'fp8'"),
        ({"quant_method": "mxfp4_rl", "mode": "packed"}, "quant_method 'mxfp4_rl', mode='packed'"),
        ({"bits": 4}, "quant_method None"),
        ({"quant_method": "mxfp4_rl", "preset": "w9"}, "quantization_config of .* cannot be read: preset='w9'"),
    ],
)
def test_quantized_checkpoints_are_refused(checkpoint, quantization, message):
    folder = Path(checkpoint())
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "quantization_config": quantization}))
    with pytest.raises(SourceError, match=message):
        analyzed(folder)


def test_quantized_tensors_are_refused(tmp_path):
    save_file({"layers.0.up_proj.weight": torch.zeros(8, 16, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    with pytest.raises(SourceError, match=re.escape("such as layers.0.up_proj.weight (uint8)")):
        analyzed(tmp_path)


def test_a_truncated_shard(checkpoint):
    folder = Path(checkpoint(shard_size="60KB"))
    healthy = analyzed(folder)
    source = open_source(str(folder))
    broken = max(source.expected, key=lambda shard: len(source.expected[shard]))
    file = folder / broken
    file.write_bytes(file.read_bytes()[:-100])
    analysis = analyzed(folder)
    [problem] = analysis.problems
    assert problem.where == broken
    assert problem.reason.startswith(f"{broken} is damaged, truncated or not a safetensors file")
    assert problem.reason.endswith(f"({len(source.expected[broken])} tensors)")
    left = [r for r in healthy.results if r.name not in source.expected[broken]]
    assert analysis.results == left and left


def test_a_missing_shard_and_a_damaged_header(checkpoint):
    folder = Path(checkpoint(shard_size="60KB"))
    shards = list(open_source(str(folder)).expected)
    (folder / shards[0]).unlink()
    contents = bytearray((folder / shards[2]).read_bytes())
    contents[8] ^= 1
    (folder / shards[2]).write_bytes(contents)
    analysis = analyzed(folder)
    assert [problem.where for problem in analysis.problems] == [shards[0], shards[2]]
    assert "is missing" in analysis.problems[0].reason and "is damaged" in analysis.problems[1].reason
    assert analysis.results


def test_a_tensor_that_the_index_promises(checkpoint):
    folder = Path(checkpoint(shard_size="60KB"))
    shard = list(open_source(str(folder)).expected)[-1]
    tensors = load_file(folder / shard)
    lost = sorted(tensors)[0]
    save_file({name: x for name, x in tensors.items() if name != lost}, folder / shard)
    [problem] = analyzed(folder).problems
    assert problem.where == lost and shard in problem.reason


def test_nan_and_infinity_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SLICE_ELEMENTS", 64)
    x = torch.ones(8, 64)
    x[1, 2], x[6, :3] = float("nan"), float("inf")
    tensors = {"layers.0.a.weight": x, "layers.0.b.weight": torch.ones(8, 64)}
    save_file(tensors, tmp_path / "model.safetensors")
    analysis = analyzed(tmp_path)
    assert [r.name for r in analysis.results] == ["layers.0.b.weight"]
    [problem] = analysis.problems
    assert (problem.where, problem.reason) == ("layers.0.a.weight", "4 of 512 elements are NaN or infinite")


def test_a_tensor_in_two_files(tmp_path):
    for file in "ab":
        save_file({"layers.0.w.weight": torch.ones(8, 64)}, tmp_path / f"{file}.safetensors")
    analysis = analyzed(tmp_path)
    assert len(analysis.results) == 1
    [problem] = analysis.problems
    assert (problem.where, problem.reason) == (
        "layers.0.w.weight",
        "is in b.safetensors too; the one in a.safetensors counts",
    )


def test_zero_and_empty_tensors(tmp_path):
    tensors = {"layers.0.a.weight": torch.zeros(8, 64), "layers.0.b.weight": torch.zeros(0, 64)}
    save_file(tensors, tmp_path / "model.safetensors")
    analysis = analyzed(tmp_path)
    assert len(analysis.results) == 2 and analysis.worst("mxfp4+rceil") == {}


def test_finished_tensors_are_not_read_again(checkpoint, tmp_path):
    folder = checkpoint(shard_size="60KB")
    seen = []
    with TensorLog(tmp_path / "p.jsonl", "m", ["mxfp4+rceil"], "1") as log:
        first = analyzed(folder, log=log)
    with TensorLog(tmp_path / "p.jsonl", "m", ["mxfp4+rceil"], "1") as log:
        again = analyzed(folder, log=log, on_bytes=lambda count, name: seen.append(name))
    assert seen == [] and again == first
