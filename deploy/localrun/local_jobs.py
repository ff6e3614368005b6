"""Runs jobs of this machine from several threads: each writes its output to JOB_DIR.log, and all can be stopped."""

import contextvars
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from deploy.localrun.processes import JobEnd, LocalJob, on_signals
from deploy.localrun.workers import Share, local_workers
from deploy.tiers.job_request import JobRequest
from trainer.base.errors import INTERRUPTED

Result = TypeVar("Result")


class LocalJobs:
    """Runs jobs as processes of this machine, until `stop` makes all of them save their state and end."""

    def __init__(self) -> None:
        self._running: list[LocalJob] = []
        self._lock = threading.Lock()
        self.stopped = False

    def run(
        self, request: JobRequest, job_dir: Path, share: Share | None = None,
        environment: Mapping[str, str] | None = None, to_stop: Callable[[], bool] = lambda: False,
    ) -> JobEnd:  # fmt: skip
        """Runs a job to its end. `to_stop` is asked while it runs, and stops it with its state saved.

        share: the part of the machine to use, all of it without; environment: more variables of the workers.
        """
        job_dir.mkdir(parents=True, exist_ok=True)
        folder = job_dir.absolute()
        module, variables = request.local_program(folder)
        program = module, {**variables, **(environment or {})}
        arguments = request.in_job_dir(str(folder)).arguments()
        job_id = f"{job_dir.parent.name}-{time.time_ns()}"  # a new id each time: this is not a restart by Vertex AI
        workers = local_workers(request.tier, arguments, folder, job_id, share=share, program=program)
        with open(f"{job_dir}.log", "a", encoding="utf-8", buffering=1) as log:
            job = LocalJob(workers, lambda worker, line: print(f"[{worker}] {line}", file=log), to_stop=to_stop)
            with self._lock:
                if self.stopped:
                    return JobEnd(INTERRUPTED, "CANCELLED")
                self._running.append(job)
            outcome = job.run()
            print(outcome.error or outcome.state, file=log)
        with self._lock:
            self._running.remove(job)
        return outcome

    def stop(self) -> None:
        """Makes every job save its state and end; starts no other."""
        with self._lock:
            self.stopped = True
            for job in self._running:
                job.stop()


def in_threads(calls: Sequence[Callable[[], Result]], parallel: int, stop: Callable[[], None]) -> list[Result]:
    """Makes the calls, `parallel` at a time; a signal, or an exception of one, makes `stop` end them, and is raised."""
    with on_signals(signal.default_int_handler, signal.SIGTERM), ThreadPoolExecutor(parallel) as pool:  # as Ctrl-C
        try:
            futures = [pool.submit(contextvars.copy_context().run, call) for call in calls]
            while (waited := wait(futures, 1.0, FIRST_EXCEPTION)).not_done:  # a signal is handled between two waits
                for future in waited.done:
                    future.result()
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            stop()
            raise
