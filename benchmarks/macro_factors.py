# SPDX-License-Identifier: Apache-2.0
"""Schemes of `MXFP4RLConfig`, as its keyword arguments, that records of costs and of ties were made with.

Macro factors were the default until block mantissas were.
"""

#: A factor for every 128 elements, searched for weights alone; in mode ``packed`` without outlier fallback.
FACTORS = {"scale_rule": "rceil", "macro_search": "hybrid"}
#: arXiv 2605.20402's dense recipe but for the search, which is static there.
FACTORS_OF = {**FACTORS, "outlier_fallback": 0.5}
#: Block scales alone.
PLAIN = {"scale_rule": "rceil", "macro_block": None, "outlier_fallback": None}
