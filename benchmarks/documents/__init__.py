# SPDX-License-Identifier: Apache-2.0
"""Tables and plots of the documents, from the records in `benchmarks/results` alone; see `benchmarks.write_docs`."""
