# SPDX-License-Identifier: Apache-2.0
"""Parts of `pretrain.py`, the study of arXiv 2605.09825: what quantizing each product costs in training tokens."""
