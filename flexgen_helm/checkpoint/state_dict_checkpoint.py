"""A folder of safetensors files for modules of `transformers`: where the entries of their state
dict are stored, and how they are read.

Published checkpoints name and arrange weights as their makers did. `transformers` describes for
each of its models how these become its own state dict: names are replaced, and tensors merged,
split, or transposed (`conversion_mapping.py`).
The same descriptions are applied here, to one entry at a time, and to one expert at a time where an
entry stacks all.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from flexgen_helm.checkpoint.checkpoint import StoredMatrix
from flexgen_helm.checkpoint.folder import FolderConfig, read_config
from flexgen_helm.checkpoint.logical_tensor import (
    FLOAT_TYPES,
    TORCH_TYPES,
    LogicalTensor,
)
from flexgen_helm.checkpoint.matching import missing_tensor_error
from flexgen_helm.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from flexgen_helm.checkpoint.unread_tensors import check_unread
from flexgen_helm.errors import CheckpointError
from flexgen_helm.models.architectures import architecture_by_modules
from flexgen_helm.models.architectures.base import Architecture
from flexgen_helm.models.transformers_backend.code_digest import loading_digest
from flexgen_helm.models.transformers_backend.config import TransformersConfig
from flexgen_helm.models.transformers_backend.empty_model import empty_model

# The part of a stored name that a language model has where it is one of several parts.
_LANGUAGE_MODEL = re.compile(r"^(model\.)?(language_model|text_model)\.")


# Operations that stack a tensor of each expert, and that put an expert's tensors one below the
# other before.
_STACKED = [("MergeModulelist", 0)]
_JOINED = [("MergeModulelist", 0), ("Concatenate", 1)]

# Returns the values of a stored tensor, or of the part of one expert: [1, ...].
_ReadPart = Callable[[LogicalTensor, int | None], torch.Tensor]


@dataclass
class _Conversion:
    """How stored tensors become one or several entries.

    key: the first of these entries.
    converter: of transformers; None if the only stored tensor is the entry.
    sources: pattern of the converter -> stored tensors in the order of their numbers.
    """

    key: str
    converter: WeightConverter | None
    sources: dict[str, list[LogicalTensor]] = field(default_factory=dict)

    @property
    def tensors(self) -> list[LogicalTensor]:
        return [tensor for tensors in self.sources.values() for tensor in tensors]

    @property
    def title(self) -> str:
        """File and tensors, for messages."""
        first, *more = self.tensors
        return first.title + (f" and {len(more)} more" if more else "")

    def entries(
        self, model: Any, read: _ReadPart, expert: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Return key -> entry, or its part `expert` from the sources of this expert alone."""
        values = {}
        for pattern, tensors in self.sources.items():
            if expert is not None and len(tensors) > 1:  # one tensor of each expert
                values[pattern] = [read(tensors[expert], None)]
            else:
                values[pattern] = [read(tensor, expert) for tensor in tensors]
        if self.converter is None:
            ((entry,),) = values.values()
            return {self.key: entry}
        converter: Any = deepcopy(self.converter)
        for pattern, parts in values.items():
            for value in parts:
                converter.add_tensor(self.key, self.key, pattern, value)
        entries = converter.convert(
            self.key, model=_OneExpert(model) if expert is not None else model, config=model.config
        )
        return {
            key: value[0] if isinstance(value, list) else value for key, value in entries.items()
        }


class StateDictReader:
    """The entries of a model's state dict, read from stored tensors.

    shapes: key -> shape of every entry; tied entries have one each.
    """

    def __init__(self, model: Any, tensors: Mapping[str, LogicalTensor], path: Path) -> None:
        """model: a `PreTrainedModel`, on the meta device.

        Raises `CheckpointError` if an entry is missing or has another shape, and what
        `check_unread` does.
        """
        self._model, self._path, self._names = model, path, list(tensors)
        state = model.state_dict()
        conversions, unused = self._match(tensors, state)
        self._conversions: dict[str, _Conversion] = {}
        for conversion in conversions:
            self._conversions |= dict.fromkeys(self._converted_keys(conversion, state), conversion)
        self._stored_key = self._resolve_tied(state)
        ignored = _any_of(model._keys_to_ignore_on_load_unexpected)
        buffers = dict(model.named_buffers())
        irrelevant = {
            name
            for key, name in unused.items()
            if key in buffers or (ignored and ignored.search(key))
        }
        used_names = tensors.keys() - unused.values()
        check_unread((tensors[name] for name in tensors.keys() - irrelevant), used_names, path)
        self.shapes = {key: tuple(state[key].shape) for key in state if key in self._stored_key}
        self._by_expert: dict[str, bool] = {}

    # ---- reading ----

    def tensors(self, key: str) -> list[LogicalTensor]:
        """Return the stored tensors of an entry."""
        return self._conversion(key).tensors

    def has_own_tensor(self, key: str) -> bool:
        """Whether an entry is stored under its own key, not only that of an entry to which it is
        tied.
        """
        return self._stored_key.get(key) == key

    def title(self, key: str) -> str:
        """File and tensors of an entry, for messages."""
        return self._conversion(key).title

    def tiles(self, key: str, expert: int | None = None) -> Iterator[torch.Tensor]:
        """Yield the elements of an entry in order, flat; of its part `expert` if given.

        In tiles where an entry is stored as it is. Otherwise its stored tensors are in memory
        together, those of one expert where each can be converted alone.
        """
        if parts := self.stored_parts(key, expert):
            for stored, rows in parts:
                yield from stored.tiles([rows])
        else:
            part = expert if expert is not None and self._is_converted_by_expert(key) else None
            value = self._conversion(key).entries(self._model, _read_part, part)[
                self._stored_key[key]
            ]
            if expert is not None and part is None:  # all experts were converted together
                value = value[expert]
            yield value.reshape(-1)

    def stored_parts(
        self, key: str, expert: int | None = None
    ) -> list[tuple[LogicalTensor, range]]:
        """Return the rows of stored tensors that, one below the other, are an entry or its part
        `expert`.
        """
        conversion = self._conversion(key)
        if conversion.converter is None:
            (stored,) = conversion.tensors
            return [(stored, _rows_of(stored, expert))]
        joins = [
            (type(operation).__name__, getattr(operation, "dim", None))
            for operation in conversion.converter.operations
        ]
        sources = [
            conversion.sources.get(pattern, []) for pattern in conversion.converter.source_patterns
        ]
        if (
            expert is None
            or joins not in (_STACKED, _JOINED)
            or not all(expert < len(tensors) for tensors in sources)
        ):
            return []
        return [(tensors[expert], range(tensors[expert].num_rows)) for tensors in sources]

    def _conversion(self, key: str) -> _Conversion:
        return self._conversions[self._stored_key[key]]

    def _is_converted_by_expert(self, key: str) -> bool:
        """Whether an expert's sources alone give its part of the entry: no operation then joins
        experts.
        """
        if key not in self._by_expert:
            conversion, (num_experts, *shape) = self._conversion(key), self.shapes[key]
            counts = {
                len(tensors) if len(tensors) > 1 else tensors[0].shape[0]
                for tensors in conversion.sources.values()
            }
            entry = None
            if num_experts > 1 and counts == {num_experts}:
                # an operation that needs all raises whatever its arithmetic leads to
                with suppress(Exception):
                    entry = conversion.entries(self._model, _no_data, 0).get(self._stored_key[key])
            self._by_expert[key] = entry is not None and entry.shape == (1, *shape)
        return self._by_expert[key]

    # ---- matching ----

    def _match(
        self, tensors: Mapping[str, LogicalTensor], state: dict[str, torch.Tensor]
    ) -> tuple[list[_Conversion], dict[str, str]]:
        """Return the conversions, and of the tensors that are no part of any: name as a key of the
        state dict -> stored name.

        The order and the rules are those of `transformers.core_model_loading`.
        """
        transforms = get_model_conversion_mapping(self._model)
        renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        converters = [
            transform for transform in transforms if isinstance(transform, WeightConverter)
        ]
        by_pattern = {
            pattern: converter for converter in converters for pattern in converter.source_patterns
        }
        prefix = self._model.base_model_prefix
        conversions: dict[str, _Conversion] = {}
        unused = {}
        for name in sorted(tensors, key=dot_natural_key):
            key, pattern = rename_source_key(name, renamings, converters, prefix, state)
            # Stored under the key itself, which the renamings, written for older names, would
            # change.
            if key not in state and name in state:
                key, pattern = rename_source_key(name, [], [], prefix, state)
            # A model of several parts, such as text and vision, of which the language model alone
            # is computed here.
            if key not in state and (text_name := _LANGUAGE_MODEL.sub(r"\1", name)) != name:
                key, pattern = rename_source_key(text_name, renamings, converters, prefix, state)
            if key not in state:
                unused[key] = name
                continue
            converter = None if pattern is None else by_pattern[pattern]
            conversion = conversions.setdefault(key, _Conversion(key, converter))
            if conversion.converter is not converter or (converter is None and conversion.sources):
                raise CheckpointError(
                    f"{tensors[name].title} and {conversion.title} are both {key}"
                )
            self._require_type(tensors[name], state[key].dtype)
            conversion.sources.setdefault(pattern or name, []).append(tensors[name])
        return list(conversions.values()), unused

    def _require_type(self, tensor: LogicalTensor, dtype: torch.dtype) -> None:
        types = FLOAT_TYPES if dtype.is_floating_point else TORCH_TYPES
        if tensor.dtype not in types:
            supported = ", ".join(types)
            raise CheckpointError(
                f"{tensor.title} has the type {tensor.dtype}; supported are {supported}"
            )

    def _converted_keys(
        self, conversion: _Conversion, state: Mapping[str, torch.Tensor]
    ) -> list[str]:
        """Return the entries that a conversion gives, with shapes checked: it is applied to tensors
        without data.
        """
        for tensors in conversion.sources.values():
            _require_numbered(tensors)
        try:
            entries = conversion.entries(self._model, _no_data)
        except Exception as error:  # whatever shapes that do not fit lead to
            shapes = ", ".join(str(list(tensor.shape)) for tensor in conversion.tensors[:4])
            raise CheckpointError(
                f"{conversion.title} of {shapes} cannot become {conversion.key}: {error}"
            ) from error
        for key, entry in entries.items():
            if key in state and entry.shape != state[key].shape:
                raise CheckpointError(
                    f"{conversion.title} has the shape {list(entry.shape)} as {key}, but its "
                    f"config.json asks for {list(state[key].shape)}"
                )
        return [key for key in entries if key in state]

    def _resolve_tied(self, state: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Return key -> key under which it is stored: itself, or an entry that it is tied to."""
        source_of = self._model.all_tied_weights_keys  # tied key -> the one it is tied to
        may_lack = _any_of(self._model._keys_to_ignore_on_load_missing)
        stored_keys = {}
        for key in state:
            source = source_of.get(key, key)
            tied_keys = [
                key,
                source,
                *(tied for tied, tied_to in source_of.items() if tied_to == source),
            ]
            stored_key = next((tied for tied in tied_keys if tied in self._conversions), None)
            if stored_key is not None:
                stored_keys[key] = stored_key
            elif may_lack is None or not may_lack.search(key):
                raise missing_tensor_error(self._path, key, self._names)
        return stored_keys


class _OneExpert:
    """What operations ask of a model, for entries that stack experts: shapes, as if there were one
    expert.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def get_parameter(self, key: str) -> torch.Tensor:
        return torch.empty((1, *self._model.get_parameter(key).shape[1:]), device="meta")


def _read_part(tensor: LogicalTensor, expert: int | None) -> torch.Tensor:
    return torch.cat(list(tensor.tiles([_rows_of(tensor, expert)]))).view(_shape_of(tensor, expert))


def _no_data(tensor: LogicalTensor, expert: int | None) -> torch.Tensor:
    return torch.empty(_shape_of(tensor, expert), device="meta")


def _shape_of(tensor: LogicalTensor, expert: int | None) -> tuple[int, ...]:
    return tensor.shape if expert is None else (1, *tensor.shape[1:])


def _rows_of(tensor: LogicalTensor, expert: int | None) -> range:
    """Return the rows of a tensor, or of one expert's part of the first dimension."""
    if expert is None:
        return range(tensor.num_rows)
    per_expert = tensor.num_rows // tensor.shape[0]
    return range(expert * per_expert, (expert + 1) * per_expert)


def _require_numbered(tensors: list[LogicalTensor]) -> None:
    """Raise `CheckpointError` if the tensors of a list, such as the experts of a layer, are not
    numbered from 0 on.
    """
    if len(tensors) < 2:
        return
    numbers = [[int(digits) for digits in re.findall(r"\d+", tensor.name)] for tensor in tensors]
    varying = [column for column in zip(*numbers, strict=True) if len(set(column)) > 1]
    if varying != [tuple(range(len(tensors)))]:
        raise CheckpointError(
            f"{tensors[0].title} and {len(tensors) - 1} more are not numbered from 0 on; some lack"
        )


def _any_of(patterns: Any) -> re.Pattern[str] | None:
    return re.compile("|".join(f"({pattern})" for pattern in patterns)) if patterns else None


class StateDictCheckpoint(SafetensorsCheckpoint):
    """Tensors by canonical name, of which each is an entry of the state dict or one expert of
    it.
    """

    def _read_config(self, folder: Path) -> FolderConfig:
        return read_config(folder, architecture_by_modules)

    def _match_tensors(
        self, architecture: Architecture, tensors: Mapping[str, LogicalTensor], path: Path
    ) -> None:
        assert isinstance(self.config, TransformersConfig)
        self._modules = self.config.modules
        self._reader = StateDictReader(empty_model(self._modules.text), tensors, path)
        head, table = self._modules.head_key, self._modules.table_key
        if self._reader.has_own_tensor(head) and self._reader.has_own_tensor(table):
            self._untie_if_different(self._reader.tiles(head), self._reader.tiles(table))
        self._choose_type(
            (self._reader.tensors(key)[0].dtype, shape)
            for key, shape in self._reader.shapes.items()
        )

    @cached_property
    def fingerprint(self) -> str:
        """Of the files, and of how `transformers` makes a state dict of them, by which weight files
        are named.
        """
        return hashlib.sha256(f"{super().fingerprint} {loading_digest()}".encode()).hexdigest()

    def _title(self, name: str) -> str:
        return self._reader.title(self._modules.entry_of(name).key)

    def _read_tiles(self, name: str) -> Iterator[torch.Tensor]:
        entry = self._modules.entry_of(name)
        for tile in self._reader.tiles(entry.key, entry.expert):
            yield tile if tile.is_floating_point() else tile.float()

    def _stored_matrix(self, name: str) -> StoredMatrix:
        entry = self._modules.entry_of(name)
        parts = self._reader.stored_parts(entry.key, entry.expert)
        if entry.transposed:  # rows [in, out] of an expert are as many blocks of rows [out, in]
            rows = self.shapes[name][0]
            first = (entry.expert or 0) * rows
            parts = [(stored, range(first, first + rows)) for stored, _ in parts]
        return StoredMatrix(parts, entry.transposed)
