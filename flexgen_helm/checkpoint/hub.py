"""Snapshots of the Hugging Face hub: a revision becomes a commit once, files are those of that
commit. No torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from flexgen_helm.checkpoint.fingerprint import check_blobs
from flexgen_helm.checkpoint.folder import (
    CONFIG,
    PICKLE_INDEX,
    SMALL_FILES,
    deciding_files,
    pickle_names,
    pickled_weights_error,
    read_config,
    read_index,
    read_json,
    require_space,
    weight_files,
)
from flexgen_helm.checkpoint.manifest import hub_conversion, is_conversion
from flexgen_helm.concurrency import import_lock
from flexgen_helm.errors import CheckpointError, UsageError
from flexgen_helm.paths import read_state, update_state
from flexgen_helm.progress import ProgressPhase, is_observed, watched

_REVISIONS = "revisions.json"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SAFETENSORS = ["*.safetensors", "*.safetensors.index.json", *SMALL_FILES]
# Subfolders and `consolidated*` repeat the weights in the makers' own formats.
_REPEATED = ["*/*", "consolidated*"]


@dataclass(frozen=True)
class _Revision:
    """A revision of a repository, resolved as far as possible.

    commit: what the hub answered, or what was remembered of it; else the revision itself.
    files: name -> bytes (None if the hub does not tell) of the top-level files; none of a local
        revision.
    why_local: why the hub did not answer, so that the cache alone is used; "" if it did.
    """

    repo: str
    revision: str | None
    commit: str | None
    files: Mapping[str, int | None] = field(default_factory=dict)
    why_local: str = ""

    def __str__(self) -> str:
        return _title(self.repo, self.revision)


def fetch_snapshot(repo: str, revision: str | None) -> Path:
    """Return the folder, named by its commit, of a snapshot with safetensors, or of the conversion
    of one without.

    Raises `CheckpointError` if it cannot be obtained, is incomplete, or a file differs from the
    hub's hash of it.
    """
    if revision and is_conversion(hub_conversion(repo, revision)):
        return hub_conversion(repo, revision)
    with _hub_errors(repo, revision):
        resolved = _resolve(
            repo, revision, _SAFETENSORS, lambda folder: _require_complete(folder, repo)
        )
        if resolved.commit and is_conversion(conversion := hub_conversion(repo, resolved.commit)):
            _remember_commit(repo, revision, resolved.commit)
            return conversion
        if not resolved.why_local:
            if not any(name.endswith(".safetensors") for name in resolved.files):
                if pickle_names(resolved.files):
                    raise pickled_weights_error(repo, repo.replace("/", "--"))
                raise CheckpointError(f"{repo} has no safetensors weights")
            # refuses what cannot be read before the weights come
            read_config(_download(resolved, SMALL_FILES))
        folder = _download(resolved, _SAFETENSORS)
    _require_complete(folder, str(resolved))
    check_blobs(deciding_files(folder, weight_files(folder)))
    _remember_commit(repo, revision, folder.name)
    return folder


def cached_snapshot(repo: str, revision: str | None) -> Path | None:
    """Return a folder with the repository's weights, of the revision if one is given: a conversion,
    or in the cache.

    Never asks the network. A snapshot of the cache counts if no weight file is missing.
    """
    # without the rest of the package, which takes longer
    from huggingface_hub.constants import HF_HUB_CACHE

    cached = Path(HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    commit = _remembered_commit(repo, revision)
    if commit is None:  # a download by others notes what a branch or tag means
        with suppress(OSError, ValueError):
            named_commit = (
                (cached / "refs" / (revision or "main")).read_text(encoding="ascii").strip()
            )
            commit = named_commit if _COMMIT.fullmatch(named_commit) else None
    commit = commit or revision or "*"
    conversions = hub_conversion(repo, "any").parent.glob(commit)
    snapshots = (cached / "snapshots").glob(commit)
    if (conversion := next(filter(is_conversion, conversions), None)) is not None:
        return conversion
    for folder in snapshots:
        with suppress(CheckpointError):
            _require_complete(folder, repo)
            return folder
    return None


def fetch_pickles(repo: str, revision: str | None, output_disk: Path) -> tuple[Path, list[Path]]:
    """Return the folder of a snapshot without safetensors, named by its commit, and its pickled
    files, all unopened.

    output_disk: a folder on the disk of the conversion. If it is the hub cache's disk, both must
        fit.
    Raises `UsageError` if there is nothing to convert, `CheckpointError` if a file is missing,
    damaged or too large.
    """
    with _hub_errors(repo, revision):
        resolved = _resolve(repo, revision, SMALL_FILES, lambda folder: pickled_files(folder, repo))
        names = list(resolved.files)
        if resolved.why_local:
            # all other cached files are in the same folder
            folder = _download(resolved, SMALL_FILES)
            names = [file.name for file in folder.iterdir()]
        if any(name.endswith(".safetensors") for name in names):
            raise UsageError(f"{resolved} has safetensors weights; nothing needs converting")
        if not resolved.why_local:
            folder = _download_pickles(resolved, output_disk)
    files = pickled_files(folder, str(resolved))
    check_blobs(deciding_files(folder, files))
    _remember_commit(repo, revision, folder.name)
    return folder, files


def _download_pickles(resolved: _Revision, output_disk: Path) -> Path:
    """Download a snapshot's pickled files, if there is room for them and what they become; return
    its folder.
    """
    folder = _download(resolved, [*SMALL_FILES, PICKLE_INDEX])
    read_config(folder)  # refuses an unsupported architecture before gigabytes are downloaded
    names = pickle_names(resolved.files)
    if names == [PICKLE_INDEX]:
        names = sorted(set(read_index(folder / PICKLE_INDEX, must_exist=False).values()))
    if len(names) != 1 and not (folder / PICKLE_INDEX).is_file():
        return folder  # none, or several in no order: `pickled_files` refuses them
    sizes = {name: resolved.files.get(name) or 0 for name in names}
    needed = sum(size for name, size in sizes.items() if not (folder / name).is_file())
    what = str(resolved)
    if os.stat(folder).st_dev == os.stat(output_disk).st_dev:
        needed += sum(sizes.values())
        what += " and its conversion"
    require_space(folder, needed, f"{what} take", "name another disk in HF_HOME or --out")
    return _download(resolved, [*SMALL_FILES, PICKLE_INDEX, *names])


def pickled_files(folder: Path, title: str) -> list[Path]:
    """Return a folder's pickled weight files; `CheckpointError` if one is missing or it is unclear
    which they are.
    """
    read_json(folder / CONFIG)
    names = pickle_names([file.name for file in folder.iterdir()])
    if names == [PICKLE_INDEX]:
        return [folder / name for name in sorted(set(read_index(folder / PICKLE_INDEX).values()))]
    if len(names) != 1:
        listed = (
            f"{len(names)} pickled files ({', '.join(names)})" if names else "no pickled weights"
        )
        raise CheckpointError(
            f"{title} has {listed}; convert needs one, or {PICKLE_INDEX} that orders several"
        )
    return [folder / names[0]]


# ---- revisions ----


def _resolve(
    repo: str, revision: str | None, patterns: Sequence[str], check: Callable[[Path], object]
) -> _Revision:
    """Resolve a revision to a commit. The hub may be unreachable.

    It is not asked about a commit whose cached snapshot passes `check`, which raises
    `CheckpointError` otherwise.
    """
    if revision and _COMMIT.fullmatch(revision):
        cached = _Revision(repo, revision, revision, why_local="the hub was not asked")
        with suppress(CheckpointError):
            check(_download(cached, patterns))
            return cached
    hub = _import_hub()
    errors = hub.errors
    try:
        info = hub.HfApi().model_info(repo, revision=revision, files_metadata=True)
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError):
        raise
    # offline, no network, a hub that is down: each has a class of its own
    except Exception as error:
        commit = _remembered_commit(repo, revision) or revision
        return _Revision(
            repo,
            revision,
            commit,
            why_local=(f"the hub cannot be reached ({type(error).__name__})"),
        )
    files = {
        file.rfilename: getattr(file, "size", None)
        for file in info.siblings or ()
        if "/" not in file.rfilename
    }
    return _Revision(repo, revision, info.sha, files)


def _download(resolved: _Revision, patterns: Sequence[str]) -> Path:
    """Return the snapshot's folder with the files that match, from the cache alone if the hub did
    not answer.
    """
    hub = _import_hub()
    try:
        with _progress_of(resolved, patterns):
            folder = hub.snapshot_download(
                resolved.repo,
                revision=resolved.commit,
                allow_patterns=list(patterns),
                ignore_patterns=_REPEATED,
                local_files_only=bool(resolved.why_local),
            )
    except hub.errors.LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{resolved} is not (completely) in the local cache and "
            f"{resolved.why_local or 'it could not be downloaded'}; connect once and run "
            f"`flexgen-helm fetch {resolved.repo.replace('/', '--')}`, or name a local folder"
        ) from error
    return Path(folder)


@contextmanager
def _progress_of(resolved: _Revision, patterns: Sequence[str]) -> Iterator[None]:
    """Report how many bytes of a download are here; nothing if the hub did not answer. The bars of
    `huggingface_hub` are hidden.
    """
    from huggingface_hub import constants, utils
    from huggingface_hub.file_download import repo_folder_name

    if resolved.why_local:
        yield
        return
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(
        repo_id=resolved.repo, repo_type="model"
    )
    names = utils.filter_repo_objects(
        resolved.files, allow_patterns=list(patterns), ignore_patterns=_REPEATED
    )
    total = sum(resolved.files[name] or 0 for name in names)
    if is_observed():
        utils.disable_progress_bars()
    with watched(
        ProgressPhase("fetch", f"{resolved} at commit {(resolved.commit or '')[:12]}", total=total),
        folder,
    ):
        yield


def _remembered_commit(repo: str, revision: str | None) -> str | None:
    """Return the commit of a branch or tag when it was fetched last."""
    commit = read_state(_REVISIONS).get(f"{repo}@{revision or 'main'}")
    return commit if isinstance(commit, str) and _COMMIT.fullmatch(commit) else None


def _remember_commit(repo: str, revision: str | None, commit: str) -> None:
    # The hub's own cache notes a branch only for downloads by its name, and we download by commit.
    if commit not in (revision, _remembered_commit(repo, revision)) and _COMMIT.fullmatch(commit):
        update_state(
            _REVISIONS, lambda commits: commits.update({f"{repo}@{revision or 'main'}": commit})
        )


def _import_hub() -> ModuleType:
    """Import `huggingface_hub` at first use: it takes a third of a second, and makes its names on
    demand.
    """
    with import_lock("huggingface_hub"):
        import huggingface_hub
        from huggingface_hub import HfApi, errors, snapshot_download  # noqa: F401
    return huggingface_hub


@contextmanager
def _hub_errors(repo: str, revision: str | None) -> Iterator[None]:
    """Turn the hub's errors into sentences that say what to do."""
    errors, title = _import_hub().errors, _title(repo, revision)
    try:
        yield
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{title} is gated: accept its license on the hub, then set HF_TOKEN or run `hf auth "
            "login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"the hub has no revision {revision} of {repo}") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"the hub has no model {repo}, or it is private and HF_TOKEN is not set"
        ) from error
    except errors.HFValidationError as error:
        raise CheckpointError(f"{repo} is not a valid name of a hub repository: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{title} cannot be downloaded: {error}") from error


def _title(repo: str, revision: str | None) -> str:
    return f"{repo} at {revision}" if revision else repo


# ---- completeness ----


def _require_complete(folder: Path, title: str) -> None:
    try:
        read_json(folder / CONFIG)
        weight_files(folder)
    except CheckpointError as error:
        raise CheckpointError(
            f"the snapshot of {title} in the local cache is incomplete: {error}"
        ) from error
