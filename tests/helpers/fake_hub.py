"""A hub with one repository, reached without a network."""

from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
from huggingface_hub import constants

COMMIT, LATER = (
    "0123456789abcdef0123456789abcdef01234567",
    "89abcdef0123456789abcdef0123456789abcdef",
)


class FakeHub:
    """Stands for the hub of `org/repo` until a test ends.

    source: the files of the repository. asked: names of those that were downloaded. Not online, it
    raises as a network does; what the cache has is found by the hub's own look-up.
    """

    def __init__(self, source, cache, monkeypatch, online=True):
        self.source, self.cache, self.online, self.commit, self.asked = (
            source,
            cache,
            online,
            COMMIT,
            [],
        )
        self._look_up = huggingface_hub.snapshot_download
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: self)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self._download)

    @property
    def snapshot(self):
        return self.cache / "models--org--repo" / "snapshots" / self.commit

    def model_info(self, repo, revision=None, **options):
        if not self.online:
            raise ConnectionError
        files = [path for path in self.source.rglob("*") if path.is_file()]
        names = [
            SimpleNamespace(rfilename=str(f.relative_to(self.source)), size=f.stat().st_size)
            for f in files
        ]
        return SimpleNamespace(sha=self.commit, siblings=names)

    def _download(self, repo, revision=None, **options):
        if options.get("local_files_only"):
            return self._look_up(repo, revision=revision, **options)
        assert self.online and revision == self.commit
        self.snapshot.mkdir(parents=True, exist_ok=True)
        for file in self.source.iterdir():
            if any(Path(file.name).match(pattern) for pattern in options["allow_patterns"]):
                self.asked.append(file.name)
                (self.snapshot / file.name).write_bytes(file.read_bytes())
        return str(self.snapshot)
