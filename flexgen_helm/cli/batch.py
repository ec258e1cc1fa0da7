"""`flexgen-helm batch`: OpenAI's batch files, answered by the engine."""

from __future__ import annotations

import atexit
import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from flexgen_helm.cli.completion import complete_model
from flexgen_helm.cli.console import read_input, say, write_json
from flexgen_helm.cli.engine_flags import check_engine_flags
from flexgen_helm.config import EngineOptions
from flexgen_helm.errors import FlexgenError, RequestError, UnknownModelError, UsageError
from flexgen_helm.files import append, read_object
from flexgen_helm.harnesses.openai_formats import (
    ApiError,
    EncodedPrompt,
    Json,
    RequestBody,
    error_body,
    error_status,
    parse_body,
    parse_json,
    to_body,
    to_requests,
)
from flexgen_helm.locks import written_whole
from flexgen_helm.progress import ProgressPhase, report
from flexgen_helm.report.verification import AnswerFile, RecordedAnswer
from flexgen_helm.service import process
from flexgen_helm.service.loaders import EngineLoader
from flexgen_helm.service.models import ModelArguments, ModelReader, model_arguments
from flexgen_helm.service.service import Service
from flexgen_helm.units import count

# Beginning of the ids of output lines.
_ID_PREFIX = "batch_req_"
# End of the name of the file that says what `verify` must know.
_RECORD_SUFFIX = ".run.json"
_LINE_KEYS = {"custom_id", "method", "url", "body"}


@dataclass(frozen=True)
class _Line:
    """An input line: its request, or why it cannot be answered.

    identity: digest of its number and text.
    custom_id: None where it is missing.
    prompts: of the body, once they are encoded.
    """

    identity: str
    custom_id: str | None
    body: RequestBody | None = None
    prompts: Sequence[EncodedPrompt] = ()
    error: Exception | None = None


_Requests = Annotated[
    Path, typer.Argument(metavar="IN.jsonl", help="OpenAI's batch file; - reads stdin.")
]
_Out = Annotated[Path, typer.Option("--out", "-o", metavar="OUT.jsonl", help="File to write.")]
_Model = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Model that answers every line, whatever it names. Default: what the first line "
        "names.",
        autocompletion=complete_model,
    ),
]


def batch(requests: _Requests, out: _Out, engine: EngineOptions, model: _Model = None) -> None:
    """Answer an OpenAI batch file, as OpenAI and vLLM's run-batch do.

    A line is a JSON object, in the input and in the output, and the order is the same.

    Keys of a line:
      in   custom_id, method, url (/v1/completions or /v1/chat/completions), body
      out  id, custom_id, response (status_code, request_id, body), error

    A bad line fails alone, with its error in the response's body; the exit code is then 1. A field
    of the body that is not supported is refused by name. Finished lines are appended to
    OUT.jsonl.partial. After an interruption the same command goes on: what was computed comes from
    the response cache.

    Example:
      flexgen-helm batch requests.jsonl -o answers.jsonl \\
        --model smollm2-135m-instruct-q4_1
    """
    check_engine_flags(engine)
    content = read_input("IN.jsonl", requests)
    if out.exists() and requests.exists() and out.samefile(requests):
        raise UsageError(f"-o {out} is the file of the requests; name another one")
    created = int(time.time() if str(requests) == "-" else requests.stat().st_mtime)
    parsed = list(_parse_lines(content))
    bodies = [line.body for line in parsed if line.body]
    name = model or next((body.model for body in bodies if body.model), None)
    if name is None and bodies:
        raise UsageError("no line names a model; give one with --model")
    if name is None:
        num_failed = _write_answers(out, parsed, map(_failure, parsed))
    else:
        arguments = _arguments(name, engine, is_of_line=model is None)
        service = Service(EngineLoader())
        # a second signal may end the first close
        atexit.register(process.close_at_exit, service.close)
        answerer = _Answerer(
            arguments, ModelReader("batch"), name, created, None if model else name
        )
        try:
            num_failed = _write_answers(out, parsed, answerer.answers(service, parsed))
        finally:
            service.close()
        _write_record(out, answerer, service)
    say(f"{count(len(parsed) - num_failed, 'answer')} in {out}")
    if num_failed:
        say(
            f"flexgen-helm: {num_failed} of {len(parsed)} lines failed; each says why in its "
            "response"
        )
        raise typer.Exit(1)


def _arguments(name: str, engine: EngineOptions, is_of_line: bool) -> ModelArguments:
    """Return the model that answers; is_of_line: a line names it, and not --model."""
    try:
        return model_arguments(name, engine)
    except UnknownModelError as error:
        if not is_of_line:
            raise
        raise UnknownModelError(
            f"{error}; --model NAME answers all lines, whatever they name"
        ) from error


# Reading


def _parse_lines(content: bytes) -> Iterator[_Line]:
    line_of_id: dict[str, int] = {}
    for number, text in enumerate(content.split(b"\n"), start=1):
        if text.strip():
            yield _parse_line(number, text, line_of_id)


def _parse_line(number: int, text: bytes, line_of_id: dict[str, int]) -> _Line:
    """Return a line, or why it cannot be answered.

    line_of_id: number of the line that has each custom id so far; this one's is added.
    """
    identity, custom_id = hashlib.sha256(b"%d\n" % number + text).hexdigest()[:24], None
    try:
        line = parse_json(text, f"line {number}")
        if not isinstance(line, dict):
            raise ApiError(f"line {number} is not a JSON object")
        custom_id = line.get("custom_id")
        if not isinstance(custom_id, str) or not custom_id:
            custom_id = None
            raise ApiError(f"line {number} has no custom_id, which must be a text", "custom_id")
        if (first := line_of_id.setdefault(custom_id, number)) != number:
            raise ApiError(f"custom_id of line {number} is that of line {first} too", "custom_id")
        if unknown := sorted(set(line) - _LINE_KEYS):
            raise ApiError(
                f"line {number} has {unknown[0][:60]!a}; known are {', '.join(sorted(_LINE_KEYS))}"
            )
        if line.get("method", "POST") != "POST":
            raise ApiError(f"method of line {number} must be POST", "method")
        return _Line(identity, custom_id, parse_body(line.get("url", ""), line.get("body")))
    except RequestError as error:
        return _Line(identity, custom_id, error=error)


# Answering


@dataclass(frozen=True)
class _Answerer:
    """Answers lines by a model.

    name, created: of the model and the responses, as bodies give them back.
    required_model: what lines must name; None for whatever.
    """

    model: ModelArguments
    reader: ModelReader
    name: str
    created: int
    required_model: str | None = None

    def answers(self, service: Service, parsed: Sequence[_Line]) -> Iterator[tuple[int, Json]]:
        """Yield status and body of the response to each line, in order."""
        self.reader.encoder(self.model)  # what no line could be answered without
        service.preload(self.model)
        lines = list(map(self._encoded, parsed))
        # what this thread has opened, it needs no longer
        report(ProgressPhase("load", done=1, total=1))
        requests = [prompt.request for line in lines for prompt in line.prompts]
        with service.submit(self.model, requests):
            for line in lines:
                yield self._response(service, line)

    def answer(self, service: Service, line: _Line) -> Json:
        """Return the body of the response to a line."""
        return self._response(service, self._encoded(line))[1]

    def _encoded(self, line: _Line) -> _Line:
        """Return a line with its prompts encoded, or with why they cannot be."""
        body, required = line.body, self.required_model
        if body is None:
            return line
        try:
            if required is not None and body.model != required:
                raise ApiError(
                    f"the model is {body.model!a}, and this file's first line names {required!a}; "
                    "a file asks one model, or --model answers all lines",
                    "model", "model_not_found", 404
                )  # fmt: skip
            prompts = to_requests(body, self.reader, self.model, line.custom_id or "")
        except FlexgenError as error:
            return _Line(line.identity, line.custom_id, error=error)
        return replace(line, prompts=prompts)

    def _response(self, service: Service, line: _Line) -> tuple[int, Json]:
        """Wait for the answers to a line; return status and body of the response."""
        if line.body is None:
            return _failure(line)
        results = [service.respond(self.model, prompt.request).result for prompt in line.prompts]
        if failed := next((result.error for result in results if result.error is not None), None):
            return error_status(failed), error_body(failed)
        head = {"id": line.identity, "created": self.created, "model": self.name}
        tokenizer = self.reader.encoder(self.model).tokenizer
        return 200, to_body(line.body, line.prompts, results, tokenizer, head)


def _failure(line: _Line) -> tuple[int, Json]:
    """Return status and body of the response to a line that cannot be answered."""
    assert line.error is not None
    return error_status(line.error), error_body(line.error)


def _write_answers(out: Path, parsed: Sequence[_Line], answers: Iterable[tuple[int, Json]]) -> int:
    """Write the responses to lines; return how many are errors."""
    num_failed = 0
    with written_whole(out, "-o") as output:
        for line, (status, body) in zip(parsed, answers, strict=True):
            request_id = f"req_{line.identity}"
            answer = {
                "id": f"{_ID_PREFIX}{line.identity}",
                "custom_id": line.custom_id,
                "response": {"status_code": status, "request_id": request_id, "body": body},
                "error": None,
            }
            append(output, f"{json.dumps(answer, allow_nan=False)}\n".encode())
            num_failed += status != 200
    return num_failed


def _write_record(out: Path, answerer: _Answerer, service: Service) -> None:
    """Write what `verify` must know of the answers beside them."""
    chat, path = None, out.with_name(out.name + _RECORD_SUFFIX)
    with suppress(UsageError):  # a model without a chat template: its chat lines failed
        chat = answerer.reader.chat(answerer.model)
    record = service.record(answerer.model, chat)
    # One that computed nothing keeps what is said of the machine that did.
    if record and (
        record["hardware"] or read_object(path).get("fingerprint") != record["fingerprint"]
    ):
        write_json(path, record)


def recorded_lines(out: Path, requests: Path) -> AnswerFile:
    """Return the answers in an output file; requests: the input file."""
    content = read_input("--requests", requests)
    lines = {f"{_ID_PREFIX}{line.identity}": line for line in _parse_lines(content)}
    reader = ModelReader("batch")

    def as_recorded(answer: Json) -> RecordedAnswer:
        name, body = f"{out.name}, {answer['custom_id']}", answer["response"]["body"]
        if answer["id"] not in lines:
            raise UsageError(
                f"{requests} is not what {name}, answers; give the file as it was then"
            )

        def recompute(service: Service, model: ModelArguments) -> Json:
            answerer = _Answerer(model, reader, body["model"], body["created"])
            return answerer.answer(service, lines[answer["id"]])

        return RecordedAnswer(name, body, recompute)

    def read() -> list[RecordedAnswer]:
        answers = (parse_json(text, "an answer") for text in out.read_bytes().splitlines())
        return [
            as_recorded(answer) for answer in answers if answer["response"]["status_code"] == 200
        ]

    return AnswerFile(out, "batch", read_object(out.with_name(out.name + _RECORD_SUFFIX)), read)
