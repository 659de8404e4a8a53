# SPDX-License-Identifier: Apache-2.0
"""Figures: what is drawn is what was measured."""

import io

import matplotlib
import pytest
import torch

from hf_mxfp4.lab import (
    ErrorStatistics,
    cosine_figure,
    delta_figure,
    error_statistics,
    layer_labels,
    ratio_figure,
)
from hf_mxfp4.numerics import parse_scheme


def statistics(text, seed=0):
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(seed))
    return error_statistics(x, parse_scheme(text))


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_cosines_per_layer():
    layers = {f"{i}.up": statistics("floor", i) for i in range(5)}
    [axes] = cosine_figure(layers).axes
    assert legend(axes) == ["scale bias · deadzone", "scale bias · grid", "deadzone · grid"]
    for line, pair in zip(axes.get_lines(), ("scale_bias/deadzone", "scale_bias/grid", "deadzone/grid"), strict=False):
        assert list(line.get_ydata()) == [s.paper_cosines[pair] for s in layers.values()]
    assert [label.get_text() for label in axes.get_xticklabels()] == list(layers)


def test_names_are_no_formulas():
    """Dollar signs begin formulas in matplotlib, and an unfinished one is an error."""
    name = r"a$\frac$.up"
    figure = cosine_figure({name: statistics("floor", 0), "b": statistics("floor", 1)})
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(drawn := io.BytesIO(), format="svg")
    assert name in drawn.getvalue().decode()


def test_many_layers_have_no_labels():
    one = statistics("rceil")
    [axes] = cosine_figure({str(i): one for i in range(50)}).axes
    assert len(axes.get_xticklabels()) < 50 and axes.get_xlabel() == "layer, in order of the model"


def test_histograms_are_densities():
    shown = {"rceil": statistics("rceil"), "even": statistics("even"), "none": ErrorStatistics()}
    [axes] = delta_figure(shown).axes
    assert len(axes.patches) == 2
    for patch, s in zip(axes.patches, shown.values(), strict=False):
        values, edges, _ = patch.get_data()
        assert (values * (edges[1:] - edges[:-1])).sum() == pytest.approx(1)
        assert (values > 0).tolist() == [count > 0 for count in s.histogram]
    low, high = axes.get_xlim()
    assert low < -0.2 and 1.0 < high < 1.3


def test_ratios_side_by_side():
    groups = {scheme: {i: statistics(scheme, i) for i in range(3)} for scheme in ("rceil", "floor")}
    first, second = ratio_figure(groups, "depth").axes
    assert (first.get_title(), second.get_title(), first.get_xlabel()) == ("rceil", "floor", "depth")
    assert legend(first) == ["scale bias", "deadzone", "grid noise", "whole error"]
    whole = second.get_lines()[3]
    assert list(whole.get_xdata()) == [0, 1, 2]
    assert list(whole.get_ydata()) == [100 * s.relative_mse for s in groups["floor"].values()]
    named = ratio_figure({"rceil": {"mlp.up": statistics("rceil"), "zero": ErrorStatistics()}}, "layer type")
    assert [label.get_text() for label in named.axes[0].get_xticklabels()] == ["mlp.up", "zero"]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: cosine_figure({}),
        lambda: delta_figure({"rceil": ErrorStatistics()}),
        lambda: ratio_figure({}, "depth"),
        lambda: ratio_figure({"rceil": {}}, "depth"),
    ],
)
def test_nothing_to_plot(draw):
    with pytest.raises(ValueError, match="nothing to plot"):
        draw()


def test_labels_drop_what_all_share():
    names = ["model.layers.0.mlp.up.weight", "model.layers.10.mlp.up.weight"]
    assert layer_labels(names) == ["0.mlp.up", "10.mlp.up"]
    assert layer_labels(names[:1]) == ["model.layers.0.mlp.up"]
    assert layer_labels(["a.weight", "a.b.weight"]) == ["a", "a.b"]
