# SPDX-License-Identifier: Apache-2.0
"""A model's structure: its layers, their names, and its routers."""
