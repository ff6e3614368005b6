"""Runs a proxy on loopback between the client and the emulator that injects faults of networks and
servers."""

import http.client
import random
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Any
from urllib.parse import unquote, urlsplit

FOREVER = 10**9
STATUS_TEXT = {
    403: '{"error": {"code": 403, "message": "x@y does not have storage.objects.get access"}}',
    400: (
        '{"error": {"code": 400, "message": "Bucket is a requester pays bucket but no user project'
        ' provided."}}'
    ),
    401: '{"error": {"code": 401, "message": "Invalid Credentials"}}',
}


@dataclass
class Fault:
    """Describes a fault of the next `times` requests of `method` whose path contains `path`, after
    `after` others.

    For an upload the name of the object counts as part of the path.

    kind: a status to answer with, or reset (the connection breaks in mid-body), short (it ends
        there), flip (a byte is wrong), stall (no answer), drip (a byte every 50 ms), lost (the
        request is done, but its answer never comes).
    """

    kind: int | str
    method: str = "GET"
    path: str = "alt=media"
    times: int = 1
    after: int = 0
    struck: bool = field(default=False, init=False)

    def strikes(self, method: str, path: str) -> bool:
        if method != self.method or self.path not in path or self.times <= 0:
            return False
        if self.after > 0:
            self.after -= 1
            return False
        self.times -= 1
        self.struck = True
        return True


@dataclass
class Proxy:
    """Holds the faults to inject, and all received requests as "METHOD path"."""

    url: str
    faults: list[Fault] = field(default_factory=list)
    chaos: float = 0.0  # the chance that a request meets a fault of a random kind
    requests: list[str] = field(default_factory=list)
    released: Event = field(default_factory=Event)

    def heal(self) -> None:
        """Ends all faults."""
        for fault in self.faults:
            fault.times = 0

    def count(self, method: str, path: str) -> int:
        return sum(request.startswith(method) and path in request for request in self.requests)


_OURS = ("content-length", "transfer-encoding", "connection")


class _Faulty(BaseHTTPRequestHandler):
    """Forwards each request to `upstream`, unless a fault strikes."""

    upstream: str
    proxy: Proxy
    lock: Lock
    chance = random.Random(0)
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # 40 ms a request otherwise: head and body are sent apart
    timeout = 30

    def log_message(self, *_: Any) -> None:
        pass

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except OSError:  # the client hung up
            self.close_connection = True

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        # an upload has its object's name in its body
        name = re.search(rb'"name": ?"([^"]+)"', body[:1000])
        path = unquote(self.path) + (f" {name[1].decode()}" if name else "")
        with self.lock:
            self.proxy.requests.append(f"{self.command} {path}")
            kind = next(
                (fault.kind for fault in self.proxy.faults if fault.strikes(self.command, path)),
                None,
            )
            if kind is None and self.chance.random() < self.proxy.chaos:  # long ones are rare
                kinds: list[int | str] = [503, 429, 500, 408, 401, "reset", "short", "lost"] * 5
                kinds += ["stall", "drip"]
                kinds += ["flip"] * 10 if "alt=media" in path else []
                kinds += [412] * 5 if "/upload/" in path else []
                kind = self.chance.choice(kinds)
        if isinstance(kind, int):
            text = STATUS_TEXT.get(kind, "{}").encode()
            status = kind
            headers = [("Content-Type", "application/json")]
            content = text
        elif kind == "stall":
            self.proxy.released.wait(20)
        else:
            status, headers, content = self._forward(body)
        if kind in ("stall", "lost"):
            self.close_connection = True
            return
        if kind == "flip" and content:
            at = self.chance.randrange(len(content))
            content = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        self.send_response(status)
        for key, value in headers:
            self.send_header(key, value.replace(self.upstream, self.proxy.url))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if kind == "drip":
            for byte in content:
                if self.proxy.released.wait(0.05):
                    break
                self.wfile.write(bytes([byte]))
        else:
            self.wfile.write(
                content[: len(content) // 2] if kind in ("reset", "short") else content
            )
        if kind in ("reset", "short", "drip"):
            self.close_connection = True
        if kind == "reset":  # RST instead of FIN
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_GET

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        headers = {**dict(self.headers.items()), "Host": urlsplit(self.upstream).netloc}
        connection = http.client.HTTPConnection(urlsplit(self.upstream).netloc, timeout=30)
        try:
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            kept = [(key, value) for key, value in answer.getheaders() if key.lower() not in _OURS]
            return answer.status, kept, answer.read()
        finally:
            connection.close()


@contextmanager
def fault_proxy(upstream: str) -> Iterator[Proxy]:
    """Yields a proxy in front of `upstream` that ends with the block."""
    handler: Any = type("Handler", (_Faulty,), {"upstream": upstream, "lock": Lock()})
    with serving(handler) as url:
        handler.proxy = Proxy(url)
        try:
            yield handler.proxy
        finally:
            handler.proxy.released.set()


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Yields the address of a server that ends with the block."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
