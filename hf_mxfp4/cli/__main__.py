# SPDX-License-Identifier: Apache-2.0
"""`python -m hf_mxfp4.cli`, the same as `hf-mxfp4`."""

from . import main


main()
