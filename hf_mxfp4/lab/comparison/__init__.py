# SPDX-License-Identifier: Apache-2.0
"""Two checkpoints side by side."""
