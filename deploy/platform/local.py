"""Runs a job's workers as local processes, and restarts and stops them as Vertex AI does."""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from types import FrameType
from typing import IO, Any, NamedTuple

from deploy.tiers.spec_rules import task_of
from deploy.tiers.tier import Tier
from trainer.base.errors import DONE, FAULT, INTERRUPTED, USER_MUST_CHANGE, UserError
from trainer.base.limit_watch import ask_gpus
from trainer.base.run_files.job_files import CHECKPOINTS, LOGS, MODEL


class LocalProgram(NamedTuple):
    """Holds what the workers of a local job run.

    `module`: "" for that of the tier's file; `folder`: where, if given.

    `variables`: of their environment.
    """

    module: str = ""
    variables: Mapping[str, str] = {}
    folder: Path | None = None


_OF_FILE = LocalProgram()


@dataclass(frozen=True)
class LocalWorker:
    """Describes one process of a local job."""

    name: str  # as in Vertex AI's logs: workerpool0-0
    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]  # its variables, in addition to those of this process
    cores: frozenset[int]
    folder: Path | None = None  # in which it runs, if not in this one


def local_workers(
    tier: Tier,
    arguments: Sequence[str],
    job_dir: Path,
    job_id: str,
    command: str = "",
    program: LocalProgram = _OF_FILE,
) -> list[LocalWorker]:
    """Returns the workers of `tier`, the chief first, without reduction servers and evaluators.

    `arguments`: as a `Workload` has them. `command`: what the user typed, for run.json; if it is
        empty, the chief's own command is recorded.
    """
    addresses = free_addresses(tier.workers)
    devices = _devices(tier.accelerators, tier.workers)
    cluster = {"workerpool0": addresses[:1]}
    if addresses[1:]:
        cluster["workerpool1"] = addresses[1:]
    # Each worker gets its part of this process's cores; if there are more workers than cores, they
    # share them.
    cores = list(range(os.cpu_count() or 1))
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // tier.workers)
    # What all of them get, as from Vertex AI.
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
        **program.variables,
    }
    result: list[LocalWorker] = []
    roles = ("chief", "worker")
    for number in range(tier.workers):
        pool = min(number, 1)
        index = number - pool
        task = task_of(tier.spec["workerPoolSpecs"][pool])
        variables = {item["name"]: item.get("value", "") for item in task.get("env", [])}
        # The module in a command such as `python -m MODULE`; an image's own entry point is assumed
        # to be the trainer.
        command_module = re.match("[^ ]+ -m ([^ ]+)", " ".join(task.get("command", [])))
        in_command = command_module[1] if command_module else "trainer.task"
        # Vertex AI sets TF_CONFIG and CLUSTER_SPEC for a single worker, too.
        spec = {
            "cluster": cluster,
            "environment": "cloud",
            "task": {"type": f"workerpool{pool}", "index": index},
        }
        config = {
            "cluster": dict(zip(roles, cluster.values(), strict=False)),
            "environment": "cloud",
            "task": {"type": roles[pool], "index": index, "cloud": job_id},
        }
        environment = {
            **variables,
            **shared,
            **devices[number],
            "TF_CONFIG": json.dumps(config),
            "CLUSTER_SPEC": json.dumps(spec),
        }
        own_cores = (cores[(number * share + core) % len(cores)] for core in range(share))
        result.append(
            LocalWorker(
                f"workerpool{pool}-{index}",
                program.module or task.get("pythonModule", in_command),
                (*task.get("args", []), *arguments),
                environment,
                frozenset(own_cores),
                program.folder,
            )
        )
    return result


def free_addresses(count: int) -> list[str]:
    """Returns `count` local addresses, each with a port that is free now.

    The ports are below the range from which outgoing connections get theirs: one of those might
    take a port before the worker does.
    """
    addresses: list[str] = []
    while len(addresses) < count:
        port = 10_000 + secrets.randbelow(20_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            addresses += [f"127.0.0.1:{port}"] if f"127.0.0.1:{port}" not in addresses else []
    return addresses


def _devices(accelerators: int, workers: int) -> list[dict[str, str]]:
    """Returns for each worker the variables that give it its share of this machine's GPUs.

    Without GPUs, logical devices of the CPU simulate the `accelerators` of each worker. Raises
    UserError if there are GPUs, but too few.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        visible = ",".join(f"{index:.0f}" for (index,) in ask_gpus("index"))
    gpus = [number for number in visible.split(",") if number and number != "-1"]
    if not gpus or not accelerators:
        return [
            {"CUDA_VISIBLE_DEVICES": "", "TRAINER_SIMULATED_DEVICES": str(accelerators)}
        ] * workers
    if len(gpus) < accelerators * workers:
        raise UserError(
            f"the tier has {workers} x {accelerators} accelerators, this machine {len(gpus)} GPUs:"
            " use a smaller tier, or hide them to simulate all (CUDA_VISIBLE_DEVICES=)"
        )
    starts = range(0, workers * accelerators, accelerators)
    shares = [gpus[start : start + accelerators] for start in starts]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]


# how long to wait for the end of a worker's output, which a process that it left may still hold
LAST_OUTPUT_S = 5.0
# the time that workers get to exit after another one has failed, or when the job is stopped
EXIT_TIMEOUT_S = 20.0
_POLL_S = 0.05


class JobEnd(NamedTuple):
    """Holds how a local job ended."""

    code: int  # an exit code of the trainer
    state: str  # in Vertex AI's terms
    error: str = ""
    restarts: int = 0  # of all workers
    # the exit status, as a container reports it, of the worker that made the job fail
    status: int = 0


@dataclass
class _RunningWorker:
    """Holds a worker, its current process, the thread that reads its output, and how often it was
    restarted."""

    worker: LocalWorker
    process: "subprocess.Popen[str]"
    reader: Thread
    restarts: int = 0


@dataclass
class LocalJob:
    """Represents one local job.

    Call `run` once; any thread or signal handler may set `stopped`.
    """

    workers: Sequence[LocalWorker]
    print_line: Callable[[str, str], None]  # called with a worker's name and a line
    restarts: int = 0  # how often each worker may be restarted after a non-zero exit status
    stopped: Event = field(default_factory=Event)  # set to end it, alone or with other jobs

    def run(self) -> JobEnd:
        """Runs the job to its end and returns how it ended.

        No worker is left running, even after an exception.
        """
        running: list[_RunningWorker] = []
        try:
            for worker in self.workers:
                running.append(self._start(worker))
            # Restarts failing workers until the chief is done, one may not be restarted again, or
            # it is stopped.
            while not self.stopped.wait(_POLL_S):
                codes = [worker.process.poll() for worker in running]
                restarts = sum(worker.restarts for worker in running)
                if codes[0] == DONE:  # the job ends with its chief
                    return JobEnd(DONE, "SUCCEEDED", restarts=restarts)
                for place, failed in enumerate(running):
                    code = codes[place]
                    if not code:
                        continue
                    # as a container reports it: 128 + n after signal n
                    status = code if code > 0 else 128 - code
                    if failed.restarts >= self.restarts:  # the others get time to log and exit
                        deadline = time.monotonic() + EXIT_TIMEOUT_S
                        processes = [worker.process for worker in running]
                        while None in [process.poll() for process in processes]:
                            if time.monotonic() >= deadline:
                                break
                            time.sleep(_POLL_S)
                        failed.reader.join(LAST_OUTPUT_S)
                        error = (
                            f"The replica {failed.worker.name} exited with a non-zero status of"
                            f" {status}."
                        )
                        job_code = code if code in (USER_MUST_CHANGE, INTERRUPTED) else FAULT
                        return JobEnd(job_code, "FAILED", error, restarts, status)
                    failed.reader.join(LAST_OUTPUT_S)
                    restart = f"restart {failed.restarts + 1} of {self.restarts}"
                    self._print(failed.worker.name, f"exited with status {status}: {restart}")
                    running[place] = self._start(failed.worker, failed.restarts + 1)
            # It was stopped.
            self._print(
                "all",
                f"stopping: the workers save their state and exit within {EXIT_TIMEOUT_S:.0f} s",
            )
            self._terminate(running)
            statuses = {worker.process.returncode for worker in running}
            killed = f"killed after {EXIT_TIMEOUT_S:.0f} s" if -signal.SIGKILL in statuses else ""
            return JobEnd(INTERRUPTED if statuses != {DONE} else DONE, "CANCELLED", killed)
        finally:
            self._terminate(running)

    def _start(self, worker: LocalWorker, restarts: int = 0) -> _RunningWorker:
        """Starts a worker's process, and a thread that prints its output.

        `restarts`: how often it was restarted.
        """
        process = subprocess.Popen(
            [sys.executable, "-m", worker.module, *worker.arguments],
            env={**os.environ, **worker.environment},
            cwd=worker.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # so that Ctrl-C reaches only this process, which then sends each worker one signal
            start_new_session=True,
        )
        if hasattr(os, "sched_setaffinity"):
            with suppress(OSError):  # no such core
                # early, as libraries count the cores when the process imports them
                os.sched_setaffinity(process.pid, worker.cores)
        self._print(worker.name, f"starts as process {process.pid}")
        assert process.stdout is not None

        def forward(output: IO[str] = process.stdout) -> None:
            with output:
                for line in output:
                    self._print(worker.name, readable(line))

        reader = Thread(target=forward, daemon=True)
        reader.start()
        return _RunningWorker(worker, process, reader, restarts)

    def _print(self, name: str, line: str) -> None:
        """Prints a line.

        A full disk or a closed terminal is ignored, so that the worker's pipe is still read.
        """
        with suppress(OSError, ValueError):
            self.print_line(name, line)

    def _terminate(self, running: Sequence[_RunningWorker]) -> None:
        """Sends each worker SIGTERM, on which the trainer saves its state; kills those that still
        run afterwards."""
        for send_signal in (subprocess.Popen.terminate, kill_group):
            deadline = time.monotonic() + EXIT_TIMEOUT_S
            for worker in running:
                if worker.process.poll() is None:
                    send_signal(worker.process)
            for worker in running:
                with suppress(subprocess.TimeoutExpired):
                    worker.process.wait(max(0.0, deadline - time.monotonic()))
        for worker in running:
            worker.reader.join(LAST_OUTPUT_S)


def kill_group(process: "subprocess.Popen[Any]") -> None:
    """Kills a process that was started in a session of its own, and all processes that it
    started."""
    with suppress(ProcessLookupError):  # it has ended in the meantime
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def on_signals(handler: Callable[[int, FrameType | None], Any], *numbers: int) -> Iterator[None]:
    """Calls `handler` for the signals `numbers` within the block, and for the first SIGHUP unless
    nohup ignores it.

    Does nothing outside of the main thread, because Python handles signals only there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hangup = getattr(signal, "SIGHUP", None)

    def handle(number: int, frame: FrameType | None) -> None:
        # it comes twice: from the shell, and from the kernel when the shell ends
        if number == hangup:
            signal.signal(number, lambda number, frame: None)
        handler(number, frame)

    handled = [*numbers]
    if hangup and signal.getsignal(hangup) != signal.SIG_IGN:
        handled.append(hangup)
    previous = {number: signal.signal(number, handle) for number in handled}
    try:
        yield
    finally:
        for number, handler_before in previous.items():
            signal.signal(number, handler_before)


def readable(line: str) -> str:
    """Returns a line of a worker's output as Cloud Logging shows it: if it is JSON, its severity
    and message."""
    with suppress(ValueError):
        entry = json.loads(line)
        if isinstance(entry, dict) and "message" in entry:
            severity = entry.get("severity", "INFO")
            prefix = "" if severity == "INFO" else f"{severity.lower()}: "
            return f"{prefix}{entry['message']}"
    return line.rstrip("\n")
