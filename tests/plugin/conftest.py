"""Fixtures for tests of the plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from flexgen_helm.plugin.context import PluginContext, get_context, set_context


@pytest.fixture
def use_context() -> Iterator[Callable[[PluginContext], PluginContext]]:
    """Make a context that of the process until the test ends; returns it."""
    previous = get_context()

    def use(context: PluginContext) -> PluginContext:
        set_context(context)
        return context

    yield use
    set_context(previous)
