"""Engine flags as a command gets them."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from flexgen_helm.cli.engine_flags import complete_dummy_weights, with_engine_flags


def options_of(*flags: str) -> dict[str, Any]:
    """The engine options that a command gets for these flags."""
    calls: list[Any] = []
    app = typer.Typer()
    app.command()(with_engine_flags(lambda engine: calls.append(engine)))
    typer.main.get_command(app).main(args=complete_dummy_weights(flags), standalone_mode=False)
    return calls[0]


def record_suites(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, Any]]]:
    """Have `run` compute nothing; return the list of HELM's arguments and engine options of its
    calls.
    """
    from flexgen_helm.plugin import suite

    calls: list[tuple[list[str], dict[str, Any]]] = []

    def run_suite(argv: Any, options: Any = None, *more: Any) -> suite.SuiteOutcome:
        calls.append((list(argv), dict(options or {})))
        return suite.SuiteOutcome(0)

    monkeypatch.setattr(suite, "run_suite", run_suite)
    return calls
