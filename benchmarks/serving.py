"""Measures a server of a model against one call of the same model for each request: `python -m benchmarks.serving RUN`.

Both stand behind the same HTTP server, in turns in one run, at 1, 8 and 64 clients, each with a row a request: requests
per second, and the median and 99th percentile of the time of one, in milliseconds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection
from pathlib import Path

import numpy as np

from tests.servers import once_healthy, started

CLIENTS = (1, 8, 64)
PLAIN = """
import sys, json, uvicorn, keras, numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
model = keras.models.load_model(sys.argv[1] + "/model/model.keras", compile=False)
def answer(body):
    x = np.array(json.loads(body)["instances"], "float32")
    return JSONResponse({"predictions": np.asarray(model(x, training=False)).tolist()})
async def predict(request):
    return await run_in_threadpool(answer, await request.body())
async def health(request):
    return Response()
app = Starlette(routes=[Route("/predict", predict, methods=["POST"]), Route("/health", health)])
uvicorn.run(app, port=int(sys.argv[2]), log_level="warning")
"""


def load(port: int, body: bytes, clients: int, seconds: float) -> tuple[float, float, float]:
    """Returns requests per second, and the median and 99th percentile of their times in milliseconds."""
    times: list[float] = []
    until = time.perf_counter() + seconds

    def client() -> None:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        while time.perf_counter() < until:
            began = time.perf_counter()
            connection.request("POST", "/predict", body)
            response = connection.getresponse()
            response.read()
            if response.status != 200:
                raise SystemExit(f"status {response.status}")
            times.append(time.perf_counter() - began)
        connection.close()

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    milliseconds = sorted(1000 * one for one in times)
    return len(times) / seconds, statistics.median(milliseconds), milliseconds[int(0.99 * (len(milliseconds) - 1))]


def main() -> None:
    """Prints a table: a line for each number of clients."""
    cli = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    cli.add_argument("run")
    cli.add_argument("--seconds", type=float, default=8)
    cli.add_argument("--port", type=int, default=8093)
    args = cli.parse_args()
    about = json.loads(Path(args.run, "model", "serving.json").read_text(encoding="utf-8"))
    shape = about["image"] or next(iter(about["inputs"].values()))[1]
    body = json.dumps({"instances": np.zeros((1, *shape), int).tolist()}).encode()
    served = started(args.run, args.port)
    plain = subprocess.Popen([sys.executable, "-c", PLAIN, args.run, str(args.port + 1)])
    try:
        once_healthy(plain, args.port + 1)
        print("clients  served/s  median ms  99 % ms   plain/s  median ms  99 % ms  ratio")
        for clients in CLIENTS:
            for port in (args.port, args.port + 1):
                load(port, body, clients, 1)  # warm
            ours, theirs = (load(port, body, clients, args.seconds) for port in (args.port, args.port + 1))
            cells = "  ".join(f"{value:9.1f}" for value in (*ours, *theirs))
            print(f"{clients:7}{cells}  {ours[0] / theirs[0]:5.2f}", flush=True)
    finally:
        for process in (served, plain):
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
