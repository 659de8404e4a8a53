# SPDX-License-Identifier: Apache-2.0
"""Reports and plots. matplotlib is imported when a plot is drawn."""

from .errors.schemes import PAPER_SCHEMES, parse_scheme
from .errors.statistics import ErrorStatistics, error_statistics
from .errors.sweep import PrecisionSweep, precision_sweep
from .plots import plot_training
from .policy.routers import RouterStatistics, router_agreement, router_statistics
from .run_report.callback import RunReportCallback


__all__ = [
    "PAPER_SCHEMES",
    "ErrorStatistics",
    "PrecisionSweep",
    "RouterStatistics",
    "RunReportCallback",
    "error_statistics",
    "parse_scheme",
    "plot_training",
    "precision_sweep",
    "router_agreement",
    "router_statistics",
]
