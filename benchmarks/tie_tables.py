# SPDX-License-Identifier: Apache-2.0
"""Tables of `docs/ties.md`."""

from .records import percent, records, table


WEIGHTS = {"Gaussian": "Gaussian", "model": "SmolLM2"}


def _named(prefix: str) -> dict[str, dict]:
    """Records whose names begin so, by the rest of their names."""
    return {r["name"].removeprefix(prefix): r for r in records("tie_dither") if r["name"].startswith(prefix)}


def tie_movement() -> str:
    found = {weights: _named(f"movement / {weights} / ") for weights in WEIGHTS}
    steps = list(next(iter(found["model"].values()))["movement"]["with"])
    rows = []
    for scheme, on_model in found["model"].items():
        rows.append([scheme])
        for of_scheme in (found["Gaussian"][scheme], on_model):
            for step in steps:
                without, (ratio, error, _) = (of_scheme["movement"][kind][step] for kind in ("without", "with"))
                rows[-1].append(f"{without[0]:.3g} → {ratio:.2f} ± {error:.2f}")
        ratio, error, _ = on_model["movement"]["spread"][steps[0]]
        rows[-1].append(f"{ratio:.2f} ± {error:.2f}")
    columns = [f"{label}, {float(step):g}" for label in WEIGHTS.values() for step in steps]
    return table(["scheme", *columns, f"SmolLM2 spread over nine cells, {float(steps[0]):g}"], rows)


def tie_checks() -> str:
    gaussian, rows = _named("movement / Gaussian / "), []
    for scheme, r in _named("movement / model / ").items():
        (weights,), (without, with_it) = r["shape"], r["load_cpu_seconds"]
        shares = [each["share_on_boundaries"] for each in (gaussian[scheme], r)]
        rows.append([scheme, *(f"{percent(before, 2)} → {percent(after)}" for before, after in shares)])
        rows[-1] += [str(gaussian[scheme][key] + r[key]) for key in ("n_not_rounding_back", "n_bytes_differing")]
        rows[-1] += [percent(r["n_left"] / weights), f"{without:.1f}", f"{with_it:.1f}"]
        rows[-1].append(f"{1e9 * (with_it - without) / weights:.0f}")
    columns = ["scheme", "on boundaries, %: Gaussian", "SmolLM2", "not rounding back", "bytes that differ"]
    return table([*columns, "left in place, %", "loading without, s", "with, s", "dither, ns a weight"], rows)


def tie_densities() -> str:
    found = _named("density of ties / ")
    midpoints = found["model"]["by_midpoint"]
    rows = [
        [label, *(f"{value:.2f}" for value in found[weights]["by_midpoint"].values())]
        for weights, label in WEIGHTS.items()
    ]
    return table(["midpoint", *midpoints], rows)


def tie_start() -> str:
    rows = []
    for name, r in _named("start / ").items():
        scheme, dither = name.split(" / ")
        nats = "" if dither == "none" else f"{r['nats']:+.3f} ± {r['standard_error']:.3f}"
        rows.append([scheme, dither, f"{r['nats_per_token']:.3f}", nats])
    return table(["scheme", "dither", "nats per token", "to none"], rows)


def tie_steps() -> str:
    floor, rows = _named("floor / "), []
    for name, r in _named("steps / ").items():
        scheme, dither = name.split(" / ")
        _, ratio, error, changed = r["movement"][0]
        rows.append([scheme, dither.removeprefix("dither "), f"{ratio:.3g} ± {error:.2g}", percent(changed)])
        rows[-1] += [f"{r[key]:.1e}" for key in ("value", "kl_random_signs")]
        rows[-1] += [f"{floor[scheme]['value']:.1e}", f"{r['kl_full_precision']:.1e}"]
        rows[-1] += [" → ".join(f"{p:.4f}" for p in r["end_token"])]
    columns = ["scheme", "dither", "movement of the first step", "weights changed, %", "KL of the policy"]
    return table(
        [
            *columns,
            "the same step, random signs",
            "a nudge of norms",
            "in full precision",
            "end token after the prompt",
        ],
        rows,
    )
