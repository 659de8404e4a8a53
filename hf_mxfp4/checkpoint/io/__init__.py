# SPDX-License-Identifier: Apache-2.0
"""Files and folders of checkpoints: reading, writing, replacing and checking them."""
