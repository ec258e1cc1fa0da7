"""Self-contained HTML pages: a title, and sections of pictures, tables and notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import plotly.graph_objects as go


def page(title: str, summary: str, sections: Sequence[Mapping[str, Any]]) -> str:
    """A section has a `title`, and may have `pictures` (`figure_html`), `tables` of titles and rows, and `notes`."""
    from jinja2 import Environment, PackageLoader

    environment = Environment(loader=PackageLoader("flexgen_helm.report"), autoescape=True, trim_blocks=True)
    return environment.get_template("page.html").render(title=title, summary=summary, sections=sections)


def figure_html(figure: go.Figure, first: bool) -> str:
    """A picture as a part of a page; the first one brings the library that draws them."""
    return str(figure.to_html(full_html=False, include_plotlyjs=first, config={"displaylogo": False}))
