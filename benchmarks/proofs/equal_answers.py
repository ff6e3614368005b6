"""Proves that an answer depends on its row alone: `python -m benchmarks.proofs.equal_answers RUN [--splits=1000]`.

RUN is a run on data whose evaluation part has rows. Its server gets 500 of them in random splits into requests, from
8 clients at once; each answer must equal, bit by bit, what `trainer.predict` writes.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np


def ask(port: int, instances: Sequence[Any]) -> Any:
    """Returns the predictions of one request."""
    body = json.dumps({"instances": instances}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/predict", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["predictions"]


def started(run: str, port: int, *flags: str) -> subprocess.Popen[bytes]:
    """Returns a server's process once it has loaded its model."""
    return once_healthy(subprocess.Popen([sys.executable, "-m", "trainer.serve", run, f"--port={port}", *flags]), port)


def once_healthy(server: subprocess.Popen[bytes], port: int) -> subprocess.Popen[bytes]:
    """Returns a server's process once it answers; ends it and exits if it does not within two minutes."""
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return server
        except OSError:
            if server.poll() is not None:
                break
            time.sleep(0.2)
    server.kill()
    raise SystemExit(f"{server.args!r} does not begin to answer")


def splits(rows: Sequence[Any], draw: random.Random) -> list[Sequence[Any]]:
    """Returns the rows in requests of 1 to 40."""
    requests, at = [], 0
    while at < len(rows):
        count = draw.randint(1, 40)
        requests.append(rows[at : at + count])
        at += count
    return requests


def main() -> None:
    """Prints how many splits agreed; exits with 1 if an answer differs."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    cli.add_argument("run")
    cli.add_argument("--splits", type=int, default=1000)
    cli.add_argument("--rows", type=int, default=500)
    cli.add_argument("--port", type=int, default=8097)
    args = cli.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "predictions.npz")
        subprocess.run([sys.executable, "-m", "trainer.predict", args.run, f"--out={out}"], check=True)
        expected = np.load(out)["predictions"][: args.rows]
    rows = evaluation_rows(args.run, len(expected))
    server, draw, wrong = started(args.run, args.port), random.Random(0), 0
    try:
        with ThreadPoolExecutor(8) as clients:
            for _ in range(args.splits):
                requests = splits(rows, draw)
                answers = [row for part in clients.map(lambda part: ask(args.port, part), requests) for row in part]
                wrong += np.array(answers, expected.dtype).tobytes() != expected.tobytes()
    finally:
        server.terminate()
        server.wait()
    print(f"{args.splits - wrong} of {args.splits} splits of {len(rows)} rows gave the bytes of trainer.predict")
    sys.exit(bool(wrong))


def evaluation_rows(run: str, count: int) -> list[Any]:
    """Returns the rows of the run's evaluation part, as JSON has them."""
    from trainer.data.sources import load_dataset
    from trainer.run.requested_run import make_parser, read_request

    dataset = load_dataset(read_request(make_parser("rows", ""), [run]).config, trains=False)
    part = dataset.evaluation or dataset.train
    rows: list[Any] = np.asarray(part.first(count)[0]).tolist()
    return rows


if __name__ == "__main__":
    main()
