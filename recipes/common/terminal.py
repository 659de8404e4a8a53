# SPDX-License-Identifier: Apache-2.0
"""What the recipes print, and how they end when something is wrong that a user can mend."""

import contextlib
import os
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text


console = Console()


def tell(subject: str, message: str) -> None:
    """Print a line once per job."""
    if os.environ.get("RANK", "0") == "0":
        console.print(Text.assemble((subject, "bold"), " ", message), highlight=False, soft_wrap=True)


@contextlib.contextmanager
def errors_as_messages(*errors: type[Exception], where: str = "") -> Iterator[None]:
    """Within this context these ``errors`` end the process with their message, after ``where``, and no traceback."""
    try:
        yield
    except errors as error:
        raise SystemExit(f"error: {where}{error}") from error
