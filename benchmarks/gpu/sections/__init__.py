# SPDX-License-Identifier: Apache-2.0
"""What `python -m benchmarks.gpu` measures, a module for each section, and the ceilings of the machine before them."""
