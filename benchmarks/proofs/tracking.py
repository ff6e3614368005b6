"""Kills trainings at random moments and compares what a real MLflow server has of each with its stats.jsonl.

`python -m benchmarks.proofs.tracking [--cases=30]`: each case is a training on 1 replica, 2 replicas or 2 workers,
killed by SIGKILL once or twice and resumed, mostly on another of these; in every fifth the server is stopped midway.
Needs mlflow, and prints a line a case.
"""

import argparse
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

STEPS, REPORT, PAUSE_S = 300, 10, 0.02
PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--cases", type=int, default=30, help="default: %(default)s")
PARSER.add_argument("--first", type=int, default=0, help="number of the first case, and seed of its draws")
SHAPES = ("1 replica", "2 replicas", "2 workers")


def slow_steps() -> list[Any]:
    """Returns callbacks that make each step take a while without work, so that a kill hits it."""
    import keras

    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            time.sleep(PAUSE_S)

    return [Slow()]


def free_port() -> int:
    """Returns a port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """Runs `mlflow server` with SQLite on 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self.address = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        """Starts the server and waits until it answers."""
        store, files = f"sqlite:///{self._folder}/mlflow.db", str(self._folder / "files")
        command = [sys.executable, "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={self._port}", "--workers=1",
                   f"--backend-store-uri={store}", f"--artifacts-destination={files}"]  # fmt: skip
        environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
        with open(self._folder / "server.log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        until = time.monotonic() + 120
        while time.monotonic() < until:
            with suppress(OSError), urllib.request.urlopen(f"{self.address}/health", timeout=5):
                return
            time.sleep(0.5)
        raise TimeoutError((self._folder / "server.log").read_text())

    def stop(self) -> None:
        """Ends the server and its workers."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def training(folder: Path, shape: str, track: str, *flags: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts the processes of a training, each in a group of its own; kills those that are left at the end."""
    flags = (f"--job_dir={folder}", f"--track={track}", f"--replicas={2 if shape == '2 replicas' else 1}", *flags)
    command = [sys.executable, "-m", "trainer.task", "--model=mlp", "--data=digits", f"--steps={STEPS}",
               f"--report_every_steps={REPORT}", "--checkpoint_every_steps=40", "--global_batch_size=8",
               "--evaluation_fraction=0.1", "--worker_timeout_seconds=60", "--jit_compile=false",
               "--callbacks=benchmarks.proofs.tracking:slow_steps", *flags]  # fmt: skip
    addresses, processes = [f"127.0.0.1:{free_port()}" for _ in range(1 + (shape == "2 workers"))], []
    for index in range(len(addresses)):
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
        if len(addresses) > 1:
            task = {"type": "worker", "index": index}
            environment["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
        with open(f"{folder}.log", "ab") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True))
    try:
        yield processes
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def reports(folder: Path) -> int:
    """Returns the number of lines in stats.jsonl."""
    file = folder / "stats.jsonl"
    return file.read_text().count("\n") if file.is_file() else 0


def await_reports(folder: Path, processes: list[subprocess.Popen[bytes]], more: int) -> None:
    """Waits until the run has written so many more lines, or has ended."""
    wanted, until = reports(folder) + more, time.monotonic() + 300
    while reports(folder) < wanted and all(process.poll() is None for process in processes):
        if time.monotonic() > until:
            raise TimeoutError(folder)
        time.sleep(0.05)


def expected(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns the losses and metrics in stats.jsonl by the names that a tracker has, as (step, value)."""
    history: dict[str, list[tuple[int, float]]] = {}
    for line in (folder / "stats.jsonl").read_text().splitlines():
        entry = json.loads(line)
        before, after = "epoch/" if entry["kind"] == "epoch" else "", f".{entry.get('rollbacks', 0) + 1}"
        for name, value in {**entry.get("losses", {}), **entry.get("metrics", {})}.items():
            if value is not None:
                shown = f"{before}{name}{after if 'rollbacks' in entry else ''}"
                history.setdefault(shown, []).append((entry["step"], value))
    return history


def _equal(points: list[tuple[int, float]], others: list[tuple[int, float]]) -> bool:
    """Returns whether steps are equal, and values up to what float32 rounds otherwise on other numbers of replicas."""
    same = [(step, other) for (step, _), (_, other) in zip(points, others, strict=False)] == others
    near = all(math.isclose(a, b, rel_tol=1e-5) for (_, a), (_, b) in zip(points, others, strict=False))
    return same and near and len(points) == len(others)


def verdict(server: str, experiment: str, folder: Path) -> str:
    """Returns what differs between the server's only run and the files; "" if nothing does."""
    from mlflow import MlflowClient

    client = MlflowClient(server)
    known = client.get_experiment_by_name(experiment)
    runs = client.search_runs([known.experiment_id])
    if [run.info.status for run in runs] != ["FINISHED"]:
        return f"runs: {[run.info.status for run in runs]}"
    wanted, problems = expected(folder), []
    for name in runs[0].data.metrics:
        points = [(metric.step, metric.value) for metric in client.get_metric_history(runs[0].info.run_id, name)]
        if len({step for step, _ in points}) < len(points):
            problems.append(f"{name}: a step twice")
        if name in wanted and not _equal(points, wanted[name]):
            problems.append(f"{name}: {set(points) ^ set(wanted[name])}")
    problems += [f"{name} is missing" for name in wanted.keys() - runs[0].data.metrics.keys()]
    return "; ".join(problems)


def case(number: int, folder: Path, server: Server, draw: random.Random) -> str:
    """Trains, kills, resumes; returns a line on how it went."""
    experiment, job_dir = f"case-{number}", folder / f"case-{number}"
    track, shapes, outage = f"mlflow:{server.address}#{experiment}", [], number % 5 == 4
    for _ in range(draw.randint(1, 2)):
        shapes.append(draw.choice(SHAPES))
        with training(job_dir, shapes[-1], track) as processes:
            await_reports(job_dir, processes, draw.randint(0, 6))
            time.sleep(draw.uniform(0, 2 * REPORT * PAUSE_S))
    shapes.append(draw.choice(SHAPES))
    with training(job_dir, shapes[-1], track) as processes:
        if outage:
            await_reports(job_dir, processes, 2)
            server.stop()
            await_reports(job_dir, processes, 8)
            server.start()
        codes = [process.wait(300) for process in processes]
    sent = [
        line for line in Path(f"{job_dir}.log").read_text().splitlines() if "steps sent" in line or "not all" in line
    ]
    if "not all" in "".join(sent[-1:]):  # the server came back too late: the command of that line sends the rest
        command = [sys.executable, "-m", "deploy", "track", str(job_dir), f"--track={track}"]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
    problem = verdict(server.address, experiment, job_dir) if not any(codes) else f"exit codes {codes}"
    result = json.loads((job_dir / "result.json").read_text())
    how = f"{', '.join(shapes)}{', server stopped midway' if outage else ''}; {result.get('restarts')} restarts, "
    return f"case {number}: {how}{result.get('steps_repeated')} steps repeated: {problem or 'equal'} ({sent[-1:]})"


def main() -> int:
    """Runs the cases; returns 0 if all are equal."""
    args = PARSER.parse_args()
    good = 0
    with tempfile.TemporaryDirectory() as scratch:
        server = Server(Path(scratch))
        try:
            for number in range(args.first, args.first + args.cases):
                line = case(number, Path(scratch), server, random.Random(number))
                good += ": equal (" in line
                print(line, flush=True)
        finally:
            server.stop()
    print(f"{good} of {args.cases} equal", flush=True)
    return int(good < args.cases)


if __name__ == "__main__":
    sys.exit(main())
