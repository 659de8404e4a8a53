# SPDX-License-Identifier: Apache-2.0
"""Reports and figures of an analysis: complete, valid, self-contained, and what is drawn is what was measured."""

import json
from pathlib import Path

import pytest
import torch
from page_reader import PageReader
from safetensors.torch import save_file

import hf_mxfp4
from hf_mxfp4 import lab
from hf_mxfp4.checkpoint import Problem
from hf_mxfp4.lab import ErrorStatistics
from hf_mxfp4.lab.errors.layers import natural_key
from hf_mxfp4.lab.errors.weights import least_error
from hf_mxfp4.numerics import parse_scheme


SCHEMES = [parse_scheme(text) for text in ("rceil", "floor", "rceil+mbs128-static+of0.5")]
SOURCE = {"kind": "folder", "architecture": "Qwen2ForCausalLM", "files": 1}


@pytest.fixture(scope="module")
def analysis(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    names = [f"model.layers.{i}.mlp.{kind}.weight" for i in range(12) for kind in ("up", "down")]
    tensors = {name: torch.randn(64, 128) for name in names}
    tensors["model.layers.3.mlp.zero.weight"] = torch.zeros(64, 128)
    tensors["model.embed_tokens.weight"] = torch.zeros(4, 4)
    save_file(tensors, folder / "model.safetensors")
    analysis = lab.analyze_weights(lab.open_source(str(folder)), SCHEMES, lab.Selection())
    analysis.model = "my <model>"
    analysis.problems.append(Problem("model-00002.safetensors", "it is <broken>"))
    return analysis


@pytest.fixture(scope="module")
def written(analysis, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    return folder, lab.write_analysis(analysis, SOURCE, folder)


def test_json_is_valid_and_complete(analysis, written):
    report = json.loads((written[0] / "report.json").read_text())
    assert (report["format"], report["hf_mxfp4"], report["model"]) == (1, hf_mxfp4.__version__, "my <model>")
    assert report["schemes"] == [str(scheme) for scheme in SCHEMES]
    assert len(report["tensors"]) == 25
    names = [tensor["name"] for tensor in report["tensors"]]
    assert names == sorted(names, key=natural_key)
    first = report["tensors"][0]
    assert (first["layer_type"], first["depth"], first["shape"]) == ("mlp.down", 0, [64, 128])
    zero = next(tensor for tensor in report["tensors"] if "zero" in tensor["name"])
    assert zero["schemes"]["mxfp4+rceil"]["relative_mse"] is None
    weight = report["kinds"]["weight"]
    assert weight["tensors"] == 25
    assert list(weight["by_depth"]["mxfp4+floor"]) == [str(i) for i in range(12)]
    assert len(weight["worst"]["mxfp4+rceil"]) == 20
    assert weight["worst"]["mxfp4+rceil"][0]["relative_mse"] >= weight["worst"]["mxfp4+rceil"][19]["relative_mse"]
    assert sum(weight["total"]["mxfp4+rceil"]["delta_histogram"]) == 24 * 64 * 4
    assert report["skipped"] == {"embedding": {"count": 1, "names": ["model.embed_tokens.weight"]}}
    assert report["problems"] == [{"where": "model-00002.safetensors", "reason": "it is <broken>"}]


def test_html_is_one_file_for_any_screen(written):
    page = Path(written[1][2]).read_text()
    parsed = PageReader(page)
    assert parsed.tags.count("img") == 4
    assert all(reference.startswith("data:image/png;base64,") for reference in parsed.references)
    assert not {"script", "link", "iframe"} & set(parsed.tags)
    assert "http" not in page
    assert "url(" not in page
    assert "@import" not in page
    assert '<meta name="viewport" content="width=device-width,initial-scale=1">' in page
    assert "my &lt;model&gt;" in page
    assert "<model>" not in page
    assert "it is &lt;broken&gt;" in page
    assert "Verdict, least error: at 4.25 bits an element mxfp4+" in page


def statistics(text, seed=0):
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(seed))
    return lab.error_statistics(x, parse_scheme(text))


def test_the_ranking_names_the_best_at_each_number_of_bits():
    texts = ("rceil", "even", "rceil+mbs128-static", "rceil+of0.5")
    found = {text: statistics(text) for text in texts}
    rceil, even, macro, fallback = (f"{found[text].sqnr_db:.2f}" for text in texts)
    assert least_error(found) == (
        f"Verdict, least error: at 4.25 bits an element even (SQNR {even} dB, next is rceil with {rceil}); at 4.31 "
        f"bits an element rceil+mbs128-static (SQNR {macro} dB); at 8.50 bits an element rceil+of0.5 (SQNR "
        f"{fallback} dB)."
    )
    assert found["even"].sqnr_db > found["rceil"].sqnr_db
    assert least_error({"rceil": ErrorStatistics()}) == ""


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_histograms_are_densities():
    shown = {"rceil": statistics("rceil"), "even": statistics("even"), "none": ErrorStatistics()}
    [axes] = lab.delta_figure(shown).axes
    assert len(axes.patches) == 2
    for patch, s in zip(axes.patches, shown.values(), strict=False):
        values, edges, _ = patch.get_data()
        assert (values * (edges[1:] - edges[:-1])).sum() == pytest.approx(1)
        assert (values > 0).tolist() == [count > 0 for count in s.histogram]
    low, high = axes.get_xlim()
    assert low < -0.2
    assert 1.0 < high < 1.3


def test_ratios_side_by_side():
    groups = {scheme: {i: statistics(scheme, i) for i in range(3)} for scheme in ("rceil", "floor")}
    first, second = lab.ratio_figure(groups, "depth").axes
    assert (first.get_title(), second.get_title(), first.get_xlabel()) == ("rceil", "floor", "depth")
    assert legend(first) == ["scale bias", "deadzone", "grid noise", "whole error"]
    whole = second.get_lines()[3]
    assert list(whole.get_xdata()) == [0, 1, 2]
    assert list(whole.get_ydata()) == [100 * s.relative_mse for s in groups["floor"].values()]
    named = lab.ratio_figure({"rceil": {"mlp.up": statistics("rceil"), "zero": ErrorStatistics()}}, "layer type")
    assert [label.get_text() for label in named.axes[0].get_xticklabels()] == ["mlp.up", "zero"]
