# SPDX-License-Identifier: Apache-2.0
"""Parts of `ablation.py`, the tables of arXiv 2605.20402: what each correction of MXFP4 recovers under GRPO."""
