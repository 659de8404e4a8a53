# SPDX-License-Identifier: Apache-2.0
"""The parts that other libraries call: transformers' quantizer, PEFT's layers, vLLM's plugin."""
