"""One self-contained HTML page: text, tables, plots and dialogs, everything escaped, nothing
fetched."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sharpen.calls import compact_json
from sharpen.records import write_text
from sharpen.types import Json

STYLE = """
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
METADATA = ("Creator", "Date", "Format", "Type")  # of a plot: none
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def escape(value: Any) -> str:
    return html.escape(str(value))


def shown(value: Any) -> str:
    """A cell: numbers short, everything else as text."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


class Page:
    def __init__(self, title: str):
        self.title, self.parts = title, list[str]()

    def add(self, markup: str) -> None:
        """Markup that is safe already."""
        self.parts.append(markup)

    def heading(self, text: str) -> None:
        self.add(f"<h2>{escape(text)}</h2>")

    def text(self, text: str, kind: str = "") -> None:
        self.add(f'<p class="{kind}">{escape(text)}</p>')

    def table(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """One row a mapping; the columns are all keys, in order of appearance."""
        if not rows:
            return
        columns = list(dict.fromkeys(key for row in rows for key in row))
        head = "".join(f"<th>{escape(name)}</th>" for name in columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(shown(row.get(c, '')))}</td>" for c in columns) + "</tr>"
            for row in rows
        )
        self.add(f"<table><tr>{head}</tr>{body}</table>")

    def plots(self, figures: Iterable[Any]) -> None:
        self.add(f'<div class="plots">{"".join(map(svg, figures))}</div>')

    def details(self, summary: str, inside: str) -> None:
        self.add(f"<details><summary>{escape(summary)}</summary>{inside}</details>")

    def preformatted(self, summary: str, text: str) -> None:
        self.details(summary, f"<pre>{escape(text)}</pre>")

    def save(self, path: str | Path) -> None:
        guard = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        head = f"<title>{escape(self.title)}</title><style>{STYLE}</style>"
        body = f"<h1>{escape(self.title)}</h1>{''.join(self.parts)}"
        whole = f'<!doctype html><html lang="en"><meta charset="utf-8">{guard}{head}{body}</html>'
        write_text(Path(path), whole)


def dialog(messages: Sequence[Json]) -> str:
    """Messages in the chat format, calls included."""
    parts = []
    for message in messages:
        role = escape(message.get("role", ""))
        calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
        text = escape(message.get("content") or "")
        for call in calls:
            given = call.get("arguments", {})
            given = given if isinstance(given, str) else compact_json(given)
            text += f"<br><code>{escape(call.get('name', ''))}({escape(given)})</code>"
        parts.append(f'<div class="say {role}"><b>{role}</b> {text}</div>')
    return "".join(parts)


def svg(figure: Any) -> str:
    """A plot as markup; its text stays text."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(METADATA))
    text = file.getvalue()
    return text[text.index("<svg") :]
