"""What the driver and its workers tell each other: plain records, which Ray carries. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flexgen_helm.checkpoint.names import resolve
from flexgen_helm.config import EngineConfig
from flexgen_helm.errors import FlexgenError
from flexgen_helm.progress import Message, PlanLine, ProgressPhase
from flexgen_helm.request import GenerationResult, Progress


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
    """Why a worker is lost, or could not load its model or compute a unit. exit_code: as of `FlexgenError`."""

    message: str
    exit_code: int = 1
    is_lost: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        if isinstance(error, FlexgenError):
            return cls(str(error), error.exit_code)
        return cls(f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class UnitRecord:
    """A unit has ended. record: `Engine.last_run`; empty if it was stopped."""

    record: Mapping[str, Any]


# What has happened at a worker since its last report, in this order. Keys are the indices of results in their unit;
# of anything else the newest with a key counts, because a download reports a thousand stages.
End = WorkerIdentity | UnitRecord | Failure
Report = Mapping[Any, GenerationResult | Progress | Message | PlanLine | ProgressPhase | End]
