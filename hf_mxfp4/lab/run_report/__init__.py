# SPDX-License-Identifier: Apache-2.0
"""What a training run says about itself: its log, its charts, its health, and the page that shows them."""
