"""Serves an exported model over HTTP by Google's contract for custom containers: GET /health, POST /predict.

https://docs.cloud.google.com/gemini-enterprise-agent-platform/machine-learning/predictions/custom-container-requirements
"""

import asyncio
import dataclasses
import itertools
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

MOST_BYTES = 1_500_000  # of a request
_TOO_LARGE = f"the request has more than {MOST_BYTES:,} bytes"
_ABOUT = "/v2/models/model"
_WAITING_BYTES = 128 * MOST_BYTES  # of all requests that are not answered yet
_LEAST_BYTES = 10_000  # that a request counts as, so that their number has a limit, too
# Of a request that is parsed at once, and of a call of the model that is made at once: another thread takes longer.
_SMALL_BYTES, _SHORT_S = 200_000, 0.02
_BODY_S, _GRACE_S = 20, 30  # for a client to send its rows; for open requests, after SIGTERM


@dataclasses.dataclass(eq=False)
class _Part:
    """Holds rows of one shape, of one request, and their answers once they are computed."""

    columns: Columns
    answered: asyncio.Future[list[Any]]

    @property
    def shapes(self) -> tuple[Any, ...]:
        return tuple(column.shape[1:] for column in self.columns)


class Batcher:
    """Answers the rows that wait in one call of the model: at once if it is short, else in a thread of its own.

    What arrives meanwhile is the next call. A request of more rows than a call has one part after the other waiting, so
    that it keeps no other request waiting for all of them.
    """

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self._parts: list[_Part] = []
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "model")
        self._short_rows = 0  # of a call that takes so little
        self._worker = asyncio.create_task(self._answer_calls())

    async def answers(self, columns: Columns) -> list[Any]:
        """Returns the answers of rows of one shape, in their order; BadRow for one that has none."""
        answers: list[Any] = []
        most = self.model.most_rows
        for at in range(0, len(columns[0]), most):
            rows = tuple(column[at : at + most] for column in columns)
            part = _Part(rows, asyncio.get_running_loop().create_future())
            self._parts.append(part)
            self._arrived.set()
            answers += await part.answered
        return answers

    def _next_call(self) -> list[_Part]:
        """Takes the parts of the next call: those of the shape of the first that waits, as many as fit in order."""
        self._parts = [part for part in self._parts if not part.answered.done()]  # a client may have gone
        taken: list[_Part] = []
        room = self.model.most_rows
        for part in self._parts:
            if part.shapes == self._parts[0].shapes and len(part.columns[0]) <= room:
                taken.append(part)
                room -= len(part.columns[0])
        self._parts = [part for part in self._parts if part not in taken]
        return taken

    async def _answer_calls(self) -> None:
        while True:
            await self._arrived.wait()
            taken = self._next_call()
            if not taken:
                self._arrived.clear()
                continue
            try:
                together = zip(*(part.columns for part in taken), strict=True)
                columns = tuple(rows[0] if len(taken) == 1 else np.concatenate(rows) for rows in together)
                began, count = time.perf_counter(), len(columns[0])
                if count <= self._short_rows:
                    answers = self.model.answers(columns)
                else:
                    loop = asyncio.get_running_loop()
                    answers = await loop.run_in_executor(self._thread, self.model.answers, columns)
                short = time.perf_counter() - began < _SHORT_S
                self._short_rows = max(self._short_rows, count) if short else min(self._short_rows, count - 1)
            except Exception as error:  # the requests of this call fail, the server lives
                for part in taken:
                    if not part.answered.done():
                        part.answered.set_exception(error)
                continue
            for part in taken:
                count = len(part.columns[0])
                if not part.answered.done():
                    part.answered.set_result(answers[:count])
                answers = answers[count:]
            await asyncio.sleep(0)  # sends answers, and reads requests


def application(load: Callable[[], ServedModel], stop: Callable[[Exception], None]) -> Starlette:
    """Returns the application: it answers 503 until `load` has returned, and calls `stop` with what that raises."""
    batchers: list[Batcher] = []  # one, once the model is loaded
    parser = ThreadPoolExecutor(1, "parser")  # of large requests, one after another: Python's JSON holds all threads
    waiting = 0  # bytes

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
        nonlocal waiting
        if not batchers:
            return _refused(503, "the model is being loaded")
        size = int(request.headers.get("content-length", MOST_BYTES))  # of a stream the most
        if size > MOST_BYTES:
            return _refused(413, _TOO_LARGE)
        size = max(size, _LEAST_BYTES)
        if waiting + size > _WAITING_BYTES:
            return _refused(503, "too many requests are waiting: send it again in some seconds", {"Retry-After": "2"})
        waiting += size
        try:
            content = bytearray()
            async with asyncio.timeout(_BODY_S):
                async for part in request.stream():
                    content += part
                    if len(content) > MOST_BYTES:
                        return _refused(413, _TOO_LARGE)
            return await answered(batchers[0], bytes(content))
        except BadRow as error:
            return _refused(400, str(error))
        except TimeoutError:
            return _refused(408, f"the request did not arrive within {_BODY_S} s")
        except ClientDisconnect:
            return Response(status_code=400)  # which nobody reads
        except Exception as error:
            log.error(f"a request failed: {reason(error)}")
            return _refused(500, "the model failed on these rows: the server's log says why")
        finally:
            waiting -= size

    async def answered(batcher: Batcher, content: bytes) -> Response:
        """Returns the response. Raises BadRow for a row without an answer, and for a body that is not in order."""

        async def run(function: Callable[..., Any], *arguments: Any) -> Any:
            if len(content) <= _SMALL_BYTES:
                return function(*arguments)
            return await asyncio.get_running_loop().run_in_executor(parser, function, *arguments)

        blocks = await run(_blocks, batcher.model, content)
        if len(blocks) == 1:
            answers = await batcher.answers(blocks[0][1])
        else:
            parts = await asyncio.gather(*(batcher.answers(columns) for _, columns in blocks))
            pairs = (zip(places, part, strict=True) for (places, _), part in zip(blocks, parts, strict=True))
            answers = [answer for _, answer in sorted(itertools.chain(*pairs), key=lambda pair: pair[0])]
        for at, answer in enumerate(answers):
            if isinstance(answer, BadRow):
                raise BadRow(f"instances[{at}]: {answer}")
        response: Response = await run(JSONResponse, {"predictions": answers})
        return response

    async def in_json(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _refused(
            error.status_code, f"{error.detail}: here are POST {route}, GET {health_route} and GET {_ABOUT}"
        )

    health_route, route = os.environ.get("AIP_HEALTH_ROUTE", "/health"), os.environ.get("AIP_PREDICT_ROUTE", "/predict")
    routes = [
        Route(route, predict, methods=["POST"]), Route(health_route, health), Route(_ABOUT, metadata)
    ]  # fmt: skip
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: in_json})
    app.router.redirect_slashes = False
    return app


def serve(load: Callable[[], ServedModel], host: str, port: int) -> None:
    """Serves until SIGTERM or Ctrl-C; open requests are answered first. Raises what `load` raises.

    The port listens before `load` is called. Raises UserError if it cannot be opened.
    """
    errors: list[Exception] = []

    def stop(error: Exception) -> None:
        errors.append(error)
        server.should_exit = True

    settings: dict[str, Any] = {"log_level": "warning", "timeout_graceful_shutdown": _GRACE_S, "access_log": False}
    server = uvicorn.Server(uvicorn.Config(application(load, stop), **settings))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise UserError(f"port={port}: it cannot be opened at {host} ({reason(error)}): use another --port") from None
    # Connections inherit it; asyncio sets it only for sockets that name TCP. Without it an answer waits for 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with listener, suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    if errors:
        raise errors[0]


def _blocks(model: ServedModel, content: bytes) -> list[tuple[Sequence[int], Columns]]:
    """Returns the rows of a request, by their shape, with their places. Raises BadRow if it is not in order."""
    form = 'the body must be JSON as {"instances": […]}'
    try:
        body = json.loads(content.decode())
    except UnicodeDecodeError:
        raise BadRow(f"{form}: it is no text in UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{form}: {reason(error)}") from None
    if not isinstance(body, dict) or "instances" not in body:
        raise BadRow(f"{form}: the key instances is missing")
    instances = body["instances"]
    if not isinstance(instances, list) or not instances:
        raise BadRow("instances: it must be a list with a row at least")
    blocks, errors = model.parsed(instances)
    if errors:
        raise BadRow(f"instances[{min(errors)}]: {errors[min(errors)]}")
    return blocks


def _refused(status: int, why: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"error": " ".join(why.split())[:500]}, status, headers)
