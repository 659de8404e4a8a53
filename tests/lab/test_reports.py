# SPDX-License-Identifier: Apache-2.0
"""The report files: complete, valid, self-contained, and the same bytes for the same analysis."""

import csv
import html.parser
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import hf_mxfp4
from hf_mxfp4.lab import (
    Analysis,
    ErrorStatistics,
    Problem,
    Selection,
    analyze_weights,
    error_statistics,
    open_source,
    write_analysis,
)
from hf_mxfp4.lab.layers import natural_key
from hf_mxfp4.lab.schemes import bits_per_element
from hf_mxfp4.lab.weights import least_error
from hf_mxfp4.numerics import parse_scheme


SCHEMES = [parse_scheme(text) for text in ("rceil", "floor", "rceil+mbs128-static+of0.5")]
SOURCE = {"kind": "folder", "architecture": "Qwen2ForCausalLM", "files": 1}


@pytest.fixture(scope="module")
def analysis(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    tensors = {
        f"model.layers.{i}.mlp.{kind}.weight": torch.randn(64, 128) for i in range(12) for kind in ("up", "down")
    }
    tensors["model.layers.3.mlp.zero.weight"] = torch.zeros(64, 128)
    tensors["model.embed_tokens.weight"] = torch.zeros(4, 4)
    save_file(tensors, folder / "model.safetensors")
    analysis = analyze_weights(open_source(str(folder)), SCHEMES, Selection())
    analysis.model = "my <model>"
    analysis.problems.append(Problem("model-00002.safetensors", "it is <broken>"))
    return analysis


@pytest.fixture(scope="module")
def written(analysis, tmp_path_factory):
    """The folder of the files, and their paths."""
    folder = tmp_path_factory.mktemp("report")
    return folder, write_analysis(analysis, SOURCE, folder)


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
    assert weight["tensors"] == 25 and list(weight["by_depth"]["mxfp4+floor"]) == [str(i) for i in range(12)]
    assert len(weight["worst"]["mxfp4+rceil"]) == 20
    assert weight["worst"]["mxfp4+rceil"][0]["relative_mse"] >= weight["worst"]["mxfp4+rceil"][19]["relative_mse"]
    assert sum(weight["total"]["mxfp4+rceil"]["delta_histogram"]) == 24 * 64 * 4
    assert report["skipped"] == {"embedding": {"count": 1, "names": ["model.embed_tokens.weight"]}}
    assert report["problems"] == [{"where": "model-00002.safetensors", "reason": "it is <broken>"}]


def test_csv_has_a_row_per_tensor_and_scheme(analysis, written):
    rows = list(csv.DictReader((written[0] / "tensors.csv").open()))
    assert len(rows) == 25 * 3
    row = rows[0]
    assert (row["name"], row["shape"], row["scheme"]) == ("model.layers.0.mlp.down.weight", "64x128", "mxfp4+rceil")
    result = analysis.in_order[0]
    assert float(row["relative_mse"]) == result.statistics["mxfp4+rceil"].relative_mse
    assert next(row for row in rows if "zero" in row["name"])["sqnr_db"] == ""


def test_the_same_analysis_gives_the_same_bytes(analysis, written, tmp_path):
    folder, first = written
    second = write_analysis(analysis, SOURCE, tmp_path)
    assert [path.name for path in first] == ["report.json", "tensors.csv", "report.html"]
    for a, b in zip(first, second, strict=True):
        assert a.read_bytes() == b.read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in first)


class References(html.parser.HTMLParser):
    """Everything in a page that could load something, and its tags."""

    def __init__(self):
        super().__init__()
        self.references, self.tags, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(tag)
        self.references += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_html_is_one_file_for_any_screen(written):
    page = Path(written[1][2]).read_text()
    parsed = References()
    parsed.feed(page)
    assert parsed.open == []
    assert parsed.tags.count("img") == 4
    assert all(reference.startswith("data:image/png;base64,") for reference in parsed.references)
    assert not {"script", "link", "iframe"} & set(parsed.tags)
    assert "http" not in page and "url(" not in page and "@import" not in page
    assert '<meta name="viewport" content="width=device-width,initial-scale=1">' in page
    assert "my &lt;model&gt;" in page and "<model>" not in page
    assert "it is &lt;broken&gt;" in page
    assert "Verdict, least error: at 4.25 bits an element mxfp4+" in page


def test_a_report_of_problems_alone(tmp_path):
    analysis = Analysis("m", ("mxfp4+rceil",), problems=[Problem("s", "gone")])
    paths = write_analysis(analysis, {}, tmp_path)
    assert json.loads(paths[0].read_text())["kinds"] == {}
    assert "gone" in paths[2].read_text()
    assert len(paths[1].read_text().splitlines()) == 1


def statistics(text):
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    return error_statistics(x, parse_scheme(text))


def test_the_ranking_names_the_best_at_each_number_of_bits():
    texts = ("rceil", "even", "rceil+mbs128-static", "rceil+of0.5@0.1")
    found = {text: statistics(text) for text in texts}
    rceil, even, macro, selective = (f"{found[text].sqnr_db:.2f}" for text in texts)
    assert least_error(found) == (
        f"Verdict, least error: at 4.25 bits an element even (SQNR {even} dB, next is rceil with {rceil}); at 4.31 "
        f"bits an element rceil+mbs128-static (SQNR {macro} dB); at 4.68 bits an element rceil+of0.5@0.1 (SQNR "
        f"{selective} dB)."
    )
    assert found["even"].sqnr_db > found["rceil"].sqnr_db
    assert least_error({"rceil": ErrorStatistics()}) == ""


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("rceil", 4.25),
        ("even+mbs128-blockwise", 4.3125),
        ("rceil+mbs32-static", 4.5),
        ("rceil+mbsrow-static", 4.25),
        ("rceil+mbs128-static+of0.5", 8.5625),
        ("even+mbs128-blockwise+of1@0.1", 4.7375),
    ],
)
def test_bits_of_an_element(text, bits):
    assert bits_per_element(parse_scheme(text)) == pytest.approx(bits)
