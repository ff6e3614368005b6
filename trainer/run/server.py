"""Serves an exported model over HTTP by Google's contract for custom containers: GET /health, POST /predict.

https://docs.cloud.google.com/gemini-enterprise-agent-platform/machine-learning/predictions/custom-container-requirements
"""

import asyncio
import json
import os
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from trainer.base.errors import UserError, reason
from trainer.base.log import log
from trainer.run.served_model import BadRow, Row, ServedModel

MOST_BYTES = 1_500_000  # of a request
_BODY_S, _GRACE_S = 20, 30  # for a client to send its rows; for open requests, after SIGTERM


class Batcher:
    """Answers rows in the model's batches: what arrives while a batch is computed makes the next one.

    Requests that wait get rows of a batch in turn, so that a large one does not keep the others waiting.
    """

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self._requests: deque[deque[tuple[Row, asyncio.Future[Any]]]] = deque()
        self._arrived = asyncio.Event()
        self._worker = asyncio.create_task(self._answer_batches())

    async def answers(self, rows: list[Row]) -> list[Any]:
        """Returns the answers of the rows of one request, in their order. Raises BadRow for one that has none."""
        futures: list[asyncio.Future[Any]] = [asyncio.get_running_loop().create_future() for _ in rows]
        self._requests.append(deque(zip(rows, futures, strict=True)))
        self._arrived.set()
        answers = await asyncio.gather(*futures, return_exceptions=True)
        for at, answer in enumerate(answers):
            if isinstance(answer, BaseException):
                raise BadRow(f"instances[{at}]: {answer}") if isinstance(answer, BadRow) else answer
        return answers

    def _batch(self) -> list[tuple[Row, asyncio.Future[Any]]]:
        """Takes the rows of the next call, one of each waiting request in turn."""
        items: list[tuple[Row, asyncio.Future[Any]]] = []
        while self._requests and len(items) < self.model.fixed_batch:
            request = self._requests.popleft()
            items.append(request.popleft())
            if request:
                self._requests.append(request)
        return items

    async def _answer_batches(self) -> None:
        while True:
            await self._arrived.wait()
            if not (items := self._batch()):
                self._arrived.clear()
                continue
            try:
                answers = await asyncio.to_thread(self.model.answers_or_errors, [row for row, _ in items])
            except Exception as error:  # the requests of this batch fail, the server lives
                answers = [error] * len(items)
            for (_, future), answer in zip(items, answers, strict=True):
                if not future.done():  # its client may have gone
                    future.set_exception(answer) if isinstance(answer, Exception) else future.set_result(answer)


def application(load: Callable[[], ServedModel], stop: Callable[[Exception], None]) -> Starlette:
    """Returns the application: it answers 503 until `load` has returned, and calls `stop` with what that raises."""
    batchers: list[Batcher] = []  # one, once the model is loaded

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

    async def predict(request: Request) -> Response:
        if not batchers:
            return _refused(503, "the model is being loaded")
        try:
            content = await asyncio.wait_for(_content(request), _BODY_S)
            rows = await asyncio.to_thread(_rows, batchers[0].model, content)
            return JSONResponse({"predictions": await batchers[0].answers(rows)})
        except _TooLarge:
            return _refused(413, f"the request has more than {MOST_BYTES:,} bytes")
        except BadRow as error:
            return _refused(400, str(error))
        except TimeoutError:
            return _refused(408, f"the request did not arrive within {_BODY_S} s")
        except ClientDisconnect:
            return Response(status_code=400)  # which nobody reads
        except Exception as error:
            log.error(f"a request failed: {reason(error)}")
            return _refused(500, "the model failed on these rows: the server's log says why")

    async def in_json(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _refused(error.status_code, error.detail)

    health_route, route = os.environ.get("AIP_HEALTH_ROUTE", "/health"), os.environ.get("AIP_PREDICT_ROUTE", "/predict")
    routes = [Route(health_route, health), Route(route, predict, methods=["POST"])]
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
    with listener, suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    if errors:
        raise errors[0]


class _TooLarge(Exception):
    pass


async def _content(request: Request) -> bytes:
    """Returns the body. Raises _TooLarge before all of it is read."""
    if int(request.headers.get("content-length", "0")) > MOST_BYTES:
        raise _TooLarge
    content = b""
    async for part in request.stream():
        content += part
        if len(content) > MOST_BYTES:
            raise _TooLarge
    return content


def _rows(model: ServedModel, content: bytes) -> list[Row]:
    """Returns the rows of a request. Raises BadRow if it is not in order."""
    form = 'the body must be JSON as {"instances": […]}'
    try:
        body = json.loads(content.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise BadRow(f"{form}: it is no text in UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{form}: {reason(error)}") from None
    if not isinstance(body, dict) or "instances" not in body:
        raise BadRow(f"{form}: the key instances is missing")
    instances = body["instances"]
    if not isinstance(instances, list) or not instances:
        raise BadRow("instances: it must be a list with a row at least")
    rows = []
    for at, instance in enumerate(instances):
        try:
            rows.append(model.row(instance))
        except BadRow as error:
            raise BadRow(f"instances[{at}]: {error}") from None
    return rows


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _refused(status: int, why: str) -> Response:
    return JSONResponse({"error": " ".join(why.split())[:500]}, status)
