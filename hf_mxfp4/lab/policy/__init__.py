# SPDX-License-Identifier: Apache-2.0
"""What quantization does to a policy: its routing."""
