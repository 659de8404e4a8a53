# SPDX-License-Identifier: Apache-2.0
"""The report of a training run: its log read back, charts, checks of its health, and the page that shows them."""
