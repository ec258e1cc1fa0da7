"""The ranks of a pipeline, started by torchrun. Rank 0 runs the cases of a job and pickles what
came of them.

As a script: `job.pickle` in the folder that is its argument has the `Job`; `outcomes.pickle` gets
the outcomes.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexgen_helm import Engine, FlexgenError, GenerationRequest, GenerationResult, MemoryLimits
from flexgen_helm.engine.rank import rank_of_process
from tests.helpers.forks import python
from tests.helpers.paths import ROOT

_TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


@dataclass(frozen=True)
class Case:
    """An engine that rank 0 opens, and the requests that it answers."""

    model: Path
    options: Mapping[str, Any]
    requests: Sequence[GenerationRequest]


@dataclass(frozen=True)
class Job:
    """What rank 0 does, one case after the other.

    fault: what rank 1 does wrong: 'order' (schedules otherwise), 'memory' (has too little for the
        first engine), 'kill' (dies in a pass).
    """

    cases: Sequence[Case]
    fault: str | None = None


@dataclass
class Outcome:
    """What came of one engine: results and record of its run, or the error."""

    results: list[GenerationResult] = field(default_factory=list)
    record: Mapping[str, Any] = field(default_factory=dict)
    error: FlexgenError | None = None


@dataclass(frozen=True)
class Ended:
    """What is left when all ranks have ended.

    outcomes: one for each case; missing ones were not reached.
    seconds_after_fault: from the fault 'kill' to the end of the last process.
    """

    code: int
    err: str
    outcomes: list[Outcome]
    seconds_after_fault: float | None


def run_ranks(folder, num_ranks, job):
    """Run a job on so many ranks, in `folder`."""
    (folder / "job.pickle").write_bytes(pickle.dumps(job))
    done = subprocess.run(
        torchrun_in_forks(num_ranks, __file__, str(folder)),
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    fault, outcomes = folder / "fault", folder / "outcomes.pickle"
    after = time.time() - float(fault.read_text()) if fault.is_file() else None
    found = pickle.loads(outcomes.read_bytes()) if outcomes.is_file() else []
    return Ended(done.returncode, done.stderr, found, after)


def torchrun(num_ranks, *command):
    """The command line of torchrun for a script, or for '-m' and a module, with a free port of its
    own.
    """
    return [sys.executable, *_TORCHRUN, f"--nproc-per-node={num_ranks}", *command]


def torchrun_in_forks(num_ranks, *command):
    """The same, where torchrun and its ranks are forks."""
    launcher = [*python("all"), *_TORCHRUN, f"--nproc-per-node={num_ranks}", "--no-python"]
    return [*launcher, *python("all"), *command]


def _outcome(case):
    try:
        with Engine.from_pretrained(case.model, **case.options) as engine:
            return Outcome(engine.run(case.requests), engine.last_run)
    except FlexgenError as error:
        return Outcome(error=error)


def _break(fault, folder):
    """Let this rank fail in the way of `Job.fault`."""
    from flexgen_helm.engine import placing
    from flexgen_helm.scheduling import lanes
    from tests.helpers.layers import replace_layers_for_good

    if fault == "order":
        lanes.divide = lambda requests, count: (
            [[], list(requests)] if count == 2 else [list(requests)]
        )
    elif fault == "memory":
        capacities = placing.tier_capacities

        def once(limits, *rest):
            placing.tier_capacities = capacities
            return capacities(MemoryLimits(gpu=0, cpu=1 << 10, disk=0), *rest)

        placing.tier_capacities = once
    elif fault == "kill":
        count = 0

        def step(compute, *_):
            nonlocal count
            count += 1
            if count == 40:
                (folder / "fault").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            return compute()

        replace_layers_for_good(step)


def _main(rank, folder):
    from flexgen_helm.engine.pipeline import follow, leave_pipeline

    job = pickle.loads((folder / "job.pickle").read_bytes())
    # as if each had a machine of its own
    os.environ["FLEXGEN_HELM_HOME"] = str(folder / f"home{rank.number}")
    if rank.number:
        if job.fault is not None and rank.number == 1:
            _break(job.fault, folder)
        follow(Engine)
    else:
        outcomes = []
        for case in job.cases:
            outcomes.append(_outcome(case))
            (folder / "outcomes.pickle").write_bytes(pickle.dumps(outcomes))
    leave_pipeline()
    if job.fault is None:
        names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
        # One that is left may end the process by an abort while Python ends.
        assert not any("gloo" in name for name in names), (
            f"threads of the connections are left: {names}"
        )


if __name__ == "__main__":
    # what is pickled must not belong to `__main__`
    from tests.helpers.pipeline_ranks import _main as main

    process = rank_of_process()
    assert process is not None
    main(process, Path(sys.argv[1]))
