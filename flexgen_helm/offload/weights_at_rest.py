"""What the disk of an offload directory has of a checkpoint before its weights are loaded: matrices
that are read where the checkpoint's files have them, and those that weight files hold already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from flexgen_helm.checkpoint.checkpoint import Checkpoint
from flexgen_helm.checkpoint.local_files import local_weights
from flexgen_helm.checkpoint.names import ResolvedModel
from flexgen_helm.checkpoint.open import open_checkpoint
from flexgen_helm.checkpoint.published_blocks import StoredRows
from flexgen_helm.config import EngineConfig
from flexgen_helm.files import existing_folder
from flexgen_helm.offload.offload_directory import written_bytes
from flexgen_helm.planner.storage_sizes import StorageSizes
from flexgen_helm.quant.block_formats import LAYOUT_VERSION
from flexgen_helm.quant.formats import GroupFormat, StoredFormat
from flexgen_helm.quant.precisions import Precision


def bytes_at_rest(
    model: ResolvedModel, precision: Precision, folder: Path, config: EngineConfig
) -> int:
    """Return the bytes of a model's matrices that need no more room below `folder`; 0 before the
    model is fetched.

    config: of the engine; without a limit for the disk, files that hold weights already count too.

    Raises `CheckpointError` for weights that cannot be used.
    """
    if config.weights == "pretrained" and local_weights(model) is None:
        return 0
    checkpoint = open_checkpoint(model, weights=config.weights, seed=config.seed)
    precision = replace(precision, published=checkpoint.published_formats)
    sizes = StorageSizes(checkpoint.config, precision).matrices
    at_rest = WeightsAtRest(checkpoint, precision, folder)
    return at_rest.num_bytes(sizes, with_written=config.limits.disk is None)


class WeightsAtRest:
    """What the disk of an offload directory has of a checkpoint's matrices before they are
    loaded.
    """

    def __init__(self, checkpoint: Checkpoint, precision: Precision, folder: Path) -> None:
        self._checkpoint, self._precision, self._folder = checkpoint, precision, folder
        self._shares_disk: dict[Path, bool] = {}  # by file of the checkpoint

    def rows_of(self, name: str) -> Sequence[StoredRows]:
        """Return the places of the checkpoint's files from which a matrix is read in its storage
        format; empty where it needs a weight file, as where those files are on another disk.
        """
        if len(self._checkpoint.shapes[name]) != 2 or isinstance(
            self._precision.format_of(name), GroupFormat
        ):
            return ()
        rows = self._checkpoint.stored_rows(name)
        files = {plane.file.path for part in rows for plane in part.planes}
        return rows if all(map(self._is_on_our_disk, files)) else ()

    def _is_on_our_disk(self, path: Path) -> bool:
        if path not in self._shares_disk:
            self._shares_disk[path] = (
                path.stat().st_dev == existing_folder(self._folder).stat().st_dev
            )
        return self._shares_disk[path]

    def label(self, fmt: StoredFormat | None) -> str:
        """Return what tells the weight files of a format from others of the checkpoint."""
        if isinstance(fmt, GroupFormat):
            return self._precision.weights_label
        return (
            f"published-{LAYOUT_VERSION}"
            if fmt
            else str(self._checkpoint.storage_dtype).removeprefix("torch.")
        )

    def num_bytes(self, sizes: Mapping[str, int], with_written: bool) -> int:
        """Return the bytes of matrices that need no more room, because the checkpoint's files or
        weight files have them.

        sizes: bytes of each matrix, by name.
        with_written: weight files count, too; not where a limit of the directory is to hold for
            them.
        """
        in_place = sum(size for name, size in sizes.items() if self.rows_of(name))
        if not with_written:
            return in_place
        labels = {self.label(self._precision.format_of(name)) for name in sizes}
        written = sum(
            written_bytes(self._folder, self._checkpoint.fingerprint, label) for label in labels
        )
        return in_place + min(written, sum(sizes.values()) - in_place)
