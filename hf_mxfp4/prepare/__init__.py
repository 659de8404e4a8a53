# SPDX-License-Identifier: Apache-2.0
"""What is done to the weights of a full-precision checkpoint before it is trained in MXFP4: scales moved from
activations into weights (smoothing), weights rounded so that outputs stay (GPTQ), and master weights moved off rounding
boundaries (dither)."""

from .dither import FULL_NUMBERS, DitherReport, dither_masters
from .places import Place, find_places
from .smoothing import Smoothing, calibration_ids, smooth_loaded, smooth_model
