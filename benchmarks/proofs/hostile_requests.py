"""Proves that no request ends a server: `python -m benchmarks.proofs.hostile_requests RUN [--requests=2000]`.

Sends mutations of a good request; each must get 200, 400 or 413 with one line. Then SIGTERM comes while 16 requests are
open: each must be answered.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.proofs.equal_answers import started

_PIECES = (
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b'"',
    b"NaN",
    b"1e999",
    b"-0",
    b"null",
    b"\xff",
    b"\0",
    b'{"b64":"A"}',
    b"9" * 400,
)
_VALUES: tuple[Any, ...] = (
    None, True, "", "a" * 999, 1e308, -1, 10**400, [], {}, [[]], {"b64": 1}, {"b64": "iVBORw0KGgo="},
    {"__class__": "x"}, [None],
)  # fmt: skip


def mutated(good: list[Any], draw: random.Random) -> bytes:
    """Returns a request that is wrong in one of several ways, or by chance none."""
    body = json.dumps({"instances": good}).encode()
    kind = draw.randrange(4)
    if kind == 0:
        return draw.randbytes(draw.randrange(3000))
    if kind == 1:
        return body[: draw.randrange(len(body))]
    if kind == 2:
        at = draw.randrange(len(body))
        return body[:at] + draw.choice(_PIECES) + body[at + draw.randrange(5) :]
    instances = [draw.choice((*_VALUES, good[0])) for _ in range(draw.randrange(4))]
    return json.dumps(draw.choice([instances, {"instances": instances}, {"instances": draw.choice(_VALUES)}])).encode()


def ask(port: int, body: bytes) -> tuple[int, str]:
    """Returns the status and the error of one request."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/predict", body)
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer.get("error", "")


def main() -> None:
    """Prints how often each status came; exits with 1 if one was wrong."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    cli.add_argument("run")
    cli.add_argument("--requests", type=int, default=2000)
    cli.add_argument("--port", type=int, default=8095)
    args = cli.parse_args()
    about = json.loads(Path(args.run, "model", "serving.json").read_text(encoding="utf-8"))
    shape = about["image"] or next(iter(about["inputs"].values()))[1]
    good = np.zeros((1, *shape), int).tolist()
    server, draw, statuses = started(args.run, args.port), random.Random(0), Counter[int]()
    try:
        for _ in range(args.requests):
            status, error = ask(args.port, mutated(good, draw))
            statuses[status] += 1
            if status not in (200, 400, 413) or "\n" in error:
                raise SystemExit(f"status {status}: {error}")
        assert ask(args.port, b" " * 1_500_001)[0] == 413
        body = json.dumps({"instances": good * 100}).encode()
        with ThreadPoolExecutor(16) as clients:
            open_requests = [clients.submit(ask, args.port, body) for _ in range(16)]
            time.sleep(0.3)
            server.terminate()
            ended = Counter(future.result()[0] for future in open_requests)
    finally:
        server.terminate()
        code = server.wait()
    print(f"{args.requests} hostile requests: {dict(statuses)}; SIGTERM with 16 open: {dict(ended)}, exit code {code}")
    sys.exit(ended != {200: 16})


if __name__ == "__main__":
    main()
