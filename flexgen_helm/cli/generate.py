"""`flexgen-helm generate`: the engine without HELM, one JSON object per line in and out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from functools import cache
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from flexgen_helm.cli.console import read_input, say
from flexgen_helm.cli.engine_flags import ModelName, load_engine
from flexgen_helm.config import EngineOptions
from flexgen_helm.errors import RequestError
from flexgen_helm.files import append, count, question, replace_text
from flexgen_helm.locks import sole_writer
from flexgen_helm.progress import Message, report
from flexgen_helm.request import GenerationRequest, GenerationResult

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic_core import ErrorDetails


def generate(
    model: ModelName,
    prompts: Annotated[Path, typer.Option(metavar="FILE.jsonl", help="Requests, one a line; - reads stdin.")],
    engine: EngineOptions,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File to write. Default: stdout. FILE.partial keeps finished lines."),
    ] = None,
) -> None:
    """Answer the prompts of a file, without HELM.

    A line is a JSON object, in the input and in the output, and the order is the same.

    Keys of a line:
      in   prompt, messages, or prompt_token_ids; optional: max_tokens,
           temperature, top_p, seed, stop, n, echo_logprobs, ignore_eos
      out  completions, prompt_token_ids, prompt_logprobs, error

    A bad line fails alone; the exit code is then 1. With --out, each finished line is appended to FILE.partial at once,
    with the number of its input line. After an interruption the same command computes the rest. At the end, FILE has
    all lines.

    Example:
      echo '{"prompt": "The capital of France is", "max_tokens": 8}' > in.jsonl
      flexgen-helm generate smollm2-135m-instruct-q4_1 --prompts in.jsonl
    """
    content = read_input("--prompts", prompts).split(b"\n")
    requests = {number: parse_line(line) for number, line in enumerate(content, start=1) if line.strip()}
    partial = nullcontext() if out is None else sole_writer(out.with_name(out.name + ".partial"), "--out")
    with partial as file, load_engine(model, engine) as loaded:
        output = _Output(out, file)
        settings = loaded.fingerprint
        if loaded.chat is not None:
            settings += f"{loaded.chat.applied}{loaded.chat.identity}"
            if "apply_chat_template" in engine:
                report(Message(loaded.chat.describe(loaded.name), is_warning=False))
        # What an answer depends on: all of engine and chat template that decides results, and the input line.
        keyed = {number: settings.encode() + b"\n" + content[number - 1] for number in requests}
        output.resume({number: hashlib.sha256(text).hexdigest()[:16] for number, text in keyed.items()})
        asked: dict[int, GenerationRequest] = {}
        for number, request in requests.items():
            if isinstance(request, RequestError):
                output.add(number, GenerationResult(error=request))
            elif number not in output.lines:
                asked[number] = request
        if asked:
            numbers = list(asked)
            loaded.run(list(asked.values()), on_result=lambda i, result: output.add(numbers[i], result))
        output.finish()
    if output.failed:
        say(f"flexgen-helm: {output.failed} of {len(requests)} requests failed; each says why in its error")
        raise typer.Exit(1)


@cache
def _line_model() -> type[BaseModel]:
    """`GenerationRequest` as JSON: every key is optional, and null counts as left out."""
    from pydantic import ConfigDict, create_model

    kinds = get_type_hints(GenerationRequest)
    # The chat template decides the first; lines out have no place for the others.
    del kinds["thinking"], kinds["echo_greedy"], kinds["top_logprobs"]
    keys: dict[str, Any] = {key: (kind | None, None) for key, kind in kinds.items()}
    return create_model("Line", __config__=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False), **keys)


def parse_line(line: bytes) -> GenerationRequest | RequestError:
    """Return the request of an input line, or the error that says what is wrong with it."""
    from pydantic import ValidationError

    try:
        request = GenerationRequest(**_line_model().model_validate_json(line).model_dump(exclude_none=True))
        request.validate()
        return request
    except ValidationError as error:
        return RequestError(_explanation(error.errors(include_url=False)[0]))
    except RequestError as error:
        return error


def _explanation(error: ErrorDetails) -> str:
    """Return pydantic's first error as one sentence with the key and what is expected."""
    if error["type"] == "json_invalid":
        return error["msg"].replace("line 1 ", "")  # pydantic sees one line at a time
    key = ".".join(map(str, error["loc"])) or "the line"
    if error["type"] == "extra_forbidden":
        known = _line_model().model_fields
        return f"the key {key!r} is not known; {question(key, known)}known are {', '.join(known)}"
    return f"{key} {error['msg'].replace('Input should', 'must')}, not {json.dumps(error['input'])[:40]}"


class _Output:
    """Output lines by the number of their input line.

    With --out, each finished line is appended to FILE.partial at once; `finish` writes FILE as a whole.
    """

    def __init__(self, out: Path | None, partial: FileIO | None) -> None:
        self.failed = 0
        self.lines: dict[int, str] = {}
        self._out, self._partial = out, partial
        self._keys: Mapping[int, str] = {}

    def resume(self, keys: Mapping[int, str]) -> None:
        """Take over the lines without errors that an interrupted call left in FILE.partial; keys: of all lines."""
        self._keys = keys
        if self._partial is None:
            return
        content = Path(str(self._partial.name)).read_text(encoding="utf-8", errors="replace")
        if content and not content.endswith("\n"):  # the last line of a killed process may be cut
            append(self._partial, "\n")
        for text in content.splitlines():
            with suppress(ValueError, TypeError, AttributeError, KeyError):
                line = json.loads(text)
                number = line.pop("line")
                if keys[number] == line.pop("key") and line["error"] is None:
                    self.lines[number] = json.dumps(line, allow_nan=False) + "\n"
        if done := len(self.lines):
            report(Message(f"{count(done, 'line')} of {len(keys):,} are there already, in {self._partial.name}"))

    def add(self, number: int, result: GenerationResult) -> None:
        line = {
            "completions": [
                {name: value for name, value in vars(completion).items() if name != "top_logprobs"}
                for completion in result.completions
            ],
            "prompt_token_ids": result.prompt_token_ids,
            "prompt_logprobs": result.prompt_logprobs,
            "error": None if result.error is None else f"line {number}: {result.error}",
        }
        self.failed += result.error is not None
        self.lines[number] = json.dumps(line, allow_nan=False) + "\n"
        if self._partial is not None:
            keyed = {"line": number, "key": self._keys[number], **line}
            append(self._partial, json.dumps(keyed, allow_nan=False) + "\n")

    def finish(self) -> None:
        """Write all lines to where the user said."""
        text = "".join(self.lines[number] for number in sorted(self.lines))
        if self._out is None or self._partial is None:
            print(text, end="", flush=True)
        else:
            replace_text(self._out, text)
            self._partial.truncate(0)  # so that it is deleted
