# SPDX-License-Identifier: Apache-2.0
"""What the recipes print."""

import os

from rich.console import Console
from rich.text import Text


console = Console()


def tell(subject: str, message: str) -> None:
    """Print a line once per job."""
    if os.environ.get("RANK", "0") == "0":
        console.print(Text.assemble((subject, "bold"), " ", message), highlight=False, soft_wrap=True)
