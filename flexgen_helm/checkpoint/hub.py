"""Snapshots of the Hugging Face hub: a revision becomes a commit once, files are those of that commit. No torch."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from flexgen_helm.checkpoint.folder import (
    CONFIG,
    PICKLE_INDEX,
    TOKENIZER_FILES,
    indexed,
    pickle_names,
    read_config,
    read_json,
    require_inside,
    weight_files,
)
from flexgen_helm.checkpoint.manifest import check_blobs, hub_conversion, is_conversion, snapshot_files
from flexgen_helm.checkpoint.paths import state_dir
from flexgen_helm.errors import CheckpointError, UsageError
from flexgen_helm.files import replace_text

Progress = Callable[[str], None]

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SMALL = [CONFIG, "generation_config.json", *TOKENIZER_FILES]
_WANTED = ["*.safetensors", "*.safetensors.index.json", *_SMALL]
# Subfolders and `consolidated*` repeat the weights in the makers' own formats.
_UNWANTED = ["*/*", "consolidated*"]


@dataclass(frozen=True)
class _Pinned:
    """A revision of a repository as far as it is known.

    commits: what to look for in the cache, best first; exactly one where the hub answered. files: sizes in bytes (None
    where the hub does not tell) of the top-level files, None where the hub was not asked. reason: why it was not.
    """

    repo: str
    revision: str | None
    commits: tuple[str | None, ...]
    files: dict[str, int | None] | None
    reason: str = ""

    @property
    def at(self) -> str:
        return f"{self.repo} at {self.revision}" if self.revision else self.repo

    @property
    def name(self) -> str:
        return self.repo.replace("/", "--")


def fetch_snapshot(repo: str, revision: str | None, tell: Progress) -> Path:
    """The folder, named by its commit, of a snapshot with safetensors, or of the conversion of one without.

    Raises `CheckpointError` where it cannot be obtained, is incomplete, or a file differs from the hub's hash of it.
    """
    with _hub_errors(repo, revision):
        pinned = _pin(repo, revision, _has_weights)
        if (converted := _converted(pinned)) is not None:
            _remember(repo, revision, converted.name)
            return converted
        if pinned.files is not None:
            _refuse_pickles(pinned)
            tell(f"fetching {repo} at commit {pinned.commits[0]}")
        folder = _download(pinned, _WANTED)
    _require_complete(folder, pinned.at)
    check_blobs(snapshot_files(folder, weight_files(folder)), tell)
    _remember(repo, revision, folder.name)
    return folder


def fetch_pickles(repo: str, revision: str | None, beside: Path, tell: Progress) -> tuple[Path, list[Path]]:
    """The folder of a snapshot without safetensors, named by its commit, and its pickled files; none is opened.

    beside: where the conversion will be written, whose disk must hold it too. Raises `UsageError` where there is
    nothing to convert, `CheckpointError` where something is missing, damaged or too large.
    """
    with _hub_errors(repo, revision):
        pinned = _pin(repo, revision, _has_pickles)
        if pinned.files is None:
            folder = _download(pinned, _SMALL)  # whatever else has come is in the same folder
            if any(folder.glob("*.safetensors")):
                raise UsageError(f"{pinned.at} has safetensors weights; nothing needs converting")
            names = pickle_names([file.name for file in folder.iterdir()])
        else:
            if any(name.endswith(".safetensors") for name in pinned.files):
                raise UsageError(f"{pinned.at} has safetensors weights; nothing needs converting")
            names = pickle_names(pinned.files)
            tell(f"fetching {repo} at commit {pinned.commits[0]}")
            folder = _download(pinned, [*_SMALL, PICKLE_INDEX])
            read_config(folder)  # an architecture that is not served is refused before gigabytes come
            if names == [PICKLE_INDEX]:
                names = _shards_named(folder / PICKLE_INDEX)
            if len(names) == 1 or (folder / PICKLE_INDEX).is_file():
                _require_space(pinned, folder, names, beside)
                folder = _download(pinned, [*_SMALL, PICKLE_INDEX, *names])
    files = pickled_files(folder, pinned.at)
    check_blobs([*snapshot_files(folder, ()), *files], tell)
    _remember(repo, revision, folder.name)
    return folder, files


def pickled_files(folder: Path, what: str) -> list[Path]:
    """The pickled weight files of a folder, all there; `CheckpointError` where it is not clear which they are."""
    read_json(folder / CONFIG)
    names = pickle_names([file.name for file in folder.iterdir()])
    if names == [PICKLE_INDEX]:
        return [folder / name for name in sorted(set(indexed(folder / PICKLE_INDEX).values()))]
    if len(names) != 1:
        found = f"{len(names)} pickled files ({', '.join(names)})" if names else "no pickled weights"
        raise CheckpointError(f"{what} has {found}; convert needs one, or {PICKLE_INDEX} that orders several")
    return [folder / names[0]]


# --- revisions ----------------------------------------------------------------------------------------------------


def _pin(repo: str, revision: str | None, have: Callable[[str, str], bool]) -> _Pinned:
    """Resolve a revision; the hub is not asked about a commit that is here, and need not answer about others."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if revision and _COMMIT.fullmatch(revision) and have(repo, revision):
        return _Pinned(repo, revision, (revision,), None, "the hub was not asked")
    try:
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
    except (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError, HFValidationError):
        raise
    except Exception as error:  # Offline, no network, a hub that is down: each its own class.
        known = _remembered(repo, revision)
        commits = (revision,) if known is None else (known, revision)
        return _Pinned(repo, revision, commits, None, f"the hub cannot be reached ({type(error).__name__})")
    files = {file.rfilename: getattr(file, "size", None) for file in info.siblings or ()}
    return _Pinned(repo, revision, (info.sha,), {name: size for name, size in files.items() if "/" not in name})


def _download(pinned: _Pinned, patterns: Sequence[str]) -> Path:
    """The snapshot's folder with the files that match, from the cache alone where the hub was not asked."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    for commit in pinned.commits:
        try:
            return Path(
                snapshot_download(
                    pinned.repo,
                    revision=commit,
                    allow_patterns=list(patterns),
                    ignore_patterns=_UNWANTED,
                    local_files_only=pinned.files is None,
                )
            )
        except LocalEntryNotFoundError as error:
            missing = error
    raise CheckpointError(
        f"{pinned.at} is not (completely) in the local cache and {pinned.reason or 'it could not be downloaded'}; "
        f"connect once and run `flexgen-helm fetch {pinned.name}`, or name a local folder"
    ) from missing


def _revisions() -> dict[str, str]:
    try:
        content = json.loads((state_dir() / "revisions.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _remembered(repo: str, revision: str | None) -> str | None:
    """The commit that a branch or tag was when it was fetched last."""
    commit = _revisions().get(f"{repo}@{revision or 'main'}")
    return commit if isinstance(commit, str) and _COMMIT.fullmatch(commit) else None


def _remember(repo: str, revision: str | None, commit: str) -> None:
    # The hub's own cache notes a branch only for whoever downloads by its name, and we download by commit.
    if commit in (revision, _remembered(repo, revision)) or not _COMMIT.fullmatch(commit):
        return
    try:
        state_dir().mkdir(parents=True, exist_ok=True)
        with FileLock(state_dir() / "revisions.json.lock"):
            known = {**_revisions(), f"{repo}@{revision or 'main'}": commit}
            replace_text(state_dir() / "revisions.json", json.dumps(known, indent=1, sort_keys=True))
    except OSError:
        pass  # offline, the hub's own cache may still know


@contextmanager
def _hub_errors(repo: str, revision: str | None) -> Iterator[None]:
    """The hub's errors as sentences that say what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f"{repo} at {revision}" if revision else repo
    try:
        yield
    except GatedRepoError as error:
        raise CheckpointError(
            f"{at} is gated: accept its licence on the hub, then set HF_TOKEN or run `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"the hub has no revision {revision} of {repo}") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(f"the hub has no model {repo}, or it is private and HF_TOKEN is not set") from error
    except HFValidationError as error:
        raise CheckpointError(f"{repo} is no valid name of a hub repository: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{at} cannot be downloaded: {error}") from error


# --- completeness -------------------------------------------------------------------------------------------------


def _converted(pinned: _Pinned) -> Path | None:
    """The conversion at the pinned commit."""
    found = (hub_conversion(pinned.repo, commit) for commit in pinned.commits if commit)
    return next((folder for folder in found if is_conversion(folder)), None)


def _has_weights(repo: str, commit: str) -> bool:
    """Whether this very commit is here, converted or in the hub's cache, so that nothing need be asked of the hub."""
    if is_conversion(hub_conversion(repo, commit)):
        return True
    return _is_here(repo, commit, _WANTED, lambda folder: _require_complete(folder, repo))


def _has_pickles(repo: str, commit: str) -> bool:
    return _is_here(repo, commit, _SMALL, lambda folder: pickled_files(folder, repo))


def _is_here(repo: str, commit: str, patterns: list[str], require: Callable[[Path], object]) -> bool:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            repo, revision=commit, allow_patterns=patterns, ignore_patterns=_UNWANTED, local_files_only=True
        )
        require(Path(folder))
    except (LocalEntryNotFoundError, CheckpointError):
        return False
    return True


def _require_complete(folder: Path, what: str) -> None:
    try:
        read_json(folder / CONFIG)
        weight_files(folder)
    except CheckpointError as error:
        raise CheckpointError(f"the snapshot of {what} in the local cache is incomplete: {error}") from error


def _refuse_pickles(pinned: _Pinned) -> None:
    assert pinned.files is not None
    if any(name.endswith(".safetensors") for name in pinned.files):
        return
    if pickle_names(pinned.files):
        raise CheckpointError(
            f"{pinned.repo} has only pickled weights (.bin), which are not loaded because they can run code; "
            f"`flexgen-helm convert {pinned.name}` turns them into safetensors"
        )
    raise CheckpointError(f"{pinned.repo} has no safetensors weights")


def _shards_named(index: Path) -> list[str]:
    """The files that an index names, which need not be there yet."""
    shards = read_json(index).get("weight_map")
    names = sorted({str(name) for name in shards.values()}) if isinstance(shards, dict) else []
    if not names:
        raise CheckpointError(f"{index} has no weight_map from tensor names to files")
    for name in names:
        require_inside(index, name)
    return names


def _require_space(pinned: _Pinned, folder: Path, names: Iterable[str], beside: Path) -> None:
    assert pinned.files is not None
    sizes = {name: pinned.files.get(name) or 0 for name in names}
    missing = sum(size for name, size in sizes.items() if not (folder / name).is_file())
    same_disk = os.stat(folder).st_dev == os.stat(beside).st_dev
    needed = missing + (sum(sizes.values()) if same_disk else 0)
    free = shutil.disk_usage(folder).free
    if needed > free:
        both = " and its conversion" if same_disk else ""
        raise CheckpointError(
            f"{pinned.at}{both} take {needed:,} bytes and {free:,} are free in {folder}: {needed - free:,} bytes are "
            "missing; make room, or name another disk in HF_HOME or --out"
        )
