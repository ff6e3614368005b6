"""Runs a job's workers as local processes, and restarts and stops them as Vertex AI does."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from deploy.tiers.tier import Tier
from trainer.base.errors import DONE, FAULT, INTERRUPTED, USER_MUST_CHANGE, UserError
from trainer.base.run_files.job_files import CHECKPOINTS, LOGS, MODEL, step_of


@dataclass(frozen=True)
class LocalWorker:
    """Describes one process of a local job."""

    name: str  # as in Vertex AI's logs: workerpool0-0
    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]  # in addition to that of this process
    cores: frozenset[int]


def local_workers(
    tier: Tier, arguments: Sequence[str], job_dir: Path, job_id: str, command: str = "",
    program: tuple[str, Mapping[str, str]] = ("", {}),
) -> list[LocalWorker]:  # fmt: skip
    """Returns the workers of `tier`, chief first, without reduction servers and evaluators.

    `arguments`, `program`: as a `Workload` has them. `command`: what the user typed, for run.json; empty: the chief's
    own command is recorded.
    """
    module, variables = program
    pools = tier.spec["workerPoolSpecs"][:2]
    counts = [int(pool.get("replicaCount", 1)) for pool in pools]
    addresses, devices = iter(free_addresses(sum(counts))), _devices(tier.accelerators, sum(counts))
    cluster = {f"workerpool{place}": [next(addresses) for _ in range(count)] for place, count in enumerate(counts)}
    # The workers share the cores of this process if these are fewer.
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    share = max(1, len(cores) // sum(counts))
    shared = {
        "CLOUD_ML_JOB_ID": job_id,
        "CLOUD_ML_PROJECT_ID": "0",
        "AIP_MODEL_DIR": f"{job_dir}/{MODEL}/",
        "AIP_CHECKPOINT_DIR": f"{job_dir}/{CHECKPOINTS}/",
        "AIP_TENSORBOARD_LOG_DIR": f"{job_dir}/{LOGS}/",
        "PYTHONUNBUFFERED": "1",
        "TRAINER_COMMAND": command,
        "TF_NUM_INTRAOP_THREADS": str(share),
        "OMP_NUM_THREADS": str(share),
        **variables,
    }
    result: list[LocalWorker] = []
    for place, (pool, role) in enumerate(zip(pools, ("chief", "worker"), strict=False)):
        task = pool.get("pythonPackageSpec") or pool["containerSpec"]
        of_tier = {variable["name"]: variable.get("value", "") for variable in task.get("env", [])}
        # An image's own entry point is taken for the trainer.
        of_image = task.get("command", [])[2:] if task.get("command", [])[1:2] == ["-m"] else []
        runs = module or task.get("pythonModule") or "".join(of_image) or "trainer.task"
        for index in range(counts[place]):
            # Vertex AI sets both for a single worker, too.
            spec = {
                "cluster": cluster, "environment": "cloud", "task": {"type": f"workerpool{place}", "index": index},
            }  # fmt: skip
            config = {
                "cluster": dict(zip(("chief", "worker"), cluster.values(), strict=False)), "environment": "cloud",
                "task": {"type": role, "index": index, "cloud": job_id},
            }  # fmt: skip
            of_cluster = {"TF_CONFIG": json.dumps(config), "CLUSTER_SPEC": json.dumps(spec)}
            number = len(result)
            own_cores = frozenset(cores[(number * share + core) % len(cores)] for core in range(share))
            environment = {**of_tier, **shared, **devices[number], **of_cluster}
            words = (*task.get("args", []), *arguments)
            result.append(LocalWorker(f"workerpool{place}-{index}", runs, words, environment, own_cores))
    return result


def free_addresses(count: int) -> list[str]:
    """Returns `count` local addresses whose ports are free now.

    The ports are below the range of outgoing connections, which could take one before it is used.
    """
    addresses: list[str] = []
    while len(addresses) < count:
        port = 10_000 + secrets.randbelow(20_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            addresses += [f"127.0.0.1:{port}"] if f"127.0.0.1:{port}" not in addresses else []
    return addresses


def _devices(accelerators: int, workers: int) -> list[dict[str, str]]:
    """Splits the GPUs that this process may use between the workers; logical CPU devices simulate missing ones."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None and shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        query = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        visible = ",".join(query.stdout.split()) if query.returncode == 0 else ""
    gpus = [number for number in (visible or "").split(",") if number and number != "-1"]
    if not gpus or not accelerators:
        return [{"CUDA_VISIBLE_DEVICES": "", "TRAINER_SIMULATED_DEVICES": str(accelerators)}] * workers
    if len(gpus) < accelerators * workers:
        raise UserError(
            f"the tier has {workers} x {accelerators} accelerators, this machine {len(gpus)} GPUs: use a smaller "
            "tier, or hide them to simulate all (CUDA_VISIBLE_DEVICES=)"
        )
    shares = [gpus[first : first + accelerators] for first in range(0, workers * accelerators, accelerators)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]


EXIT_TIMEOUT_S = 20.0  # for the other workers after one has failed, or for all when the job is stopped
_POLL_S = 0.05

PrintWorkerLine = Callable[[str, str], None]  # (worker's name, line)


@dataclass(frozen=True)
class JobEnd:
    """Holds a finished job's exit code (as the trainer defines them), its state in Vertex AI's terms, and its error."""

    code: int
    state: str
    error: str = ""
    restarts: int = 0
    status: int = 0  # of the worker that failed the job, as a container reports it


@dataclass
class _RunningWorker:
    """Holds a worker, its current process, the thread that reads its output, and how often it was restarted."""

    worker: LocalWorker
    process: "subprocess.Popen[str]"
    reader: threading.Thread
    restarts: int = 0


@dataclass
class LocalJob:
    """Represents one local job. Call `run` once, and `stop` from any thread or signal handler."""

    workers: Sequence[LocalWorker]
    print_line: PrintWorkerLine
    restarts: int = 0  # allowed per worker, after a non-zero exit status
    _stopping: threading.Event = field(default_factory=threading.Event)

    def run(self) -> JobEnd:
        """Runs the job to its end; leaves no process behind."""
        running: list[_RunningWorker] = []
        try:
            for worker in self.workers:
                running.append(self._start(worker))
            return self._watch(running)
        finally:
            self._terminate(running)

    def stop(self) -> None:
        """Makes every worker save its state and exit."""
        self._stopping.set()

    def _start(self, worker: LocalWorker, restarts: int = 0) -> _RunningWorker:
        process = subprocess.Popen(
            [sys.executable, "-m", worker.module, *worker.arguments],
            env={**os.environ, **worker.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # so that Ctrl-C reaches only this process, which sends one signal
        )
        if hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):  # no such core
                os.sched_setaffinity(process.pid, worker.cores)  # long before it has imported what looks at its cores
        self._print(worker.name, f"starts as process {process.pid}")
        assert process.stdout is not None

        def forward(output: IO[str] = process.stdout) -> None:
            with output:
                for line in output:
                    self._print(worker.name, readable(line))

        reader = threading.Thread(target=forward, daemon=True)
        reader.start()
        return _RunningWorker(worker, process, reader, restarts)

    def _print(self, name: str, line: str) -> None:
        """Prints a line; ignores a full disk or closed terminal, so that the worker's pipe is still read."""
        with contextlib.suppress(OSError, ValueError):
            self.print_line(name, line)

    def _watch(self, running: list[_RunningWorker]) -> JobEnd:
        while not self._stopping.wait(_POLL_S):
            codes = [worker.process.poll() for worker in running]
            restarts = sum(worker.restarts for worker in running)
            if codes[0] == DONE:  # the job ends with its chief
                return JobEnd(DONE, "SUCCEEDED", restarts=restarts)
            for place, code in enumerate(codes):
                failed = running[place]
                if code and failed.restarts >= self.restarts:  # the others get time to log and exit
                    deadline = time.monotonic() + EXIT_TIMEOUT_S
                    while time.monotonic() < deadline and any(worker.process.poll() is None for worker in running):
                        time.sleep(_POLL_S)
                    failed.reader.join(EXIT_TIMEOUT_S)
                    error = f"The replica {failed.worker.name} exited with a non-zero status of {_status(code)}."
                    of_job = code if code in (USER_MUST_CHANGE, INTERRUPTED) else FAULT
                    return JobEnd(of_job, "FAILED", error, restarts, _status(code))
                if code:  # restarts it in place
                    failed.reader.join(EXIT_TIMEOUT_S)
                    again = f"restart {failed.restarts + 1} of {self.restarts}"
                    self._print(failed.worker.name, f"exited with status {_status(code)}: {again}")
                    running[place] = self._start(failed.worker, failed.restarts + 1)
        self._print("all", f"stopping: the workers save their state and exit within {EXIT_TIMEOUT_S:.0f} s")
        self._terminate(running)
        ends = {worker.process.returncode for worker in running}
        killed = f"killed after {EXIT_TIMEOUT_S:.0f} s" if -signal.SIGKILL in ends else ""
        return JobEnd(INTERRUPTED if ends != {DONE} else DONE, "CANCELLED", killed)

    def _terminate(self, running: Sequence[_RunningWorker]) -> None:
        """Sends SIGTERM, on which the trainer saves its state, then SIGKILL to what still runs, with its processes."""
        for end in (subprocess.Popen.terminate, kill_group):
            deadline = time.monotonic() + EXIT_TIMEOUT_S
            for worker in running:
                if worker.process.poll() is None:
                    end(worker.process)
            for worker in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(max(0.0, deadline - time.monotonic()))
        for worker in running:
            worker.reader.join(EXIT_TIMEOUT_S)


def kill_group(process: "subprocess.Popen[str]") -> None:
    """Kills a process that leads its session, and those that it started."""
    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
        os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def on_signals(handler: Callable[[int, FrameType | None], Any], *numbers: int) -> Iterator[None]:
    """Calls `handler` for the signals `numbers`, and once for SIGHUP unless nohup ignores it, within the block.

    Does nothing in another thread than the main one, in which alone Python handles signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hangup = getattr(signal, "SIGHUP", None)

    def handle(number: int, frame: FrameType | None) -> None:
        if number == hangup:  # the shell sends it, and the kernel again when the shell ends
            signal.signal(number, lambda number, frame: None)
        handler(number, frame)

    handled = [*numbers, hangup] if hangup and signal.getsignal(hangup) != signal.SIG_IGN else numbers
    before = {number: signal.signal(number, handle) for number in handled}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def readable(line: str) -> str:
    """Returns a line of a worker's output as Cloud Logging shows it: the message if it is JSON."""
    with contextlib.suppress(ValueError):
        entry = json.loads(line)
        if isinstance(entry, dict) and "message" in entry:
            severity = entry.get("severity", "INFO")
            prefix = "" if severity == "INFO" else f"{severity.lower()}: "
            return f"{prefix}{entry['message']}"
    return line.rstrip("\n")


def checkpoint_step(job_dir: Path) -> int | None:
    """Returns the step of the newest checkpoint, each a folder that is created atomically; None if there is none."""
    steps = [step_of(path.name) for path in (job_dir / CHECKPOINTS).glob("*")]
    return max((step for step in steps if step >= 0), default=None)


def _status(code: int) -> int:
    """Returns the exit status as a container reports it: 128 + n for a process that signal n killed."""
    return code if code >= 0 else 128 - code
