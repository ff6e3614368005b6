"""Measures `trainer.serve` against ten lines of starlette with the same model: `python -m
benchmarks.serving`.

Both servers run at once, and are asked in turn: one row on a kept connection, 1,000 rows (100
images) in a request, 50 clients of one row each, and one row beside 100 requests of 1.4 MB, as soon
as those are sent.
"""

import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

from benchmarks.runner import make_parser, print_table, program, save
from deploy.platform.local import free_addresses
from tests.servers import once_healthy, started
from trainer.run.export import export

PARSER = make_parser(__doc__, repeats=5)
STARLETTE = """
import sys, keras, tensorflow as tf, uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
call = tf.function(keras.models.load_model(sys.argv[1]), reduce_retracing=True)
async def health(request):
    return Response()
async def predict(request):
    instances = tf.constant((await request.json())["instances"])
    return JSONResponse({"predictions": call(instances).numpy().tolist()})
app = Starlette(routes=[Route("/health", health), Route("/predict", predict, methods=["POST"])])
uvicorn.run(app, port=int(sys.argv[2]), access_log=False, log_level="warning")
"""


def networks() -> dict[str, keras.Model]:
    """Returns a network for tables and one for images of the size of MNIST, by name."""
    layers = keras.layers
    image = keras.Input((28, 28, 1))
    x = layers.MaxPooling2D()(layers.Conv2D(32, 3, activation="relu")(image))
    x = layers.Flatten()(layers.MaxPooling2D()(layers.Conv2D(64, 3, activation="relu")(x)))
    table = keras.Sequential([keras.Input((8,)), layers.Dense(32, "relu"), layers.Dense(1)])
    return {"table": table, "images": keras.Model(image, layers.Dense(10)(x))}


def body(rows: Any) -> bytes:
    """Returns a request with these rows."""
    content = json.dumps({"instances": rows.tolist()}).encode()
    return (
        b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(content) + content
    )


async def ask(port: int, request: bytes, times: int) -> list[float]:
    """Returns the seconds of each of so many requests on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    clock = asyncio.get_running_loop().time
    seconds = []
    for _ in range(times):
        began = clock()
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert b" 200 " in head[:20], head
        await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        seconds.append(clock() - began)
    writer.close()
    return seconds


async def one_row(port: int, one: bytes, many: bytes, large: bytes) -> float:
    """Returns the median milliseconds of one row on a kept connection."""
    return 1e3 * statistics.median(await ask(port, one, 300))


async def many_rows(port: int, one: bytes, many: bytes, large: bytes) -> float:
    """Returns the median milliseconds of many rows in one request."""
    return 1e3 * statistics.median(await ask(port, many, 15))


async def clients(port: int, one: bytes, many: bytes, large: bytes) -> float:
    """Returns the requests a second of 50 clients of one row each."""
    clock = asyncio.get_running_loop().time
    began = clock()
    await asyncio.gather(*(ask(port, one, 40) for _ in range(50)))
    return 2000 / (clock() - began)


async def beside_large_ones(port: int, one: bytes, many: bytes, large: bytes) -> float:
    """Returns the seconds of one row, asked for half a second after 100 large requests."""
    others = [asyncio.create_task(ask(port, large, 1)) for _ in range(100)]
    await asyncio.sleep(0.5)
    (seconds,) = await ask(port, one, 1)
    await asyncio.gather(*others)
    return seconds


MEASURED = {
    "one row, ms": one_row,
    "many rows, ms": many_rows,
    "50 clients, requests/s": clients,
    "one row beside 100 large ones, s": beside_large_ones,
}


@program
def main() -> None:
    """Prints the tables and saves the raw numbers."""
    repeats = PARSER.parse_args().repeats
    raw = {}
    for name, network in networks().items():
        with tempfile.TemporaryDirectory() as folder:
            export(network, Path(folder) / "model", None)
            ports = [int(address.rpartition(":")[2]) for address in free_addresses(2)]
            ours = started(folder, ports[0])
            plain = [sys.executable, "-c", STARLETTE, f"{folder}/model/model.keras", str(ports[1])]
            theirs = once_healthy(subprocess.Popen(plain), ports[1])
            rows = np.random.default_rng(0).normal(size=(1000, *network.input_shape[1:])).round(3)
            many = rows if name == "table" else rows[:100]  # which is all that a request can hold
            places = range(int(1.4e6 / len(body(many)) * len(many)))
            requests = body(rows[:1]), body(many), body(many.take(places, axis=0, mode="wrap"))
            try:
                values = {
                    key: [
                        [asyncio.run(work(port, *requests)) for port in ports]
                        for _ in range(repeats)
                    ]
                    for key, work in MEASURED.items()
                }
            finally:
                for server in (ours, theirs):
                    server.terminate()
                    server.wait()
        raw[name] = values
        lines = ["| | trainer.serve | starlette | ratio |", "|---|--:|--:|--:|"]
        for key, rounds in values.items():
            ours_, theirs_, ratio = (
                statistics.median(of)
                for of in (*zip(*rounds, strict=True), [first / second for first, second in rounds])
            )
            lines.append(f"| {key} | {ours_:,.3g} | {theirs_:,.3g} | {ratio:.2f} |")
        print_table(f"{name}; many rows are {len(many):,}", lines)
    save("serving", values=raw)
