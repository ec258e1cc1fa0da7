"""Self-contained HTML pages of pictures, tables and notes; and tables in markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import plotly.graph_objects as go


def page(title: str, summary: str, sections: Sequence[Mapping[str, Any]]) -> str:
    """A section has a `title`, and may have `pictures` (`figure_html`), `tables` of titles and rows, and `notes`."""
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup, escape

    def breakable(text: str) -> Markup:
        """Names of runs break behind a comma or a colon rather than within a word."""
        return Markup("<wbr>").join(escape(part) for part in re.split("(?<=[,:])", text))

    environment = Environment(loader=PackageLoader("flexgen_helm.report"), autoescape=True, trim_blocks=True)
    environment.filters["breakable"] = breakable
    return environment.get_template("page.html").render(title=title, summary=summary, sections=sections)


def figure_html(figure: go.Figure, first: bool) -> str:
    """A picture as a part of a page; the first one brings the library that draws them."""
    return str(figure.to_html(full_html=False, include_plotlyjs=first, config={"displaylogo": False}))


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]], right: int = 0) -> str:
    """A table whose columns also line up in a terminal. right: columns from the end that are numbers."""
    lines = [tuple(titles), *map(tuple, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    left = len(titles) - right

    def drawn(line: Sequence[str]) -> str:
        cells = [cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths))]
        return "| " + " | ".join(cells) + " |"

    rule = ["-" * (w + 2) if i < left else "-" * (w + 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([drawn(lines[0]), "|" + "|".join(rule) + "|", *map(drawn, lines[1:])])
