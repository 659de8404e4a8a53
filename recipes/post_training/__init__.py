# SPDX-License-Identifier: Apache-2.0
"""What `grpo.py` is made of."""
