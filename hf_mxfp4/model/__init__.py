# SPDX-License-Identifier: Apache-2.0
"""A model's structure: its layers and their names, its routers, and the report of quantizing it."""
