# SPDX-License-Identifier: Apache-2.0
"""The columns of every table of statistics, on screen and in HTML."""

import math
from collections.abc import Callable

from ..errors.statistics import ErrorStatistics


def number(value: float, digits: int) -> str:
    """``value`` with so many decimals; a dash where it does not exist."""
    if math.isnan(value):
        return "-"
    return "inf" if math.isinf(value) else f"{value:.{digits}f}"


#: Units that the titles have no room for.
LEGEND = (
    "scale bias, deadzone, grid: energy of that part of the error over that of the whole error; floor: error of the "
    "ideal scale amax / 6"
)

#: Titles, and how to fill the cells.
COLUMNS: dict[str, Callable[[ErrorStatistics], str]] = {
    "rel. MSE %": lambda s: number(100 * s.relative_mse, 4),
    "SQNR dB": lambda s: number(s.sqnr_db, 2),
    "floor %": lambda s: number(100 * s.floor_relative_mse, 4),
    "scale bias": lambda s: number(s.energy_ratio["scale_bias"], 3),
    "deadzone": lambda s: number(s.energy_ratio["deadzone"], 3),
    "grid": lambda s: number(s.energy_ratio["grid"], 3),
    "cos(s,g)": lambda s: number(s.cosine_scale_grid, 3),
    "in deadzone %": lambda s: number(100 * s.deadzone_fraction, 2),
    "to zero %": lambda s: number(100 * s.zero_fraction, 2),
    "gain": lambda s: number(s.gain, 4),
    "gamma mean": lambda s: number(s.gamma_mean, 3),
}
