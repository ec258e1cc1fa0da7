"""Matrices for which the disk of an offload directory has room already: no copy of them is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flexgen_helm.checkpoint.checkpoint import Checkpoint
from flexgen_helm.checkpoint.fetch import local_weights
from flexgen_helm.checkpoint.names import ResolvedModel
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.checkpoint.stored_tensors import StoredRange
from flexgen_helm.config import WeightSource
from flexgen_helm.files import existing_folder
from flexgen_helm.offload.disk import written_bytes
from flexgen_helm.planner.placement import StorageSizes
from flexgen_helm.quant.precisions import Precision


def bytes_at_rest(
    model: ResolvedModel, precision: Precision, folder: Path, with_written: bool, weights: WeightSource, seed: int
) -> int:
    """Return the bytes of a model's matrices that need no more room below `folder`; 0 before the model is fetched.

    with_written: see `WeightsAtRest.num_bytes`.
    weights, seed: see `open_checkpoint`.

    Raises `CheckpointError` for weights that cannot be used.
    """
    if weights == "pretrained" and local_weights(model) is None:
        return 0
    checkpoint = open_checkpoint(model, weights=weights, seed=seed)
    sizes = StorageSizes(checkpoint.config, precision).matrices
    return WeightsAtRest(checkpoint, precision, folder).num_bytes(sizes, with_written)


class WeightsAtRest:
    """What the disk of an offload directory has of a checkpoint's matrices before they are loaded."""

    def __init__(self, checkpoint: Checkpoint, precision: Precision, folder: Path) -> None:
        self._checkpoint, self._precision, self._folder = checkpoint, precision, folder
        self._shares_disk: dict[Path, bool] = {}  # by file of the checkpoint

    def range_of(self, name: str) -> StoredRange | None:
        """Return where the checkpoint has a matrix as it is read, if that file is on the directory's disk."""
        is_matrix = len(self._checkpoint.shapes[name]) == 2 and self._precision.format_of(name) is None
        stored = self._checkpoint.stored_range(name) if is_matrix else None
        if stored is None:
            return None
        path = stored.file.path
        if path not in self._shares_disk:
            self._shares_disk[path] = path.stat().st_dev == existing_folder(self._folder).stat().st_dev
        return stored if self._shares_disk[path] else None

    def label(self, is_packed: bool) -> str:
        """Return what tells the weight files of a precision from others of the checkpoint."""
        dtype = str(self._checkpoint.storage_dtype).removeprefix("torch.")
        return self._precision.weights_label if is_packed else dtype

    def num_bytes(self, sizes: Mapping[str, int], with_written: bool) -> int:
        """Return the bytes of matrices that need no more room: where the checkpoint has them, or a weight file does.

        sizes: of the matrices, by name.
        with_written: weight files count, too; not where a limit of the directory is to hold for them.
        """
        in_place = sum(size for name, size in sizes.items() if self.range_of(name) is not None)
        if not with_written:
            return in_place
        labels = {self.label(is_packed) for is_packed in (True, False)}
        written = sum(written_bytes(self._folder, self._checkpoint.fingerprint, label) for label in labels)
        return in_place + min(written, sum(sizes.values()) - in_place)
