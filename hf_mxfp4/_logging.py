# SPDX-License-Identifier: Apache-2.0
"""The package's logger: messages reach the terminal without any set-up, once per job."""

import logging
import os


def get_logger() -> logging.Logger:
    """Return the `hf_mxfp4` logger, at the level named by `HF_MXFP4_VERBOSITY` (default: info; other ranks: error)."""
    logger = logging.getLogger("hf_mxfp4")
    if not logger.handlers:
        handler = logging._StderrHandler()  # type: ignore[attr-defined]  # writes to the `sys.stderr` of the time
        handler.setFormatter(logging.Formatter("[hf_mxfp4] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
        default = "info" if os.environ.get("RANK", "0") == "0" else "error"
        level = (os.environ.get("HF_MXFP4_VERBOSITY") or default).upper()
        try:
            logger.setLevel(int(level) if level.isdigit() else level)
        except ValueError:
            logger.setLevel(default.upper())
            logger.warning("HF_MXFP4_VERBOSITY=%s is no level of logging; use debug, info, warning or error", level)
    return logger


def hide_import_noise() -> None:
    """Hide two messages of torchao, which transformers imports where it is installed: that its CUDA libraries do not
    fit this machine, and that it uses PyTorch in an old way. For commands, which do not use it."""
    logging.getLogger("torchao").addFilter(lambda record: not record.getMessage().startswith("Failed to load"))
    logging.getLogger("torch.utils._pytree").addFilter(lambda record: "Enum subclass" not in record.getMessage())
