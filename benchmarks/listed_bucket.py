"""Lists a bucket of any number of objects, as Cloud Storage's JSON API does, a page at a time; it holds none of them.

https://cloud.google.com/storage/docs/json_api/v1/objects/list
"""

import json
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

_PAGE = 1000  # objects, the most that the service gives at a time


class _Listing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60

    def __init__(self, objects: int, *given: Any) -> None:
        self._objects = objects
        super().__init__(*given)

    def do_GET(self) -> None:
        """Answers with the page that the token names; the objects are class folders of 1,000 images."""
        args = parse_qs(urlsplit(self.path).query)
        start = int(args.get("pageToken", ["0"])[0])
        end = min(start + _PAGE, self._objects)
        items = [_item(args["prefix"][0], number) for number in range(start, end)]
        body = json.dumps({"items": items, **({"nextPageToken": str(end)} if end < self._objects else {})}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *given: Any) -> None:
        """Logs nothing."""


def _item(prefix: str, number: int) -> dict[str, str]:
    name = f"{prefix}class-{number // 1000:05d}/photo-{number % 1000:03d}.jpeg"
    return {"name": name, "size": "50000", "crc32c": "AAAAAA==", "generation": str(1_700_000_000_000_000 + number)}


def _serve(objects: int, address: Any) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Listing, objects)) as server:
        address.send(f"http://127.0.0.1:{server.server_address[1]}")
        server.serve_forever()


@contextmanager
def listed_bucket(objects: int) -> Iterator[str]:
    """Yields the address of a server with so many objects in every bucket, a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(objects, theirs), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.terminate()
        process.join()
