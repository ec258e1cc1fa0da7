"""The points of a run at which `flexgen-helm run` does more than `helm-run`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from helm.benchmark.presentation.run_entry import RunEntry
from helm.benchmark.run_spec import RunSpec
from helm.benchmark.runner import Runner

from flexgen_helm.plugin.helm_log import HelmLog
from flexgen_helm.plugin.usage import HelmRun
from flexgen_helm.progress import observed_by


class HelmCommand:
    """What the patches of HELM ask of the command that runs it. This class is `helm-run`; `suite.Suite` is the other.

    is_collecting: each run is left where its requests are made.
    writes_entries: each run writes the entries of its deployment into `prod_env`.
    """

    is_collecting = False
    writes_entries = True

    def run_specs(
        self, make: Callable[..., list[RunSpec]], run_entries: list[RunEntry], **filters: Any
    ) -> list[RunSpec]:
        """Return the run specs of `run_entries`. make, filters: HELM's own function and its other arguments."""
        return make(run_entries, **filters)

    def collect(self, runner: Runner, run_specs: list[RunSpec]) -> None:
        """Do what precedes HELM's `run_all`."""

    @contextmanager
    def watched(self, runner: Runner, run_spec: RunSpec) -> Iterator[None]:
        """Be there while HELM goes through a run."""
        with observed_by(HelmLog()):
            yield

    def add(self, run: HelmRun) -> None:
        """Take the record of a run that HELM has executed."""
