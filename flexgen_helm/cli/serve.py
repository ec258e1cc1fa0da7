"""`flexgen-helm serve`: the engine for other harnesses, over HTTP in OpenAI's formats."""

from __future__ import annotations

import atexit
import os
import socket
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexgen_helm.cli.arguments import ModelName
from flexgen_helm.cli.console import say
from flexgen_helm.cli.engine_flags import check_engine_flags
from flexgen_helm.cli.screen import Screen
from flexgen_helm.config import EngineOptions
from flexgen_helm.errors import Interrupted, UsageError
from flexgen_helm.progress import Event, Message, Progress, observed_by
from flexgen_helm.units import count, spelled_duration

if TYPE_CHECKING:
    from flexgen_helm.harnesses.openai_server import OpenAIServer
    from flexgen_helm.service.models import ModelArguments, ModelReader
    from flexgen_helm.service.service import Service

KEY_VARIABLE = "FLEXGEN_HELM_SERVE_KEY"
_MIN_KEY_CHARACTERS = 16


_Host = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS", help="Address to listen on; one beyond this machine needs a key."
    ),
]
_KeyFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help=f"File with the key that requests must bring. Default: {KEY_VARIABLE}.",
    ),
]


def serve(
    model: ModelName,
    engine: EngineOptions,
    host: _Host = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    key_file: _KeyFile = None,
    served_model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name that requests give. Default: MODEL.")
    ] = None,
) -> None:
    """Serve a model to other harnesses, in OpenAI's formats.

    Answers `/v1/completions`, `/v1/chat/completions`, `/v1/models` and `/health`. Requests are
    gathered until none arrives for 50 ms, and computed as one block. Ctrl-C ends the server; what
    was computed stays in the response cache, so the same requests go on with the next one.

    Needs the extra `serve`: pip install 'flexgen-helm[serve]'.

    Example:
      flexgen-helm serve smollm2-135m-instruct-q4_1
      curl http://127.0.0.1:8000/v1/completions \\
        -H 'Content-Type: application/json' \\
        -d '{"prompt": "The capital of France is", "max_tokens": 8}'
    """
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise UsageError(
            "starlette and uvicorn are not installed; run pip install 'flexgen-helm[serve]'"
        )
    from flexgen_helm.harnesses.openai_server import OpenAIServer, ServedModel, is_loopback

    check_engine_flags(engine)
    key = _read_key(key_file)
    if key is None and not is_loopback(host):
        raise UsageError(
            f"--host {host} lets other machines ask, so a key is needed; write one into a file for "
            f"--key-file, or set {KEY_VARIABLE}"
        )
    listener = _listener(host, port)
    from flexgen_helm.service import process
    from flexgen_helm.service.loaders import EngineLoader
    from flexgen_helm.service.models import ModelReader, model_arguments
    from flexgen_helm.service.service import Service

    arguments = model_arguments(model, engine)
    reader, service = ModelReader("serve"), Service(EngineLoader())
    atexit.register(process.close_at_exit, service.close)  # a second signal may end the first close
    served = ServedModel(served_model_name or model, arguments, int(time.time()))
    try:
        with Screen():
            _try_model(service, arguments, reader)
        _serve_all(OpenAIServer(service, reader, served, key, tell=say), listener, served.name)
    except KeyboardInterrupt:  # while the model was loaded
        raise Interrupted("interrupted") from None
    finally:
        listener.close()
        service.close()


def _serve_all(server: OpenAIServer, listener: socket.socket, name: str) -> None:
    """Answer requests until a signal ends it."""
    listener.listen(1024)
    host, port = listener.getsockname()[:2]
    say(f"serving {name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1; Ctrl-C ends")
    with observed_by(_print_event):
        server.serve(listener)
    answered = f"{count(server.num_answered, 'request')} answered, {server.num_refused:,} refused"
    say(f"{answered}; what was computed is stored")


def _try_model(service: Service, model: ModelArguments, reader: ModelReader) -> None:
    """Compute one token with the model: what is wrong with it ends the command, not a request."""
    from flexgen_helm.request import GenerationRequest
    from flexgen_helm.service.service import KeyedRequest, request_key

    token = reader.encoder(model).tokenizer.first_id or 0
    first = GenerationRequest(prompt_token_ids=(token,), max_tokens=1)
    answer = service.respond(model, KeyedRequest(first, request_key(first)), use_cache=False)
    if answer.result.error is not None:
        raise answer.result.error


def _print_event(event: Event) -> None:
    """Print messages, and a line for each computed block."""
    if isinstance(event, Message):
        say(event.text)
    elif isinstance(event, Progress) and event.is_finished:
        work = f"{count(event.total_requests, 'sequence')} in {spelled_duration(event.elapsed_s)}"
        say(
            f"{time.strftime('%H:%M:%S')}  {work}, {event.done_tokens:,.0f} tokens, "
            f"{event.tokens_per_s:,.3g} tokens/s"
        )


def _read_key(file: Path | None) -> str | None:
    """Return the key that requests must bring, of --key-file or the environment; None for none.

    Raises `UsageError` for a file that cannot be read, and for a key that is easy to guess or that
    no header can carry.
    """
    if file is None:
        key, source = os.environ.get(KEY_VARIABLE, "").strip(), KEY_VARIABLE
        if not key:
            return None
    else:
        try:
            key, source = file.read_text(encoding="utf-8").strip(), f"--key-file {file}"
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--key-file {file} cannot be read: {error}") from error
    if len(key) < _MIN_KEY_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(
            f"the key of {source} has {len(key)} characters; it needs {_MIN_KEY_CHARACTERS} or "
            "more, printable ASCII without blanks, as `openssl rand -hex 32` prints"
        )
    return key


def _listener(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to the address and does not listen yet. Raises `UsageError`."""
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # of a name: an empty or long part
        raise UsageError(
            f"--host {host} is no address of this machine: {getattr(error, 'strerror', error)}"
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"--host {host} --port {port} cannot be taken: {error.strerror}; choose another --port"
        ) from error
    return listener
