"""Tables of the FlexGen paper | predicted for its T4 | measured by our benchmarks:
`python -m benchmarks.paper`.

`page.md` is docs/paper.md with a name in braces where a table is; `rows` makes the rows.
Predictions are computed by each call, measurements are those of stored results. `make pages` writes
the page.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date
from typing import Any

from flexgen_helm.benchmarks.common import choose
from flexgen_helm.benchmarks.paper.rows import PAPER, TABLES, stored_result

# Stored results that are in the tables; some benchmarks are gone.
_MEASURED = {
    "ablation": "`benchmarks.ablation`",
    "clients": "`benchmarks.clients`",
    "precisions": "precisions",
}
# As the names of result files say it.
_PROCESSORS = {"amd_epyc": "AMD EPYC", "intel_xeon": "Intel Xeon"}


def page() -> str:
    """Return docs/paper.md."""
    text = (PAPER / "page.md").read_text(encoding="utf-8")
    text = text.replace("{measurements}", "\n".join(map(_measurement, _MEASURED)))
    return re.sub(r"\{(\w+)\}", lambda found: table(found[1]), text)


def table(name: str) -> str:
    """Return a table with all its rows, without columns that nobody has. Raises `UsageError`."""
    rows = choose("table", name, TABLES)()
    columns = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    titles = ["", *(name.replace("_s", ", s") for name in columns[1:])]
    lines = [f"| {' | '.join(titles).lstrip()} |", f"|---|{'---:|' * (len(columns) - 1)}"]
    lines += [f"| {' | '.join(_cell(row[name]) for name in columns)} |" for row in rows]
    return "\n".join(lines)


def _measurement(name: str) -> str:
    result = stored_result(name)
    is_busy = any("other programs were computing" in note for note in result["notes"])
    cells = [_MEASURED[name], day_of(result), processor_of(result)]
    cells += [str(result["hardware"].get("threads", "-")), "computed, too" if is_busy else "-"]
    cells += [result["versions"][package] for package in ("flexgen-helm", "torch", "transformers")]
    return f"| {' | '.join(cells)} |"


def day_of(result: Mapping[str, Any]) -> str:
    day = date.fromisoformat(result["date"])
    return f"{day.day} {day:%B %Y}"


def processor_of(result: Mapping[str, Any]) -> str:
    """Return the processor of a stored result."""
    return next(name for part, name in _PROCESSORS.items() if part in result["file"])


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.6g}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
