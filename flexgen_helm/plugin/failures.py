"""Why a run of a suite failed, in a sentence that says what to do."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from helm.benchmark.run_spec import RunSpec
from helm.benchmark.runner import Runner
from helm.common.object_spec import get_class_by_name

from flexgen_helm.errors import FlexgenError
from flexgen_helm.system_errors import explain

# HELM's executor appends it to a message, with the whole prompt
_REQUEST = re.compile(r" Request: \w*Request\(")
# By name: of urllib, requests, httpx and the hub's client, none of which need be installed.
_NETWORK_ERRORS = {
    "URLError",
    "ConnectionError",
    "ConnectError",
    "TimeoutError",
    "gaierror",
    "LocalEntryNotFoundError",
}


def explain_failure(error: Exception, data: Path | None) -> str:
    """Say what went wrong, and what to do where only data is missing that HELM downloads when it
    uses it.

    data: the folder that the scenario's data belongs into; None if the run has its results and a
        metric failed.
    """
    cause = _REQUEST.split(explain(error).strip())[0].partition("\n")[0]
    resource = re.search(r"Resource\s+(?:\x1b\[\d+m)*'?([\w/.-]+)", str(error))
    if isinstance(error, LookupError) and resource:
        needed = "the run needs" if data else "all answers are stored, but a metric needs"
        rest = "runs what is missing" if data else "only computes the metrics"
        return (
            f"{needed} NLTK's '{resource[1]}'. On a machine with network: python -m "
            f"nltk.downloader {resource[1]}; then the same command {rest}."
        )
    if not _is_network_error(error):
        return cause
    if data is None:
        return (
            f"all answers are stored, but a metric could not download what it needs ({cause}); "
            "where there is a network, the same command only computes the metrics."
        )
    folder, source = data, ""
    if wanted := _wanted_file(error):
        address, file = wanted
        source = f" from {address}"
        if not file.is_relative_to(data):  # perturbations have folders of their own
            folder = file.parent
    return (
        f"the scenario's data could not be downloaded{source} ({cause}). Copy it into {folder} "
        "from a machine that has it, or go where there is a network; the same command then runs "
        "what is missing."
    )


def exit_code_of(error: Exception, data: Path | None) -> int:
    """Return the exit code of a run that failed: 2 where it was refused, or its data is missing.

    data: as of `explain_failure`.
    """
    if isinstance(error, FlexgenError):
        return error.exit_code
    return 2 if data is not None and _is_network_error(error) else 1


def explain_entry(error: Exception, run_entry: str) -> str:
    """Say why HELM made no run of an entry; some run specs download a file to be made."""
    cause = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    wanted = _wanted_file(error)
    if wanted is None or not _is_network_error(error):
        return f"HELM makes no run of {run_entry} ({cause})"
    address, file = wanted
    return (
        f"HELM makes no run of {run_entry} without {address}, which could not be downloaded "
        f"({cause}). Copy it to {file} from a machine that has it, leave "
        "the entry out, or go where there is a network."
    )


def _wanted_file(error: BaseException | None) -> tuple[str, Path] | None:
    """Return address and file of what HELM was downloading; None if it was another library's
    download.
    """
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_name == "ensure_file_downloaded":
                return str(frame.f_locals["source_url"]), Path(str(frame.f_locals["target_path"]))
        error = error.__cause__ or error.__context__
    return None


def _is_network_error(error: BaseException | None) -> bool:
    """Whether a connection failed, in the words of whichever library HELM downloads with."""
    if isinstance(error, FlexgenError):
        return False  # says itself what to do
    while error is not None:
        # HELM has some files fetched by a program and keeps only its exit code.
        if re.match(r"Failed with exit code \d+: (wget|gdown)\b", str(error)):
            return True
        if _NETWORK_ERRORS & {base.__name__ for base in type(error).__mro__}:
            return True
        error = error.__cause__ or error.__context__
    return False


def data_folder(runner: Runner, run_spec: RunSpec) -> Path:
    """Return the folder where HELM keeps the data of a run's scenario."""
    try:
        name = str(get_class_by_name(run_spec.scenario_spec.class_name).name)
    except Exception:  # of the class's module: perhaps that is why the run failed
        name = "NAME"
    return Path(runner.output_path) / "scenarios" / name
