# SPDX-License-Identifier: Apache-2.0
"""What quantization does to a model: error analysis, perplexity, comparison, GPTQ, smoothing, planning, run reports.

Only the command line, recipes and benchmarks import this package; training does not."""

from ..utils import lazy_names


__getattr__, __all__ = lazy_names(__name__)
