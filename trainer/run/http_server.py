"""Serves an exported model over HTTP as Vertex AI requires of a custom container: GET /health, POST
/predict.

https://docs.cloud.google.com/gemini-enterprise-agent-platform/machine-learning/predictions/custom-container-requirements
"""

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from trainer.base.errors import UserError, reason
from trainer.base.log import log
from trainer.run.served_model import BadRow, Columns, ServedModel

MOST_BYTES = 1_500_000  # in the body of a request
_ABOUT = "/v2/models/model"
_LOADING = "the model is being loaded"
_WAITING_BYTES = 128 * MOST_BYTES  # limit on all unanswered requests together
_LEAST_BYTES = 10_000  # a smaller request counts as this many, which limits the number of requests
# Smaller requests are parsed, and shorter model calls are made, on the event loop: handing them to
# a thread costs more.
_INLINE_BYTES = 200_000
_SHORT_CALL_S = 0.02
_BODY_S = 20  # for a client to send its body
_GRACE_S = 30  # for open requests, after SIGTERM


@dataclass(eq=False)
class _Part:
    """Holds rows of one shape from one request and the future of their answers.

    They are at most as many as a call takes.
    """

    columns: Columns
    answers: asyncio.Future[list[Any]]

    @property
    def shapes(self) -> tuple[Any, ...]:
        return tuple(column.shape[1:] for column in self.columns)


class Batcher:
    """Answers all waiting rows in one call of the model.

    The call is made on the event loop if it is short, else in a thread. Rows that arrive meanwhile
    wait for the next call. A request with more rows than a call takes is cut into parts of which
    one waits at a time, so that other requests get their turn in between.
    """

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self._waiting: list[_Part] = []
        self._calls: asyncio.Task[None] | None = None  # makes call after call while parts wait
        self._thread = ThreadPoolExecutor(1, "model")
        self._short_rows = 0  # a call of at most so many rows has taken less than _SHORT_CALL_S

    async def answer(self, columns: Columns) -> list[Any]:
        """Returns the answers to rows of one shape, in order; a BadRow where there is none."""
        answers = []
        most = self.model.most_rows
        for begin in range(0, len(columns[0]), most):
            rows = tuple(column[begin : begin + most] for column in columns)
            part = _Part(rows, asyncio.get_running_loop().create_future())
            self._waiting.append(part)
            if not self._calls or self._calls.done():
                self._calls = asyncio.create_task(self._answer_waiting())
            answers += await part.answers
        return answers

    async def _answer_waiting(self) -> None:
        """Makes call after call while parts wait, and gives each its answers or its error."""
        while self._waiting:
            # A call takes the waiting parts of the first one's shape, in order, that fit.
            shapes = self._waiting[0].shapes
            room = self.model.most_rows
            taken = []
            remaining = []
            for part in self._waiting:
                if part.shapes == shapes and len(part.columns[0]) <= room:
                    taken.append(part)
                    room -= len(part.columns[0])
                else:
                    remaining.append(part)
            self._waiting = remaining
            try:
                columns = taken[0].columns
                if len(taken) > 1:
                    together = zip(*(part.columns for part in taken), strict=True)
                    columns = tuple(np.concatenate(rows) for rows in together)
                began = time.perf_counter()
                count = len(columns[0])
                if count <= self._short_rows:
                    answers = self.model.answer(columns)
                else:
                    loop = asyncio.get_running_loop()
                    answers = await loop.run_in_executor(self._thread, self.model.answer, columns)
                # Each call shows how many rows make a short one.
                if time.perf_counter() - began < _SHORT_CALL_S:
                    self._short_rows = max(self._short_rows, count)
                else:
                    self._short_rows = min(self._short_rows, count - 1)
            except Exception as error:  # only the requests of this call fail; the server goes on
                for part in taken:
                    if not part.answers.cancelled():
                        part.answers.set_exception(error)
                continue
            for part in taken:
                count = len(part.columns[0])
                # A future is cancelled when the server stops and its grace is over.
                if not part.answers.cancelled():
                    part.answers.set_result(answers[:count])
                answers = answers[count:]
            await asyncio.sleep(0)  # lets the event loop send answers and read requests


@dataclass(eq=False)
class Server:
    """Answers requests with the model that `load` returns, by 503 until then.

    An error of `load` is passed to `stop`.
    """

    load: Callable[[], ServedModel]
    stop: Callable[[Exception], None]
    batcher: Batcher | None = None  # once the model is loaded
    waiting_bytes: int = 0  # of requests that are not answered yet
    # One thread: Python's JSON holds the interpreter lock anyway.
    parser: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1, "parser"))

    def application(self) -> Starlette:
        """Returns the application.

        Vertex AI may name its paths: AIP_HEALTH_ROUTE, AIP_PREDICT_ROUTE.
        """
        health = os.environ.get("AIP_HEALTH_ROUTE", "/health")
        predict = os.environ.get("AIP_PREDICT_ROUTE", "/predict")

        async def answer_http_error(request: Request, error: Exception) -> Response:
            assert isinstance(error, HTTPException)
            here = f"this server has POST {predict}, GET {health} and GET {_ABOUT}"
            return _refused(error.status_code, f"{error.detail}: {here}")

        app = Starlette(
            routes=[
                Route(predict, self.predict, methods=["POST"]),
                Route(health, self.health),
                Route(_ABOUT, self.metadata),
            ],
            lifespan=self.lifespan,
            exception_handlers={HTTPException: answer_http_error},
        )
        app.router.redirect_slashes = False
        return app

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Loads the model while the server answers already."""

        async def prepare() -> None:
            try:
                self.batcher = Batcher(await asyncio.to_thread(self.load))
            except Exception as error:
                self.stop(error)

        loading = asyncio.create_task(prepare())
        yield
        loading.cancel()

    async def health(self, request: Request) -> Response:
        """Returns whether the model is loaded."""
        return Response(status_code=200 if self.batcher else 503)

    async def metadata(self, request: Request) -> Response:
        """Returns what the model takes and returns."""
        if not self.batcher:
            return _refused(503, _LOADING)
        return JSONResponse(self.batcher.model.metadata())

    async def predict(self, request: Request) -> Response:
        """Returns the answers to all rows of a request, or why there are none."""
        if not self.batcher:
            return _refused(503, _LOADING)
        # A stream declares no length and counts as the largest request.
        declared = int(request.headers.get("content-length", MOST_BYTES))
        size = min(max(declared, _LEAST_BYTES), MOST_BYTES)
        if self.waiting_bytes + size > _WAITING_BYTES:
            return _refused(
                503,
                "too many requests are waiting: send it again in some seconds",
                {"Retry-After": "2"},
            )
        self.waiting_bytes += size

        # Every way in which an answer may fail has a status of its own.
        try:
            content = await _body(request, too_large=declared > MOST_BYTES)
            if content is None:
                return _refused(413, f"the request has more than {MOST_BYTES:,} bytes")
            return await self._answer(self.batcher, content)
        except BadRow as error:
            return _refused(400, str(error))
        except TimeoutError:
            return _refused(408, f"the request did not arrive within {_BODY_S} s")
        except asyncio.CancelledError:  # by uvicorn, after _GRACE_S
            return _refused(
                503, f"the server stops, and did not come to this request within {_GRACE_S} s"
            )
        except ClientDisconnect:
            return Response(status_code=400)  # Starlette needs a response, though nobody reads it
        except Exception as error:
            log.error(f"a request failed: {reason(error)}")
            return _refused(500, "the model failed on these rows: the server's log says why")
        finally:
            self.waiting_bytes -= size

    async def _answer(self, batcher: Batcher, content: bytes) -> Response:
        """Returns the response with all answers.

        Raises BadRow for a malformed body or a row that has no answer.
        """

        # The JSON of a large request would keep the event loop from others.
        async def run(function: Callable[..., Any], *arguments: Any) -> Any:
            if len(content) <= _INLINE_BYTES:
                return function(*arguments)
            return await asyncio.get_running_loop().run_in_executor(
                self.parser, function, *arguments
            )

        blocks = await run(_blocks, batcher.model, content)
        parts = await asyncio.gather(*(batcher.answer(columns) for _, columns in blocks))
        # Each block knows the places of its rows in the request.
        by_place: dict[int, Any] = {}
        for (places, _), part in zip(blocks, parts, strict=True):
            by_place |= zip(places, part, strict=True)
        answers = [by_place[place] for place in range(len(by_place))]
        for place, answer in enumerate(answers):
            if isinstance(answer, BadRow):
                raise BadRow(f"instances[{place}]: {answer}")
        response: Response = await run(JSONResponse, {"predictions": answers})
        return response


def serve(load: Callable[[], ServedModel], host: str, port: int) -> None:
    """Serves until SIGTERM or Ctrl-C, and then answers open requests before it returns.

    The port listens before `load` is called. Raises UserError if the port cannot be opened, and
    what `load` raises.
    """
    # An error in loading ends the server, and is raised after it.
    errors = []

    def stop(error: Exception) -> None:
        errors.append(error)
        server.should_exit = True

    app = Server(load, stop).application()
    server = uvicorn.Server(
        uvicorn.Config(
            app, log_level="warning", timeout_graceful_shutdown=_GRACE_S, access_log=False
        )
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise UserError(
            f"port={port}: it cannot be opened at {host} ({reason(error)}): use another --port"
        ) from None
    # Accepted connections inherit TCP_NODELAY. asyncio sets it only on sockets whose protocol is
    # TCP by name, and without it an answer is delayed by 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with listener, suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    if errors:
        raise errors[0]


async def _body(request: Request, *, too_large: bool) -> bytes | None:
    """Returns the body of a request, or None if it is too large.

    Raises TimeoutError if it does not arrive in time.
    """
    content = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in request.stream():
                too_large = too_large or len(content) + len(part) > MOST_BYTES
                # The rest is read and dropped, as a client that still sends reads no answer.
                if not too_large:
                    content += part
    except TimeoutError:
        if not too_large:
            raise
    return None if too_large else bytes(content)


def _blocks(model: ServedModel, content: bytes) -> list[tuple[Sequence[int], Columns]]:
    """Parses a request into blocks of rows of one shape, with their places.

    Raises BadRow for a malformed one.
    """
    form = 'the body must be JSON as {"instances": […]}'
    try:
        body = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{form}: {reason(error)}") from None
    if not isinstance(body, dict) or "instances" not in body:
        raise BadRow(f"{form}: the key instances is missing")
    instances = body["instances"]
    if not isinstance(instances, list) or not instances:
        raise BadRow("instances: it must be a list with a row at least")
    blocks, errors = model.parse(instances)
    if errors:
        raise BadRow(f"instances[{min(errors)}]: {errors[min(errors)]}")
    return blocks


def _refused(status: int, why: str, headers: Mapping[str, str] | None = None) -> Response:
    """Returns an error response whose JSON says why, in one line."""
    return JSONResponse({"error": " ".join(why.split())[:500]}, status, headers)
