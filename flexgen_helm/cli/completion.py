"""Values that shell completion offers. Each function imports little, because a shell waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def complete_from(values: Iterable[str]) -> Callable[[str], list[str]]:
    """Complete one of `values`, or the last of a list with commas between."""

    def complete(incomplete: str) -> list[str]:
        earlier, comma, last = incomplete.rpartition(",")
        return [f"{earlier}{comma}{value}" for value in values if value.startswith(last)]

    return complete


def complete_model(incomplete: str) -> list[str]:
    """Complete a name of the catalog. A shell completes folders and files by itself."""
    from flexgen_helm.checkpoint.catalog import CATALOG

    return [name for name in CATALOG if name.startswith(incomplete)]


def complete_helm_models(incomplete: str) -> list[str]:
    """Complete the name that HELM knows a model of the catalog by."""
    return [name for name in map("flexgen/{}".format, complete_model("")) if name.startswith(incomplete)]


def complete_hardware(incomplete: str) -> list[str]:
    """Complete the name of a machine."""
    from flexgen_helm.hardware.profile import shipped_profiles

    return [name for name in ("measured", *shipped_profiles()) if name.startswith(incomplete)]


def complete_benchmark(incomplete: str) -> list[str]:
    """Complete the name of a benchmark."""
    from flexgen_helm.benchmarks import KNOWN

    return [name for name in KNOWN if name.startswith(incomplete)]
