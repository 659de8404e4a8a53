# SPDX-License-Identifier: Apache-2.0
"""The `hf-mxfp4` command. One module per command; heavy imports happen when a command runs."""

from .app import app, main


__all__ = ["app", "main"]
