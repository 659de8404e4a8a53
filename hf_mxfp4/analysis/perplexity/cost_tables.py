# SPDX-License-Identifier: Apache-2.0
"""The tables of costs and of a suggestion, and the suggestion as text for a file."""

from .cost_report import CostReport


COST_COLUMNS = ("part", "KL, nats", "gain, nats", "bits", "gain per bit")
HELD_OUT_COLUMNS = ("scheme", "bits", "perplexity", "KL, nats", "the suggestion's KL to it")


def cost_rows(report: CostReport, count: int) -> list[list[str]]:
    """Cells of the ``count`` dearest parts, under [`COST_COLUMNS`]."""
    rows = []
    for cost in report.costs[:count]:
        gain = [cost.kl.text(4), cost.gain.text(4, "+"), f"{cost.bits:.4f}", f"{cost.gain_per_bit:.2f}"]
        rows.append([cost.part.name, *gain])
    return rows


def held_out_rows(report: CostReport) -> list[list[str]]:
    """Cells of full precision, the schemes and the suggestion, under [`HELD_OUT_COLUMNS`].

    Raises `ValueError` for a report without a suggestion.
    """
    if report.suggestion is None:
        raise ValueError("there is no suggestion: no budget was given")
    rows = []
    for row in report.held_out.rows:
        bits = "-" if row.scheme is None else f"{row.scheme.bits:.4f}"
        kl = "-" if row.scheme is None else row.kl.text(4)
        compared = row.scheme is not None and row.name != report.suggestion.name
        difference = report.kl_difference(row.name).text(4, "+") if compared else "-"
        rows.append([row.name, bits, f"{row.perplexity:.3f}", kl, difference])
    return rows


def snippet(report: CostReport) -> str:
    """The suggestion as YAML: options of [`MXFP4RLConfig`], as `--quantization_config`'s file or `config:FILE` take
    them."""
    import yaml

    heading = f"# {report.suggestion.bits:.4f} bits of an operand on average\n"
    return heading + yaml.safe_dump(report.suggestion.options(), sort_keys=False)
