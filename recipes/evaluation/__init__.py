# SPDX-License-Identifier: Apache-2.0
"""What `evaluate.py` is made of."""
