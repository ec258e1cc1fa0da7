"""Values that shell completion offers. Functions import little, because a shell waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def completing(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Complete one of the names that a function returns, or the last of a list with commas
    between.
    """

    def complete(incomplete: str) -> list[str]:
        earlier, comma, last = incomplete.rpartition(",")
        return [f"{earlier}{comma}{name}" for name in names() if name.startswith(last)]

    return complete


def _models() -> Iterable[str]:
    from flexgen_helm.checkpoint.catalog import CATALOG

    return CATALOG


def _machines() -> Iterable[str]:
    from flexgen_helm.hardware.profile import shipped_profiles

    return ("measured", *shipped_profiles())


# A name of the catalog; a shell completes folders and files by itself.
complete_model = completing(_models)
complete_helm_models = completing(lambda: map("flexgen/{}".format, _models()))
complete_hardware = completing(_machines)
