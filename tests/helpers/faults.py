"""Calls that fail when they are told to."""

from __future__ import annotations


class Once:
    """Passes calls on; the one numbered `at` raises first (or does its work and raises then)."""

    def __init__(self, honest, at: int, error, after: bool = False) -> None:
        self._honest, self._at, self._error, self._after = honest, at, error, after
        self.calls = 0

    @property
    def raised(self) -> bool:
        return self.calls > self._at

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls - 1 == self._at:
            if self._after:
                self._honest(*args, **kwargs)
            raise self._error()
        return self._honest(*args, **kwargs)


def replaced(patch, owner, name: str, at: int, error, after: bool = False) -> Once:
    once = Once(getattr(owner, name), at, error, after)
    patch.setattr(owner, name, (lambda *a, **k: once(*a, **k)) if isinstance(owner, type) else once)
    return once


def fails_once(patch, after: int) -> list[tuple[int, int]]:
    """Let the first run of an engine fail after so many answers; return (asked, delivered) of each
    run, as they end.
    """
    from flexgen_helm import Engine
    from flexgen_helm.errors import FlexgenError

    run, computed = Engine.run, []

    def failing(self, requests, *, on_result, should_stop, **options):
        delivered = []

        def deliver(index, result):
            if not computed and len(delivered) == after:
                raise FlexgenError("the power is out")
            delivered.append(index)
            on_result(index, result)

        try:
            return run(self, requests, on_result=deliver, should_stop=should_stop, **options)
        finally:
            computed.append((len(requests), len(delivered)))

    patch.setattr(Engine, "run", failing)
    return computed
