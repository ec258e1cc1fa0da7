"""Fixtures for tests of the plugin."""

import pytest

from flexgen_helm.plugin.context import get_context, set_context


@pytest.fixture
def use_context():
    """Make a context that of the process until the test ends; returns it."""
    previous = get_context()

    def use(context):
        set_context(context)
        return context

    yield use
    set_context(previous)
