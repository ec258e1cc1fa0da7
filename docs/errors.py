"""Write docs/reference/errors.md from the docstrings of all errors: `make pages`."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import flexgen_helm
from flexgen_helm.errors import FlexgenError

PAGE = Path(__file__).resolve().parent / "reference" / "errors.md"
HEAD = """# Errors and exit codes

<!-- Made from the docstrings of the errors by `make pages`; edit those instead. -->

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | failed |
| 2 | wrong usage, or refused before anything was computed |
| 130 | interrupted; the same command continues |

`FLEXGEN_HELM_DEBUG=1` also prints the traceback.

## Catalogue

Every error that this project raises on purpose derives from `FlexgenError`. Its message is one sentence: what happened,
the number, and the command that helps. In Python, errors without a module here are imported from `flexgen_helm.errors`.

| error | exit code | cause | next |
|---|---|---|---|
"""
_DEFINES_ERROR = re.compile(r"^class \w+\(\w+Error\):", re.MULTILINE)


def page() -> str:
    """The page's markdown."""
    return HEAD + "".join(map(_row, classes()))


def classes() -> Iterator[type[FlexgenError]]:
    """All errors of the package, each behind the one that it derives from."""
    _import_errors()
    waiting: list[type[FlexgenError]] = [FlexgenError]
    while waiting:
        error = waiting.pop()
        if error.__module__.startswith("flexgen_helm.") and ".benchmarks." not in error.__module__:
            yield error
        waiting += sorted(error.__subclasses__(), key=lambda own: own.__name__, reverse=True)


def entry(error: type[FlexgenError]) -> tuple[str, str]:
    """Cause and next step. Raises `ValueError` for a docstring that has not both."""
    cause, separator, following = (inspect.getdoc(error) or "").partition("\n\nNext: ")
    if not separator or "\n\n" in cause:
        raise ValueError(
            f"the docstring of {error.__name__} must be a paragraph of cause, then 'Next: ' and "
            "what helps"
        )
    return " ".join(cause.split()), " ".join(following.split())


def _row(error: type[FlexgenError]) -> str:
    module = "" if error.__module__ == FlexgenError.__module__ else f"{error.__module__}."
    cause, following = entry(error)
    depth = len(error.__mro__) - len(FlexgenError.__mro__)
    return (
        f"| {'› ' * depth}`{module}{error.__name__}` | {error.exit_code} | {cause} | {following} "
        "|\n"
    )


def _import_errors() -> None:
    """Import every module of the package that defines an error."""
    root = Path(flexgen_helm.__file__).parent
    for file in sorted(root.rglob("*.py")):
        if _DEFINES_ERROR.search(file.read_text(encoding="utf-8")):
            importlib.import_module(
                ".".join(("flexgen_helm", *file.relative_to(root).with_suffix("").parts))
            )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
