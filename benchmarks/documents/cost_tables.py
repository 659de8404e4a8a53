# SPDX-License-Identifier: Apache-2.0
"""Tables of what layers cost, and of a suggestion for a budget of bits."""

from ..records import records, table


def layer_costs() -> str:
    rows = []
    for r in records("layer_costs"):
        if r["on"] == "parts" and r["operands"] == "weights":
            gain = f"{r['gain']:.4f} ± {r['standard_error']:.4f}"
            chosen = "yes" if r["chosen"] else ""
            rows.append([f"`{r['name']}`", gain, f"{r['bits']:.4f}", f"{r['gain'] / r['bits']:.2f}", chosen])
    return table(["layer", "KL falls by, nats", "bits", "per bit", "chosen"], rows)


def layer_cost_weights() -> str:
    return _schemes("weights")


def layer_cost_activations() -> str:
    return _schemes("weights and activations")


def _schemes(operands: str) -> str:
    rows = []
    for r in records("layer_costs"):
        if r["on"] != "held out" or r["operands"] != operands:
            continue
        measured, compared = r["kl"] is not None, r["suggestion_to_it"] is not None
        row = [r["name"], f"{r['bits']:.4f}" if measured else "16", f"{r['value']:.3f}"]
        row.append(f"{r['kl']:.4f} ± {r['kl_standard_error']:.4f}" if measured else "")
        error = r["suggestion_to_it_standard_error"]
        row.append(f"{r['suggestion_to_it']:+.4f} ± {error:.4f}" if compared else "")
        rows.append(row)
    return table(["scheme", "bits", "perplexity", "KL, nats", "the suggestion's KL to it"], rows)
