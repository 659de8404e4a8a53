# SPDX-License-Identifier: Apache-2.0
"""Figures 1 to 3 of arXiv 2605.20402 from the trained layers of the demo's model, as SVG into `docs/plots`.

    python -m benchmarks.demo_figures

`hf-mxfp4 analyze MODEL` draws the same figures from any model. Half a minute.
"""

import matplotlib

from hf_mxfp4.lab import (
    PAPER_SCHEMES,
    ErrorStatistics,
    PrecisionSweep,
    cosine_figure,
    delta_figure,
    error_statistics,
    layer_labels,
    precision_figure,
    precision_sweep,
)
from hf_mxfp4.module_names import split_linears
from hf_mxfp4.numerics import QuantScheme, parse_scheme

from .records import PLOTS
from .scheme_error import trained_model


def main() -> None:
    model, _, _ = trained_model()
    linears, _ = split_linears(model)
    weights = {name: linear.weight.detach() for name, linear in linears.items()}
    labels = layer_labels(list(weights))
    by_layer = {
        label: error_statistics(weight, QuantScheme()) for label, weight in zip(labels, weights.values(), strict=True)
    }
    by_scheme = {
        text: sum((error_statistics(w, parse_scheme(text)) for w in weights.values()), ErrorStatistics())
        for text in (*PAPER_SCHEMES, "even+mbs128-blockwise")
    }
    sweep = sum((precision_sweep(weight) for weight in weights.values()), PrecisionSweep())
    PLOTS.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "hf-mxfp4"}):
        for name, figure in (
            ("cosines", cosine_figure(by_layer, "Error components of the demo's model, rceil")),
            ("precision", precision_figure(sweep)),
            ("delta", delta_figure(by_scheme)),
        ):
            figure.savefig(PLOTS / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
