"""One self-contained HTML page: text, tables, plots and dialogs. All text is escaped, and the page
loads nothing from elsewhere.

Used by the reports of runs and evaluations and by the comparison of methods.
"""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharpen.calls import compact_json
from sharpen.records import write_text
from sharpen.types import Json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem;border-bottom:1px solid #8886}
table{border-collapse:collapse;margin:.5rem 0;display:block;overflow-x:auto}
td,th{padding:.2rem .7rem;text-align:right;border-bottom:1px solid #8883}
td:first-child,th:first-child{text-align:left}
.plots{display:flex;flex-wrap:wrap;gap:1rem}
.plots svg{background:#fff;border-radius:6px;height:auto}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:#8881;padding:.5rem;border-radius:6px}
details{margin:.4rem 0}summary{cursor:pointer}
.say{margin:.3rem 0;padding:.3rem .6rem;border-left:4px solid #8886;overflow-wrap:anywhere}
.assistant{border-color:#2a7}.tool{border-color:#a72}.user{border-color:#27a}
.bad{color:#c22}.good{color:#2a7}.note{opacity:.75}
"""
_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
# Written as empty into every plot, so that the same figure gives the same file.
_SVG_METADATA = ("Creator", "Date", "Format", "Type")


def escape(value: Any) -> str:
    """Returns a value as text that is safe in HTML."""
    return html.escape(str(value))


class Page:
    """A page under construction: parts are added from top to bottom, then it is saved."""

    def __init__(self, title: str):
        self.title = title
        self._parts: list[str] = []

    def add(self, markup: str) -> None:
        """Add markup whose text is escaped already."""
        self._parts.append(markup)

    def heading(self, text: str) -> None:
        """Add a second-level heading."""
        self.add(f"<h2>{escape(text)}</h2>")

    def text(self, text: str, kind: str = "") -> None:
        """Add a paragraph; `kind` is a CSS class: good, bad or note."""
        self.add(f'<p class="{kind}">{escape(text)}</p>')

    def table(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add a table with one row per mapping; columns are all keys, in order of appearance."""
        if not rows:
            return
        columns = list(dict.fromkeys(key for row in rows for key in row))
        header_cells = [f"<th>{escape(column)}</th>" for column in columns]
        table_rows = [f"<tr>{''.join(header_cells)}</tr>"]
        for row in rows:
            values = [_format_cell(row.get(column, "")) for column in columns]
            cells = [f"<td>{escape(value)}</td>" for value in values]
            table_rows.append(f"<tr>{''.join(cells)}</tr>")
        self.add(f"<table>{''.join(table_rows)}</table>")

    def plots(self, figures: Iterable[Figure]) -> None:
        """Add figures side by side."""
        images = [_render_svg(figure) for figure in figures]
        self.add(f'<div class="plots">{"".join(images)}</div>')

    def details(self, summary: str, inside: str) -> None:
        """Add a folded section; `inside` is markup whose text is escaped already."""
        self.add(f"<details><summary>{escape(summary)}</summary>{inside}</details>")

    def preformatted(self, summary: str, text: str) -> None:
        """Add a folded section with text in a fixed-width font."""
        self.details(summary, f"<pre>{escape(text)}</pre>")

    def save(self, path: str | Path) -> None:
        """Write the page to an HTML file."""
        pieces = (
            '<!doctype html><html lang="en"><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_SECURITY_POLICY}">',
            f"<title>{escape(self.title)}</title><style>{_STYLE}</style>",
            f"<h1>{escape(self.title)}</h1>",
            *self._parts,
            "</html>",
        )
        write_text(Path(path), "".join(pieces))


def _format_cell(value: Any) -> str:
    """Returns short numbers, and everything else as text."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def render_dialog(messages: Sequence[Json]) -> str:
    """Returns markup for messages in the chat format, with their calls."""
    parts = []
    for message in messages:
        role = escape(message.get("role", ""))
        text = escape(message.get("content") or "")
        for call in message.get("tool_calls") or ():
            text += _render_call(call.get("function", call))
        parts.append(f'<div class="say {role}"><b>{role}</b> {text}</div>')
    return "".join(parts)


def _render_call(function: Json) -> str:
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = compact_json(arguments)
    return f"<br><code>{escape(function.get('name', ''))}({escape(arguments)})</code>"


def _render_svg(figure: Figure) -> str:
    """Returns a plot as markup whose labels can be selected and searched."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(_SVG_METADATA))
    text = file.getvalue()
    return text[text.index("<svg") :]
