"""What the driver and its workers tell each other: plain records, which Ray carries. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.config import EngineConfig
from flexgen_helm.errors import FlexgenError
from flexgen_helm.progress import Event
from flexgen_helm.request import GenerationRequest, GenerationResult, Progress


@dataclass(frozen=True)
class ModelToLoad:
    """What `Engine.from_config` takes, the same on every machine.

    path: a name of the catalog or the hub, or an absolute path. name: what the user calls the model.
    """

    path: str
    config: EngineConfig
    name: str

    def with_absolute_paths(self) -> ModelToLoad:
        """Return the record for processes that have other working folders; names of models are no paths."""
        folder = self.config.offload_dir
        config = self.config if folder is None else replace(self.config, offload_dir=str(Path(folder).absolute()))
        path = resolve(self.path, config.revision).path
        return ModelToLoad(self.path if path is None else str(path.absolute()), config, self.name)


@dataclass(frozen=True)
class WorkerIdentity:
    """What the driver compares before it takes answers from a worker, and what its records say.

    version: of flexgen_helm. tokenizer: its fingerprint. fingerprint: of the engine; answers are cached by it.
    device_type, dtype: as torch names them. load_s: seconds until the model was ready.
    """

    host: str
    pid: int
    version: str
    tokenizer: str | None
    fingerprint: str
    device_type: str
    dtype: str
    load_s: float


@dataclass(frozen=True)
class Failure:
    """Why a worker could not load its model or compute a unit. exit_code: as of `FlexgenError`."""

    message: str
    exit_code: int

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        if isinstance(error, FlexgenError):
            return cls(str(error), error.exit_code)
        return cls(f"{type(error).__name__}: {error}", 1)


@dataclass(frozen=True)
class Order:
    """What a worker shall do next.

    unit: number of the unit to compute, with its requests; None to go on. stop: number of a unit to stop.
    wait_s: seconds until it reports at the latest.
    """

    wait_s: float
    unit: int | None = None
    requests: Sequence[GenerationRequest] = ()
    stop: int | None = None


@dataclass(frozen=True)
class Report:
    """What has happened since the last report.

    state: of the worker. identity: once it is ready. results: (unit, index in the unit, result).
    finished: the unit that has ended now, with the run's record, or with why it failed.
    """

    state: Literal["loading", "ready", "failed"]
    identity: WorkerIdentity | None = None
    results: Sequence[tuple[int, int, GenerationResult]] = ()
    finished: int | None = None
    record: dict[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    progress: Progress | None = None
    events: Sequence[Event] = ()
