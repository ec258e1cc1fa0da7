"""Bundles of answers for others to check: a manifest and lines of JSON in one Zstandard frame."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from flexgen_helm.errors import FlexgenError, RequestError
from flexgen_helm.report.verification import Source, drawn_numbers, one_line, short
from flexgen_helm.request import GenerationRequest
from flexgen_helm.response_cache import decode_result
from flexgen_helm.units import size

# Bytes before compression: no file makes a reader decompress more.
_MAX_BYTES = 1 << 28


@dataclass(frozen=True)
class BundledAnswer:
    """The requests of an answer in token ids, and their results (`verification.plain_result`).

    source: index of the run in `SampleManifest.sources`.
    number: among all answers of the suite or file.
    """

    source: int
    number: int
    name: str
    requests: Sequence[GenerationRequest]
    results: Sequence[Any]


@dataclass(frozen=True)
class SampleManifest:
    """What a sample was drawn from.

    suite: its name, or that of a file.
    population: number of its answers.
    """

    suite: str
    population: int
    seed: int
    sources: list[Source]
    format: Literal[2] = 2


def packed_bundle(manifest: SampleManifest, drawn: Sequence[BundledAnswer]) -> bytes:
    """Return the content of a bundle. Raises `FlexgenError` for one that would be too large to
    read.
    """
    import zstandard

    lines = (json.dumps(record, default=vars, allow_nan=False) for record in (manifest, *drawn))
    content = "\n".join(lines).encode()
    if len(content) > _MAX_BYTES:
        raise FlexgenError(
            f"the bundle would have {size(len(content))}, and may have {size(_MAX_BYTES)} at most"
        )
    return zstandard.ZstdCompressor(write_checksum=True).compress(content)


def read_bundle(path: Path) -> tuple[SampleManifest, list[BundledAnswer]]:
    """Return the manifest and the answers of a bundle. Raises `FlexgenError` for what
    `packed_bundle` does not make.

    Nothing is written to the disk, and no more is decompressed than a bundle may have.
    """
    import zstandard

    packed = path.read_bytes()
    try:
        if not 0 < zstandard.frame_content_size(packed) <= _MAX_BYTES:
            raise ValueError(f"it says nothing of its size, or has more than {size(_MAX_BYTES)}")
        frame = zstandard.ZstdDecompressor().decompressobj()
        # The first refuses a frame that has more or less than it says, the second tells what lies
        # behind it.
        content, _ = zstandard.ZstdDecompressor().decompress(packed), frame.decompress(packed)
        if frame.unused_data:
            raise ValueError(f"{len(frame.unused_data):,} bytes lie behind its end")
        first, *lines = content.split(b"\n")
        manifest = TypeAdapter(SampleManifest).validate_json(first, strict=True)
        drawn = [TypeAdapter(BundledAnswer).validate_json(line, strict=True) for line in lines]
        for answer in drawn:
            for request in answer.requests:
                request.validate()
            for result in answer.results:
                decode_result(json.dumps(result))
            is_known = 0 <= answer.source < len(manifest.sources)
            if not is_known or not 0 < len(answer.requests) == len(answer.results):
                raise ValueError(f"{answer.name[:60]!r} contradicts itself or the first line")
        if not manifest.suite.isprintable():
            raise ValueError(f"no suite is named {short(manifest.suite)}")
        if [answer.number for answer in drawn] != drawn_numbers(
            manifest.seed, manifest.population, len(drawn)
        ):
            raise ValueError(
                f"its {len(drawn):,} answers are not those that seed {manifest.seed} draws of "
                f"{manifest.population:,}"
            )
        return manifest, drawn
    except (ValueError, OverflowError, RequestError, zstandard.ZstdError) as error:
        # other files of answers, which the user may have meant
        hint = (
            "; answers of flexgen-helm batch need --requests, and of lm-eval the file is "
            "results_….json"
        )
        hint = "" if packed.startswith(zstandard.FRAME_HEADER) else hint
        raise FlexgenError(
            f"{path} is no bundle as verify writes it: {one_line(error)}{hint}"
        ) from None
