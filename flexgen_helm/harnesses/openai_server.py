"""OpenAI's API for one model, over HTTP. This module alone imports starlette and uvicorn.

    POST /v1/completions, /v1/chat/completions    body -> requests -> results -> body
    GET  /v1/models, /v1/models/NAME, /health

A request passes two gates before it is computed: who asks (key, Host, Origin), and how much (bytes
of its body, and completions). What is admitted is gathered by the service with the rest, computed
as a block, and stored in the response cache, also where its client has gone. An equal request joins
it. How many ask, and how slowly, is not limited.

Equal requests without a seed draw different tokens. The first, second, … of them draw the same in
every process, so a server that was started again answers them from the cache.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from socket import socket
from types import FrameType
from typing import Any, TypeVar, TypeVarTuple, Unpack
from urllib.parse import urlsplit

import uvicorn
from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from flexgen_helm.errors import FlexgenError
from flexgen_helm.files import size
from flexgen_helm.harnesses.openai_formats import (
    ENDPOINTS,
    ApiError,
    EncodedPrompt,
    Json,
    RequestBody,
    error_body,
    error_status,
    parse_body,
    parse_json,
    to_body,
    to_events,
    to_requests,
)
from flexgen_helm.request import GenerationResult
from flexgen_helm.service.models import ModelArguments, ModelReader
from flexgen_helm.service.service import Service

_T = TypeVar("_T")
_Arguments = TypeVarTuple("_Arguments")
MAX_BODY_BYTES = 16 * 2**20
# of a longer body that are read, so that its client reads why it is refused
MAX_DISCARDED_BYTES = 64 * 2**20
MAX_COMPLETIONS_PER_CALL = 20_000  # prompts times n
_GRACE_S = 2.0  # for answers that are on their way when the server is stopped
_STOPPING = (
    "the server is being stopped; finished answers are stored, and the same request to the next "
    "server goes on"
)


@dataclass(frozen=True)
class ServedModel:
    """A model as clients see it; name: the one that requests may give."""

    name: str
    arguments: ModelArguments
    created: int


class OpenAIServer:
    """The API of one model. `serve` returns once it is interrupted; after that the service may be
    closed.

    key: what requests must bring as `Authorization: Bearer KEY`; without one, only requests to this
        machine by its loopback names are answered, which no page of a browser can send.
    tell: shows a line to whoever watches the server.
    """

    def __init__(
        self,
        service: Service,
        reader: ModelReader,
        model: ServedModel,
        key: str | None,
        tell: Callable[[str], None],
    ) -> None:
        self._service, self._reader, self._model = service, reader, model
        self._key, self._tell = key, tell
        self.num_answered = self.num_refused = 0
        self._draws: Counter[bytes] = Counter()  # by digest of a body that draws without a seed
        self._is_stopping = False
        self._waiters: set[asyncio.Event] = set()
        # Parsing and encoding take memory and the interpreter: a few at once.
        self._limiter = CapacityLimiter(2)

    def serve(self, listener: socket) -> None:
        """Answer requests until SIGINT or SIGTERM."""
        config = uvicorn.Config(
            self.app(), http="h11", ws="none", lifespan="on", loop="asyncio", log_config=None,
            log_level="error", access_log=False, server_header=False, proxy_headers=False,
            timeout_graceful_shutdown=int(_GRACE_S),
        )  # fmt: skip
        _Server(config, self._stop).run(sockets=[listener])

    def app(self) -> Starlette:
        """Return the ASGI application."""
        return Starlette(
            routes=[
                *(
                    Route(url, self._answered(self._complete), methods=["POST"])
                    for url in ENDPOINTS
                ),
                Route("/v1/models", self._answered(self._models), methods=["GET"]),
                Route("/v1/models/{name:path}", self._answered(self._one_model), methods=["GET"]),
                Route("/health", self._answered(self._health), methods=["GET"]),
            ],
            exception_handlers={HTTPException: _http_error},
        )

    def _stop(self) -> None:
        """Send waiting clients away. Called by a signal handler; uvicorn wakes its loop ten times a
        second.
        """
        self._is_stopping = True
        self._service.interrupt()
        for waiter in self._waiters:
            waiter.set()

    # Endpoints

    def _answered(self, endpoint: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """Return an endpoint that checks who asks, and whose errors are in OpenAI's form."""

        async def answer(request: Request) -> Response:
            try:
                self._check_asker(request)
                response: Response = await endpoint(request)
                return response
            except ClientDisconnect:
                return Response(status_code=400)  # nobody reads it
            except FlexgenError as error:
                self.num_refused += 1
                return _error(error)
            except Exception as error:  # the last resort
                self.num_refused += 1
                self._tell(f"a request failed: unexpected {type(error).__name__}: {error}")
                return _error(
                    ApiError(
                        f"unexpected {type(error).__name__}; the server's output has more",
                        status=500,
                    )
                )

        return answer

    async def _health(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def _models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model_record()]})

    async def _one_model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return _json(self._model_record())

    def _model_record(self) -> Json:
        window = self._reader.facts(self._model.arguments).max_positions
        name, created = self._model.name, self._model.created
        return {
            "id": name, "object": "model", "created": created, "owned_by": "flexgen_helm",
            "max_model_len": window,
        }  # fmt: skip

    async def _complete(self, request: Request) -> Response:
        content = await self._read(request)
        parsed, draw_digest = await self._in_thread(_parse, request.url.path, content)
        del content
        self._check_model(parsed.model)
        count = len(parsed.prompts) * parsed.n
        if count > MAX_COMPLETIONS_PER_CALL:
            raise ApiError(
                f"the request asks for {count:,} completions; at most "
                f"{MAX_COMPLETIONS_PER_CALL:,} are allowed",
                "n",
            )
        seed_text = ""
        if draw_digest is not None:
            self._draws[draw_digest] += 1
            seed_text = f"{draw_digest.hex()}/{self._draws[draw_digest]}"
        prompts = await self._in_thread(
            to_requests, parsed, self._reader, self._model.arguments, seed_text
        )
        results = await self._results(prompts)
        return await self._in_thread(self._respond, parsed, prompts, results)

    async def _in_thread(
        self, function: Callable[[Unpack[_Arguments]], _T], *arguments: *_Arguments
    ) -> _T:
        return await to_thread.run_sync(function, *arguments, limiter=self._limiter)

    async def _results(self, prompts: Sequence[EncodedPrompt]) -> list[GenerationResult]:
        """Wait for the results of a request; all of them are computed, whether or not somebody
        still waits.
        """
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the server has been stopped, and its loop is closed
                loop.call_soon_threadsafe(done.set)

        keyed = [prompt.request for prompt in prompts]
        with self._service.submit(self._model.arguments, keyed, gathers=True) as block:
            block.when_done(wake)
            self._waiters.add(done)
            try:
                if not self._is_stopping:
                    await done.wait()
            finally:
                self._waiters.discard(done)
            responses = block.responses()
            if len(responses) < len(set(block.keys)):
                if self._is_stopping:
                    raise ApiError(_STOPPING, code="stopping", status=503)
                error = block.error()
                assert error is not None
                raise error
        results = [responses[request.key].result for request in keyed]
        if failed := next((result.error for result in results if result.error is not None), None):
            raise failed
        return results

    def _respond(
        self,
        parsed: RequestBody,
        prompts: Sequence[EncodedPrompt],
        results: Sequence[GenerationResult],
    ) -> Response:
        tokenizer = self._reader.encoder(self._model.arguments).tokenizer
        keys = "".join(prompt.request.key for prompt in prompts)
        response_id = hashlib.sha256(keys.encode()).hexdigest()[:24]
        head = {"id": response_id, "created": int(time.time()), "model": self._model.name}
        body = to_body(parsed, prompts, results, tokenizer, head)
        self.num_answered += 1
        if not parsed.stream:
            return _json(body)
        events = [json.dumps(event, allow_nan=False) for event in to_events(parsed, body)]
        text = "".join(f"data: {event}\n\n" for event in (*events, "[DONE]"))
        return Response(text, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    # Gates

    def _check_asker(self, request: Request) -> None:
        """Raise `ApiError` for who may not ask."""
        headers = request.headers
        host = headers.get("host", "")
        if self._key is not None:
            scheme, _, sent_key = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(
                sent_key.strip().encode(), self._key.encode()
            ):
                raise ApiError("the request has no valid key; send 'Authorization: Bearer KEY'",
                               code="invalid_api_key", status=401)  # fmt: skip
        elif not is_loopback(_host_name(host)):
            raise ApiError(f"the request is for the host {host[:60]!a}, and without a key this "
                           "server answers for 127.0.0.1, ::1 and localhost only",
                           status=403)  # fmt: skip
        origin = headers.get("origin")
        if origin is not None and _host_of_origin(origin) != host.lower():
            raise ApiError(f"pages of {origin[:60]!a} may not ask this server", status=403)
        if request.method != "POST":
            return
        kind = headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            raise ApiError(
                f"Content-Type is {kind[:60]!a}; it must be application/json", status=415
            )
        if (coding := headers.get("content-encoding", "identity")) != "identity":
            raise ApiError(
                f"Content-Encoding is {coding[:60]!a}, which is not supported; leave it out",
                status=415,
            )

    async def _read(self, request: Request) -> bytes:
        """Return the body. Raises `ApiError` where it is too long."""
        chunks: list[bytes] = []
        num_bytes = 0
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > MAX_DISCARDED_BYTES:
            raise _too_long()
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if num_bytes > MAX_DISCARDED_BYTES:
                raise _too_long()
            if num_bytes > MAX_BODY_BYTES:  # read on: a client that still sends sees no answer
                chunks.clear()
            else:
                chunks.append(chunk)
        if num_bytes > MAX_BODY_BYTES:
            raise _too_long()
        return b"".join(chunks)

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._model.name):
            raise ApiError(f"the model {name!a} is not served here; {self._model.name!a} is",
                           "model", "model_not_found", 404)  # fmt: skip


def is_loopback(host: str) -> bool:
    """Whether a host, by address or name, is this machine for itself; other names may lead
    anywhere.
    """
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


class _Server(uvicorn.Server):
    """A server that is stopped by its first signal; the process goes on behind it."""

    def __init__(self, config: uvicorn.Config, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._call_stop = stop

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit  # a second signal does not wait
        self.should_exit = True
        self._call_stop()


def _parse(url: str, content: bytes) -> tuple[RequestBody, bytes | None]:
    """Return a checked body, and its digest if it draws without a seed."""
    body = parse_json(content, "the body", "utf-8")
    parsed = parse_body(url, body, may_stream=True)
    if not parsed.temperature or parsed.seed is not None:
        return parsed, None
    drawn = {
        name: value for name, value in body.items() if name not in ("stream", "stream_options")
    }
    return parsed, hashlib.sha256(json.dumps(drawn, sort_keys=True).encode()).digest()


def _host_name(host: str) -> str:
    """Return the name in a Host header, without its port."""
    with suppress(ValueError):
        return urlsplit(f"//{host}").hostname or ""
    return ""


def _host_of_origin(origin: str) -> str:
    """Return host and port of an Origin header; empty for `null` and what is no origin."""
    with suppress(ValueError):
        return urlsplit(origin).netloc.lower()
    return ""


def _too_long() -> ApiError:
    return ApiError(
        f"the body is longer than {size(MAX_BODY_BYTES)}; send fewer prompts at once", status=413
    )


def _json(body: Json, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(body, allow_nan=False), status, headers, "application/json")


def _error(error: Exception) -> Response:
    status = error_status(error)
    # A body that was not read to its end would be taken for the next request.
    headers = {"Connection": "close"} if status in (401, 403, 413, 415) else {}
    return _json(error_body(error), status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """Return what starlette refuses (an unknown path, a method) in OpenAI's form."""
    assert isinstance(error, HTTPException)
    urls = ", ".join((*ENDPOINTS, "/v1/models", "/health"))
    message = (
        f"{request.method[:20]!a} {request.url.path[:60]!a}: {error.detail}; the server has {urls}"
    )
    return _error(ApiError(message, status=error.status_code))
