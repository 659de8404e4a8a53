# SPDX-License-Identifier: Apache-2.0
"""Adaptive quantization noise (AQN): its schedule, what controls it, and where it is added."""
