"""Reads the hellos of all connections to the chief at once, and keeps those of workers that know the job's secret."""

import json
import selectors
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.distribution.cluster import Cluster
from trainer.distribution.credentials import Secret, new_challenge
from trainer.distribution.messages import LineBuffer, Overflow, parse, safe, send, text, whole_number
from trainer.errors import UserError
from trainer.log import log

_HELLO_SECONDS = 10.0  # in all, from a connection to what its worker runs
# Connections without a proof at a time, or as many as there are workers; the oldest one is closed for a new one.
_MOST_STRANGERS = 64
_MOST_WARNINGS = 5
ADVISORY = "?"  # ends the names of values that may differ


@dataclass
class _Caller:
    """Holds one connection and how far its hello is."""

    link: socket.socket
    host: str
    challenge: str = field(default_factory=new_challenge)
    began: float = field(default_factory=time.monotonic)
    buffer: LineBuffer = field(default_factory=LineBuffer)
    index: int = 0  # of the worker that has proved to be one
    runs: dict[str, Any] | None = None


class Callers:
    """Accepts connections and answers hellos. `runs`: what each connected worker runs, by its index.

    No caller can hold up another: each has _HELLO_SECONDS in all, and whoever closes its connection is dropped.
    """

    def __init__(self, cluster: Cluster, server: socket.socket, secret: Secret) -> None:
        self._cluster, self._server, self._secret = cluster, server, secret
        self._callers: list[_Caller] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        server.setblocking(False)
        self._warnings = 0

    def __enter__(self) -> "Callers":
        return self

    def __exit__(self, *_: object) -> None:
        for caller in list(self._callers):
            self._drop(caller)
        self._selector.close()

    @property
    def runs(self) -> dict[int, dict[str, Any]]:
        """Returns what each worker that is connected now runs."""
        return {caller.index: caller.runs for caller in self._callers if caller.runs is not None}

    def serve(self, seconds: float) -> None:
        """Handles what arrives, waiting up to `seconds` for it."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._accept()
            elif key.data in self._callers:
                self._receive(key.data)
        late = time.monotonic() - _HELLO_SECONDS
        for caller in [one for one in self._callers if one.runs is None and one.began < late]:
            self._drop(caller)

    def answer(self, refusal: str) -> dict[int, socket.socket]:
        """Answers all workers; returns their connections, which stay open, or raises UserError with the refusal."""
        workers = {caller.index: caller for caller in self._callers if caller.runs is not None}
        for index, caller in workers.items():
            caller.link.setblocking(True)
            send(caller.link, {"refused": refusal} if refusal else {"start": index})
        if refusal:
            raise UserError(refusal)
        for caller in workers.values():
            self._selector.unregister(caller.link)
            self._callers.remove(caller)
        return {index: caller.link for index, caller in workers.items()}

    def _accept(self) -> None:
        try:
            link, (host, *_) = self._server.accept()
        except OSError:
            return
        strangers = [caller for caller in self._callers if not caller.index]
        if len(strangers) >= max(_MOST_STRANGERS, self._cluster.workers):
            self._drop(strangers[0])
        link.settimeout(0.0)
        caller = _Caller(link, host)
        self._callers.append(caller)
        self._selector.register(link, selectors.EVENT_READ, caller)
        send(link, {"challenge": caller.challenge})

    def _receive(self, caller: _Caller) -> None:
        try:
            data = caller.link.recv(65536)
            lines = caller.buffer.feed(data)
        except BlockingIOError:
            return
        except (OSError, Overflow):
            data, lines = b"", []
        if not data:
            self._drop(caller)
            return
        for line in lines:
            if caller in self._callers:
                self._handle(caller, parse(line))

    def _handle(self, caller: _Caller, message: Mapping[str, Any]) -> None:
        if not caller.index:
            self._greet(caller, message)
        elif caller.runs is None and isinstance(message.get("runs"), dict):
            for older in [one for one in self._callers if one.index == caller.index and one is not caller]:
                self._drop(older)  # the worker was restarted
            caller.runs = message["runs"]

    def _greet(self, caller: _Caller, message: Mapping[str, Any]) -> None:
        index = whole_number(message, "hello", self._cluster.workers - 1)
        own = text(message, "challenge")
        if index and self._secret.accepts(message.get("proof"), "worker", index, caller.challenge, own):
            caller.index = index
            send(caller.link, {"welcome": index, "proof": self._secret.proof("chief", index, own, caller.challenge)})
            return
        self._warnings += 1
        if self._warnings <= _MOST_WARNINGS:
            log.warning(f"a connection from {caller.host} was refused: it does not know this job's secret")
        send(caller.link, {"stranger": True})
        self._drop(caller)

    def _drop(self, caller: _Caller) -> None:
        self._selector.unregister(caller.link)
        self._callers.remove(caller)
        caller.link.close()


def differing(chief: Mapping[str, Any], worker: Mapping[str, Any], advisory: bool = False) -> str:
    """Returns the names and values that differ, of those that may or of those that must not; empty if all are equal."""
    chief = json.loads(json.dumps(chief))
    names = [name for name in {**chief, **worker} if name.endswith(ADVISORY) == advisory]
    names = [name for name in names if chief.get(name) != worker.get(name)]
    return "; ".join(
        f"{safe(name.rstrip(ADVISORY))}: {safe(repr(chief.get(name)))} on the chief, "
        f"{safe(repr(worker.get(name)))} on the worker"
        for name in names[:3]
    )
