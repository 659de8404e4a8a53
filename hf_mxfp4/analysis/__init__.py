# SPDX-License-Identifier: Apache-2.0
"""Reports and plots. matplotlib is imported when a plot is drawn."""

from .plots import plot_training


__all__ = ["plot_training"]
