# SPDX-License-Identifier: Apache-2.0
"""What quantization does to a model: error analysis, perplexity, comparison, GPTQ, smoothing, planning, run reports.

Only the command line, recipes and benchmarks import this package; training does not."""

from ..utils import lazy_names, stub_names


_LAZY = stub_names(__name__)

__all__ = sorted(_LAZY)

__getattr__ = lazy_names(__name__, _LAZY)
