# SPDX-License-Identifier: Apache-2.0
"""The files of an error analysis: JSON, CSV, figures, and one HTML page."""
