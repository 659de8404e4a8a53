# SPDX-License-Identifier: Apache-2.0
"""HTML pages, made of the templates in `pages/`: files without external references, readable on a telephone."""

import base64
import functools
import io
import math
from typing import Any

from ..files import printable


try:
    import jinja2
    from markupsafe import Markup
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    missing = error.name.partition(".")[0]
    raise ImportError(f"reports need {missing}, which is not installed: pip install 'hf-mxfp4[report]'") from error


def render_page(template: str, **values: Any) -> str:
    """Fill the template ``pages/<template>.html.j2``, which escapes all values; images are part of the page.

    Raises `jinja2.UndefinedError` for a value that the template asks for and ``values`` lacks.
    """
    return _environment().get_template(f"{template}.html.j2").render(**values)


def number(value: float, digits: int) -> str:
    """Return ``value`` with so many decimals; a dash where it does not exist."""
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "inf"
    return f"{value:,.{digits}f}"


def _png_base64(figure: Figure) -> Markup:
    """Return a figure as what an image inside the page is made of."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return Markup(base64.b64encode(buffer.getvalue()).decode())


def _printable(value: Any) -> Any:
    """Escape control characters in text that comes from files; parts of the page itself are `Markup`."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value)
    return value


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, "pages"),
        autoescape=True,
        finalize=_printable,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["png_base64"] = _png_base64
    return environment
