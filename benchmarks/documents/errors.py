# SPDX-License-Identifier: Apache-2.0
"""Tables of quantization errors."""

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.numerics import GEMM_OPERANDS
from hf_mxfp4.presets import PRESETS

from ..records import DATA, DISTRIBUTIONS, percent, scheme_error, table


def presets() -> str:
    """Return what each preset quantizes, from its row in `hf_mxfp4.presets`."""
    rows = []
    for preset in PRESETS.values():
        scheme = MXFP4RLConfig(preset=preset.name).gemms()
        products = [scheme.describe(gemm).replace("mxfp4+", "") for gemm in GEMM_OPERANDS]
        rows.append([f"`{preset.name}`", preset.summary, *products])
    return table(["`preset`", "", *GEMM_OPERANDS], rows)


def schemes() -> str:
    """Return the relative error of each scheme on each kind of data, and of outputs where it was measured."""
    errors = scheme_error()
    outputs = "outputs of trained layers"
    rows = []
    for data, name in errors:
        if data != "Gaussian" or name.startswith(("fallback", "scale factors")):
            continue
        row = [name, *(percent(errors[data, name]["value"]) for data in DATA)]
        output_error = errors.get((outputs, name))
        row.append("" if output_error is None else percent(output_error["value"]))
        rows.append(row)
    return table(["scheme", *DATA, outputs], rows)


def statements() -> str:
    """Return statements of arXiv 2605.20402, and what was measured of each."""
    errors = scheme_error()

    def on_gaussian(name: str) -> dict:
        return errors["Gaussian", name]

    def hidden_cosine(name: str) -> str:
        return f"{on_gaussian(name)['cosine_scale_deadzone_unmasked']:.4f}"

    def energy(record: dict, part: str) -> float:
        return record["value"] * record[f"ratio_{part}"]

    def ratios(record: dict) -> str:
        parts = [f"{record[f'ratio_{part}']:.3f}" for part in ("scale_bias", "deadzone", "grid")]
        return " / ".join([*parts, f"{record['cosine_scale_grid']:.3f}"])

    plain = on_gaussian("rceil")
    static = on_gaussian("rceil, static factor")
    half = on_gaussian("rceil, static factor, fallback 0.5")
    one = on_gaussian("rceil, static factor, fallback 1")
    scale_gone = 100 * (1 - energy(static, "scale_bias") / energy(plain, "scale_bias"))
    deadzone_gone = 100 * (1 - energy(half, "deadzone") / energy(static, "deadzone"))
    rows = [
        (
            "the three parts add up to the error",
            "confirmed: bit for bit, for every scheme (`tests/numerics/test_numerics_decompose.py`)",
        ),
        (
            "energies 1.725 / .026 / .703 of the error's and cosine -.657, on Qwen's weights",
            f"confirmed: {ratios(plain)} on Gaussian data, {ratios(errors['trained weights', 'rceil'])} on trained "
            "weights: the numbers belong to the ceiling rule on nearly Gaussian data",
        ),
        (
            "the deadzone is orthogonal to the rest",
            f"confirmed for `rceil` without fallback, exactly, macro factors included ({hidden_cosine('rceil')}); not "
            f"for `even` ({hidden_cosine('even')}), `floor` ({hidden_cosine('floor')}) or with fallback "
            f"({hidden_cosine('rceil, static factor, fallback 0.5')})",
        ),
        (
            "macro-block scaling removes the scale term",
            f"otherwise: at 128 its energy falls by {scale_gone:.0f} % on Gaussian data, from "
            f"{plain['ratio_scale_bias']:.3f} to {static['ratio_scale_bias']:.3f} of the error's; one factor fits the "
            "block that holds the maximum",
        ),
        (
            "the scale ratio is a gain of 44 % per layer",
            f"otherwise: the mean of gamma is {plain['gamma_mean']:.3f}, but a quantizer divides by the scale that it "
            f"multiplies with; its gain is {plain['gain']:.3f}",
        ),
        (
            "outlier fallback restores the deadzone",
            f"in part: alpha = .5 takes {deadzone_gone:.0f} % of the deadzone's energy, but that is "
            f"{100 * static['ratio_deadzone']:.0f} % of the error's; the whole goes from {percent(static['value'])} to "
            f"{percent(half['value'])} %, nearly all of it scale and grid error",
        ),
        (
            "alpha = .5",
            f"otherwise, for the error: alpha = 1 leaves {percent(one['value'], 4)} %, .5 leaves "
            f"{percent(half['value'])} %, the error of the first pass at half its size",
        ),
        (
            "an irreducible floor",
            f"otherwise: {percent(on_gaussian('ideal scale amax / 6 (not MXFP4)')['value'])} % is the floor of scales "
            f"that follow the maximum; in the storage of a macro factor, block mantissas leave "
            f"{percent(on_gaussian('even, block mantissas')['value'])} %",
        ),
    ]
    return table(["statement of arXiv 2605.20402", "measured"], [list(row) for row in rows])


def readme_schemes() -> str:
    """Return errors of the schemes that the README names."""
    errors = scheme_error()
    names = {
        "rceil": "`rceil`",
        "rceil, static factor": "`rceil`, `static` factor (the paper's)",
        "even, dynamic factor": "`even`, `dynamic` factor",
        "even, block mantissas": "`even`, `block_mantissas`: same storage, and exact in bfloat16",
        "rceil, static factor, fallback 0.5": "`rceil`, `static` factor, outlier fallback 0.5",
    }
    rows = []
    for name, shown in names.items():
        rows.append([shown, *(percent(errors[data, name]["value"]) for data in DISTRIBUTIONS)])
    return table(["scheme", *DISTRIBUTIONS], rows)
