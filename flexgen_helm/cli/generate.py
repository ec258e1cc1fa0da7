"""`flexgen-helm generate`: the engine without HELM, one JSON object a line in and out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from flexgen_helm.cli.console import TokenProgress, say
from flexgen_helm.cli.engine_flags import load_engine
from flexgen_helm.config import EngineOptions
from flexgen_helm.errors import RequestError, UsageError
from flexgen_helm.files import replace_text
from flexgen_helm.request import GenerationRequest, GenerationResult


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or isinstance(value, float)


def _is_list_of(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(test, value))


def _is_str(value: Any) -> bool:
    return isinstance(value, str)


# Key of an input line -> what it must be, and the test of it.
_KEYS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "prompt": ("a string", _is_str),
    "prompt_token_ids": ("a list of integers", _is_list_of(_is_int)),
    "max_tokens": ("an integer", _is_int),
    "temperature": ("a number", _is_number),
    "top_p": ("a number", _is_number),
    "seed": ("an integer", _is_int),
    "stop": ("a list of strings", _is_list_of(_is_str)),
    "n": ("an integer", _is_int),
    "ignore_eos": ("true or false", lambda value: isinstance(value, bool)),
    "echo_logprobs": ("true or false", lambda value: isinstance(value, bool)),
}


def generate(
    model: Annotated[str, typer.Argument(help="Catalogue name, org--repo of the hub, folder or .gguf file.")],
    prompts: Annotated[Path, typer.Option(metavar="FILE.jsonl", help="One request a line; - reads stdin.")],
    engine: EngineOptions,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to write; default stdout. FILE.partial keeps lines finished so far."),
    ] = None,
) -> None:
    """Answer the requests of a file, one JSON object a line, in input order.

    A line in: prompt or prompt_token_ids, max_tokens, temperature, top_p, seed, stop, n, echo_logprobs, ignore_eos.
    A line out: completions, prompt_token_ids, prompt_logprobs, error. A bad line fails alone; then the exit code is 1.

    With --out, finished lines are appended to FILE.partial as they come, each with the number of its input line, so
    that an interruption loses nothing computed; FILE itself appears whole at the end, and FILE.partial goes.
    """
    asked = [parse_line(number, line) for number, line in _read_lines(prompts)]
    partial = _Partial(out, [number for number, _ in asked])
    lines: list[dict[str, Any]] = [{}] * len(asked)
    places: list[int] = []
    requests: list[GenerationRequest] = []
    with partial, load_engine(model, engine) as loaded, TokenProgress() as progress:

        def settle(place: int, result: GenerationResult) -> None:
            lines[place] = as_json(result, asked[place][0])
            partial.add(place, lines[place])

        for place, (_, request) in enumerate(asked):
            if isinstance(request, RequestError):
                settle(place, GenerationResult(error=request))
            else:
                places.append(place)
                requests.append(request)
        if requests:
            loaded.run(requests, on_result=lambda index, result: settle(places[index], result), progress=progress)
    text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
    if out is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        replace_text(out, text)
        partial.remove()
    failed = sum(line["error"] is not None for line in lines)
    if failed:
        say(f"flexgen-helm: {failed} of {len(lines)} requests failed; each says why in its error")
        raise typer.Exit(1)


def parse_line(number: int, line: bytes) -> tuple[int, GenerationRequest | RequestError]:
    """The request of one line with its number, or why it is none. A key that is null counts as left out."""
    try:
        return number, _request(line)
    except RequestError as error:
        return number, error


def _request(line: bytes) -> GenerationRequest:
    try:
        given = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"this is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise RequestError("a line must be one JSON object")
    given = {key: value for key, value in given.items() if value is not None}
    for key, value in given.items():
        if key not in _KEYS:
            raise RequestError(f"the key {key!r} is not known; known are {', '.join(_KEYS)}")
        what, fits = _KEYS[key]
        if not fits(value):
            raise RequestError(f"{key} must be {what}, not {json.dumps(value)[:40]}")
    request = GenerationRequest(**given)
    request.validate()
    return request


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON's")


def as_json(result: GenerationResult, number: int) -> dict[str, Any]:
    """An output line; `number` is that of the input line, which an error names."""
    return {
        "completions": [
            {
                "text": completion.text,
                "tokens": list(completion.tokens),
                "token_ids": list(completion.token_ids),
                "logprobs": list(completion.logprobs),
                "finish_reason": completion.finish_reason,
            }
            for completion in result.completions
        ],
        "prompt_token_ids": list(result.prompt_token_ids),
        "prompt_logprobs": None if result.prompt_logprobs is None else list(result.prompt_logprobs),
        "error": None if result.error is None else f"line {number}: {result.error}",
    }


def _read_lines(path: Path) -> list[tuple[int, bytes]]:
    """Lines with their numbers from 1; blank ones ask nothing."""
    try:
        content: Iterable[bytes] = (sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()).split(b"\n")
    except OSError as error:
        raise UsageError(f"--prompts {path} cannot be read: {error.strerror}") from error
    return [(number, line) for number, line in enumerate(content, start=1) if line.strip()]


class _Partial:
    """FILE.partial: output lines as they were finished, each flushed at once. Without FILE it does nothing."""

    def __init__(self, out: Path | None, numbers: list[int]) -> None:
        self._numbers = numbers
        self._path = None if out is None else out.with_name(out.name + ".partial")
        self._file: TextIO | None = None

    def __enter__(self) -> _Partial:
        if self._path is not None:
            try:
                self._file = open(self._path, "w", encoding="utf-8")
            except OSError as error:
                raise UsageError(f"--out: {self._path} cannot be written: {error.strerror}") from error
        return self

    def add(self, place: int, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"line": self._numbers[place], **line}, allow_nan=False) + "\n")
            self._file.flush()

    def __exit__(self, kind: object, error: object, at: object) -> None:
        if self._file is not None and self._path is not None:
            self._file.close()
            if not self._path.stat().st_size:
                self._path.unlink()  # a refusal before the first line leaves nothing behind

    def remove(self) -> None:
        """The whole file is there; the partial one has done its work."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
