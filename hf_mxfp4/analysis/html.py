# SPDX-License-Identifier: Apache-2.0
"""What the HTML reports are put together from: pages without external references, readable on a telephone."""

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape

from .report.figures import Figure


_STYLE = """
:root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:0 auto;padding:1rem}
h1{font-size:1.5rem}h2{font-size:1.25rem;margin-top:2rem}h3{font-size:1.05rem}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem}
th,td{padding:.25rem .5rem;text-align:right;border-bottom:1px solid #8885}th{vertical-align:bottom}
td{white-space:nowrap}th:first-child,td:first-child{text-align:left}
td:first-child{white-space:normal;overflow-wrap:anywhere;min-width:8rem}
.texts th,.texts td{text-align:left;vertical-align:top}.texts td{white-space:normal;overflow-wrap:anywhere}
.texts td:first-child{overflow-wrap:normal}
img{max-width:100%;height:auto;background:#fff}
.problem{border-left:.3rem solid #c33;padding-left:.7rem}.small{font-size:.85rem;opacity:.8}
.checks{list-style:none;padding:0}.checks li{border-left:.3rem solid #888;padding:.1rem .7rem;margin:.4rem 0}
.checks .green{border-color:#2a2}.checks .amber{border-color:#d90}.checks .red{border-color:#c33}
.panels{display:grid;grid-template-columns:repeat(auto-fill,minmax(19rem,1fr));gap:1rem}
.panels section p{margin:.2rem 0}
""".strip().replace("\n", "")


def page(title: str, body: Iterable[str]) -> str:
    """A whole page around the HTML of its body."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = True) -> str:
    """A table of texts, which are escaped; without ``headings``, of rows alone.

    Cells after the first hold ``numbers``, right-aligned and never broken; or else texts, which break wherever the
    width of the page asks for it. Where even that does not fit, the table scrolls inside its own box.
    """
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    attribute = "" if numbers else ' class="texts"'
    first = f"<tr>{head}</tr>" if head else ""
    return f'<div class="scroll"><table{attribute}>{first}{body}</table></div>'


def image(figure: Figure, alt: str) -> str:
    """A figure as an image inside the page."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<p><img alt="{escape(alt)}" src="data:image/png;base64,{data}"></p>'
