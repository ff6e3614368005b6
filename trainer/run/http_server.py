"""Serves an exported model over HTTP as Vertex AI requires of a custom container: GET /health, POST /predict.

https://docs.cloud.google.com/gemini-enterprise-agent-platform/machine-learning/predictions/custom-container-requirements
"""

import asyncio
import dataclasses
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
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
_TOO_LARGE = f"the request has more than {MOST_BYTES:,} bytes"
_ABOUT = "/v2/models/model"
_WAITING_BYTES = 128 * MOST_BYTES  # limit on all unanswered requests together
_LEAST_BYTES = 10_000  # a smaller request counts as this many, which limits the number of requests
# Smaller requests are parsed, and shorter model calls are made, on the event loop: handing them to a thread costs more.
_PARSED_AT_ONCE_BYTES, _SHORT_CALL_S = 200_000, 0.02
_BODY_S, _GRACE_S = 20, 30  # time for a client to send its body; time for open requests after SIGTERM


@dataclasses.dataclass(eq=False)
class _Part:
    """Holds rows of one shape from one request, at most as many as a call takes, and the future of their answers."""

    columns: Columns
    answers: asyncio.Future[list[Any]]

    @property
    def shapes(self) -> tuple[Any, ...]:
        return tuple(column.shape[1:] for column in self.columns)


class Batcher:
    """Answers all waiting rows in one call of the model, on the event loop if the call is short, else in a thread.

    Rows that arrive meanwhile wait for the next call. A request with more rows than a call takes is cut into parts of
    which one waits at a time, so that other requests get their turn in between.
    """

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self._waiting: list[_Part] = []
        self._calls: asyncio.Task[None] | None = None  # makes call after call while parts wait
        self._thread = ThreadPoolExecutor(1, "model")
        self._short_rows = 0  # a call of at most so many rows has taken less than _SHORT_CALL_S

    async def answer(self, columns: Columns) -> list[Any]:
        """Returns the answers to rows of one shape, in order; a BadRow for each row that has none."""
        answers: list[Any] = []
        most = self.model.most_rows
        for at in range(0, len(columns[0]), most):
            rows = tuple(column[at : at + most] for column in columns)
            part = _Part(rows, asyncio.get_running_loop().create_future())
            self._waiting.append(part)
            if not self._calls or self._calls.done():
                self._calls = asyncio.create_task(self._answer_waiting())
            answers += await part.answers
        return answers

    async def _answer_waiting(self) -> None:
        """Makes call after call while parts wait, and gives each part its answers or the error of its call."""
        while self._waiting:
            # A call takes parts in their order: those of the first one's shape that fit.
            shapes, room = self._waiting[0].shapes, self.model.most_rows
            taken: list[_Part] = []
            left: list[_Part] = []
            for part in self._waiting:
                if part.shapes == shapes and len(part.columns[0]) <= room:
                    taken.append(part)
                    room -= len(part.columns[0])
                else:
                    left.append(part)
            self._waiting = left
            try:
                together = zip(*(part.columns for part in taken), strict=True)
                columns = tuple(rows[0] if len(taken) == 1 else np.concatenate(rows) for rows in together)
                began, count = time.perf_counter(), len(columns[0])
                if count <= self._short_rows:
                    answers = self.model.answer(columns)
                else:
                    loop = asyncio.get_running_loop()
                    answers = await loop.run_in_executor(self._thread, self.model.answer, columns)
                short = time.perf_counter() - began < _SHORT_CALL_S
                self._short_rows = max(self._short_rows, count) if short else min(self._short_rows, count - 1)
            except Exception as error:  # only the requests of this call fail; the server goes on
                for part in taken:
                    if not part.answers.cancelled():
                        part.answers.set_exception(error)
                continue
            for part in taken:
                count = len(part.columns[0])
                if not part.answers.cancelled():  # the server stops, and its time for open requests is over
                    part.answers.set_result(answers[:count])
                answers = answers[count:]
            await asyncio.sleep(0)  # lets the event loop send answers and read requests


def application(load: Callable[[], ServedModel], stop: Callable[[Exception], None]) -> Starlette:
    """Returns the application. It answers 503 until `load` returns, and passes an error of `load` to `stop`."""
    batchers: list[Batcher] = []  # empty until the model is loaded, then one
    parser = ThreadPoolExecutor(1, "parser")  # one thread: Python's JSON holds the interpreter lock anyway
    waiting_bytes = 0  # of requests that are not answered yet

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async def prepare() -> None:
            try:
                batchers.append(Batcher(await asyncio.to_thread(load)))
            except Exception as error:
                stop(error)

        loading = asyncio.create_task(prepare())
        yield
        loading.cancel()

    async def health(request: Request) -> Response:
        return Response(status_code=200 if batchers else 503)

    async def metadata(request: Request) -> Response:
        return JSONResponse(batchers[0].model.metadata()) if batchers else _refused(503, "the model is being loaded")

    async def predict(request: Request) -> Response:
        nonlocal waiting_bytes
        if not batchers:
            return _refused(503, "the model is being loaded")
        size = int(request.headers.get("content-length", MOST_BYTES))  # a stream has no length: assume the most
        too_large = size > MOST_BYTES
        size = min(max(size, _LEAST_BYTES), MOST_BYTES)
        if waiting_bytes + size > _WAITING_BYTES:
            return _refused(503, "too many requests are waiting: send it again in some seconds", {"Retry-After": "2"})
        waiting_bytes += size
        try:
            content = bytearray()
            async with asyncio.timeout(_BODY_S):
                async for part in request.stream():
                    too_large = too_large or len(content) + len(part) > MOST_BYTES
                    if not too_large:  # else the rest is read and dropped: who still sends reads no answer
                        content += part
            if too_large:
                return _refused(413, _TOO_LARGE)
            return await answered(batchers[0], bytes(content))
        except BadRow as error:
            return _refused(400, str(error))
        except TimeoutError:
            late = f"the request did not arrive within {_BODY_S} s"
            return _refused(413, _TOO_LARGE) if too_large else _refused(408, late)
        except asyncio.CancelledError:  # by uvicorn, after _GRACE_S
            return _refused(503, f"the server stops, and did not come to this request within {_GRACE_S} s")
        except ClientDisconnect:
            return Response(status_code=400)  # Starlette needs a response, though nobody reads it
        except Exception as error:
            log.error(f"a request failed: {reason(error)}")
            return _refused(500, "the model failed on these rows: the server's log says why")
        finally:
            waiting_bytes -= size

    async def answered(batcher: Batcher, content: bytes) -> Response:
        """Returns the response with all answers. Raises BadRow for a malformed body or a row that has no answer."""

        async def run(function: Callable[..., Any], *arguments: Any) -> Any:
            if len(content) <= _PARSED_AT_ONCE_BYTES:
                return function(*arguments)
            return await asyncio.get_running_loop().run_in_executor(parser, function, *arguments)

        blocks = await run(_blocks, batcher.model, content)
        parts = await asyncio.gather(*(batcher.answer(columns) for _, columns in blocks))
        by_place: dict[int, Any] = {}
        for (places, _), part in zip(blocks, parts, strict=True):
            by_place |= zip(places, part, strict=True)
        answers = [by_place[at] for at in range(len(by_place))]
        for at, answer in enumerate(answers):
            if isinstance(answer, BadRow):
                raise BadRow(f"instances[{at}]: {answer}")
        response: Response = await run(JSONResponse, {"predictions": answers})
        return response

    async def answer_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _refused(
            error.status_code, f"{error.detail}: this server has POST {route}, GET {health_route} and GET {_ABOUT}"
        )

    health_route, route = os.environ.get("AIP_HEALTH_ROUTE", "/health"), os.environ.get("AIP_PREDICT_ROUTE", "/predict")
    routes = [
        Route(route, predict, methods=["POST"]), Route(health_route, health), Route(_ABOUT, metadata)
    ]  # fmt: skip
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: answer_http_error})
    app.router.redirect_slashes = False
    return app


def serve(load: Callable[[], ServedModel], host: str, port: int) -> None:
    """Serves until SIGTERM or Ctrl-C, and then answers open requests before it returns.

    The port listens before `load` is called. Raises UserError if the port cannot be opened, and what `load` raises.
    """
    errors: list[Exception] = []

    def stop(error: Exception) -> None:
        errors.append(error)
        server.should_exit = True

    app = application(load, stop)
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=_GRACE_S, access_log=False)
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise UserError(f"port={port}: it cannot be opened at {host} ({reason(error)}): use another --port") from None
    # Accepted connections inherit TCP_NODELAY. asyncio sets it only on sockets whose protocol is TCP by name, and
    # without it an answer is delayed by 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with listener, suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    if errors:
        raise errors[0]


def _blocks(model: ServedModel, content: bytes) -> list[tuple[Sequence[int], Columns]]:
    """Parses a request into blocks of rows of one shape, with their places. Raises BadRow for a malformed one."""
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
