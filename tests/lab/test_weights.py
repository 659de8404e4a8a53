# SPDX-License-Identifier: Apache-2.0
"""Analysis of checkpoints: against whole tensors, of experts, with broken files, and the log that it resumes from; two
checkpoints side by side, and the random data of `simulate`."""

import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from same_bits import edit_config, tensors_in
from tiny_models import make_model
from transformers import AutoModelForCausalLM

from benchmarks.tiny_architectures import architectures, tiny_model
from hf_mxfp4 import MXFP4RLConfig, fake_quantize, lab
from hf_mxfp4.checkpoint import FileNames, read_header
from hf_mxfp4.lab import Selection, analyze_weights, error_statistics, open_source, sample
from hf_mxfp4.lab.errors import weights as module
from hf_mxfp4.lab.errors.weights import analyze_tensor
from hf_mxfp4.model.layer_names import find_layers
from hf_mxfp4.numerics import QuantScheme, parse_scheme


RCEIL = QuantScheme()


def analyzed(folder, schemes=(RCEIL,), exclude=(), **options):
    source = open_source(str(folder))
    return analyze_weights(source, schemes, Selection.of(source, exclude), **options)


def test_every_weight_of_a_sharded_checkpoint(checkpoint):
    folder = checkpoint(shard_size="60KB")
    schemes = [parse_scheme(text) for text in ("rceil", "even+mbs128-blockwise")]
    analysis = analyzed(folder, schemes)
    tensors = tensors_in(folder)
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
        elements = sum(s.elements for s in groups.values())
        assert elements == total.elements == 2 * (64 * 64 * 2 + 2 * 32 * 64 + 3 * 64 * 96)
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


def test_a_model_of_conv1d_is_told_so(tmp_path):
    save_file({"transformer.h.0.attn.c_attn.weight": torch.ones(32, 96)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(ValueError, match="This architecture keeps its projections in .* Conv1D, as GPT-2 does"):
        analyzed(tmp_path)


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
    folder = edit_config(checkpoint(), quantization_config=quantization)
    with pytest.raises(lab.SourceError, match=message):
        analyzed(folder)


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
    assert problem.reason == "is in b.safetensors too; the one in a.safetensors counts"


def quantized_tensors(model) -> set[str]:
    """The names in files of what a loaded model has in MXFP4, from its own report."""
    names = FileNames(make_model_like(model))
    found = set()
    for name in model.quantization_report.quantized:
        stem, _, projection = name.rpartition(".")
        experts, _, number = stem.rpartition(".")
        if not number.isdigit():
            found.add(f"{name}.weight")
            continue
        pieces = names.pieces.get(f"{experts}.{projection}")
        found |= {p.name for p in pieces if p.expert == int(number)} if pieces else {f"{experts}.{projection}"}
    return found


def make_model_like(model):
    with torch.device("meta"):
        return type(model)(model.config)


@pytest.mark.parametrize(
    ("family", "skips"),
    [
        ("qwen3_moe", None),
        ("qwen2_moe", ["experts"]),
        ("mixtral", ["layers.0.mlp.experts"]),
        ("gpt_oss", None),
        ("gpt_oss", ["re:.*1.mlp.experts"]),
    ],
)
def test_what_is_analysed_is_what_is_quantized(family, skips, tmp_path):
    make_model(family).save_pretrained(tmp_path / "base")
    config = MXFP4RLConfig(modules_to_not_convert=skips)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=config)
    model.save_pretrained(tmp_path / "qat")
    source = open_source(str(tmp_path / "qat"))
    analysis = analyze_weights(source, [RCEIL], Selection.of(source))
    assert {result.name for result in analysis.results} == quantized_tensors(model) and not analysis.problems


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_errors_are_those_of_each_expert_by_itself(family, tmp_path):
    model = make_model(family, layers=1)
    model.save_pretrained(tmp_path / "base")
    source = open_source(str(tmp_path / "base"))
    analysis = analyze_weights(source, [RCEIL], Selection.of(source))
    down = [result for result in analysis.results if "down" in result.name]
    total = sum(result.statistics[str(RCEIL)].total for result in down)
    weight = model.model.layers[0].mlp.experts.down_proj.detach()
    weight = weight.transpose(1, 2) if family == "gpt_oss" else weight
    expected = sum((fake_quantize(matrix.contiguous()) - matrix).double().square().sum().item() for matrix in weight)
    assert total == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("family", ["granitemoe", "llama4_text", "mamba2", "smolvlm", "t5", "gpt_oss"])
def test_architectures_are_measured_as_they_are_quantized(family, tmp_path):
    """Names do not tell: of other towers, joined experts, and layers whose weight the model reads itself."""
    torch.manual_seed(0)
    model = tiny_model(family, architectures()[family][1])
    model.save_pretrained(tmp_path)
    layers = find_layers(model)[0].values()
    weights = [x for layer in layers for name, x in layer.named_parameters() if x.dim() > 1 and "bias" not in name]
    source = open_source(str(tmp_path))
    results = analyze_weights(source, [RCEIL], Selection.of(source)).results
    assert sum(math.prod(result.shape) for result in results) == sum(x.numel() for x in weights)


@pytest.fixture
def tensors(tmp_path):
    torch.manual_seed(0)
    save_file({name: torch.randn(4, 64) for name in "abc"}, tmp_path / "m.safetensors")
    return read_header(tmp_path / "m.safetensors").tensors


def result(tensor):
    return analyze_tensor(tensor, -1, [QuantScheme()])


def opened(path, *, model="m", schemes=("mxfp4+rceil",), version="1", **options):
    return lab.TensorLog(path, model, schemes, version, **options)


@pytest.fixture
def path(tensors, tmp_path):
    path = tmp_path / "out" / "progress.jsonl"
    with opened(path) as log:
        for tensor in tensors[:2]:
            log.keep(result(tensor), tensor.file)
    return path


def test_every_torn_last_line_is_dropped(path, tensors):
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in [last, *range(last + 1, len(whole), 211), len(whole) - 1]:
        path.write_bytes(whole[:end])
        with opened(path) as log:
            assert len(log) == 1 and log.find(tensors[1]) is None
            log.keep(result(tensors[1]), tensors[1].file)
        assert path.read_bytes() == whole


def test_damage_in_the_middle_is_reported(path):
    lines = path.read_bytes().split(b"\n")
    lines[1] = lines[1][:-3]
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(lab.ProgressMismatch, match="line 2 of .* is damaged; start over with --overwrite"):
        opened(path)


@pytest.mark.parametrize("line", [b"[]", b"3", b"null", b"{}", b'{"tensor": []}'])
@pytest.mark.parametrize("number", [1, 2])
def test_lines_that_are_no_results_are_damage(path, number, line):
    lines = path.read_bytes().split(b"\n")
    lines[number - 1] = line
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(lab.ProgressMismatch, match="start over with --overwrite"):
        opened(path)


@pytest.mark.skipif(os.name == "nt", reason="no locks")
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_log_that_is_being_written_is_refused_and_stays(path, tensors, overwrite):
    with opened(path) as log:
        with pytest.raises(lab.ProgressMismatch, match="another process is writing .*; wait for it"):
            opened(path, overwrite=overwrite)
        log.keep(result(tensors[2]), tensors[2].file)
    with opened(path) as log:
        assert len(log) == 3


def test_a_link_as_log_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "log").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError):
        opened(tmp_path / "log", overwrite=True)
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_log_with_another_name_elsewhere_is_continued_in_a_file_of_its_own(path, tensors):
    with opened(path) as log:
        log.keep(result(tensors[0]), tensors[0].file)
    content = path.read_bytes()
    path.with_name("other").hardlink_to(path)
    with opened(path) as log:
        n_before = len(log)
        log.keep(result(tensors[2]), tensors[2].file)
    assert path.with_name("other").read_bytes() == content
    with opened(path) as log:
        assert len(log) == n_before + 1


def compared(a, b, scheme=RCEIL):
    return lab.compare_checkpoints(open_source(str(a)), open_source(str(b)), scheme)


def folder_of(path, tensors):
    path.mkdir()
    save_file({name: x.clone() for name, x in tensors.items()}, path / "model.safetensors")
    return path


def test_two_checkpoints(checkpoint):
    a, b = checkpoint(seed=0), checkpoint(seed=1, shard_size="60KB")
    result = compared(a, b)
    assert len(result.sums) == 14 and not result.problems and not result.only_first and not result.only_second
    mine, theirs = tensors_in(a), tensors_in(b)
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
    with pytest.raises(lab.SourceError, match=message):
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
