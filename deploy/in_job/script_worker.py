"""Runs a user's script as one worker of a job: gives it PyTorch's variables, reads its reports, ends as it does.

The variable TRAINER_SCRIPT is JSON: "command" of Python (`["train.py"]` or `["-m", "my.task"]`), its "folder", the
"job_dir", and "about", the content of run.json. The arguments of this program are the script's.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .run_record import Record
from .script_output import Output
from .starter import say

if TYPE_CHECKING:
    from trainer.base.limit_watch import LimitWatch

PIPE = "VERTEX_REPORT_PIPE"
HERE = os.path.dirname(os.path.abspath(__file__))


def main() -> int:
    """Runs the script to its end and returns its exit code, 128 + n if signal n ended it."""
    plan = json.loads(os.environ["TRAINER_SCRIPT"])
    torch = torch_variables(os.environ)
    os.chdir(plan["folder"])
    about = {**plan["about"], **_machines(plan["about"]), "versions": {"python": platform.python_version()},
             "command": os.environ.get("TRAINER_COMMAND") or shlex.join(["python", *plan["command"], *sys.argv[1:]]),
             }  # fmt: skip
    record = Record(plan["job_dir"], about) if torch["RANK"] == "0" else None
    if record:
        record.begin()
    with tempfile.TemporaryDirectory() as folder:
        pipe = os.path.join(folder, "reports")
        os.mkfifo(pipe)
        return ScriptProcess(plan["command"], _environment(torch, pipe), record).run()


def torch_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of torch.distributed that CLUSTER_SPEC implies, one process a worker.

    https://docs.pytorch.org/docs/stable/distributed.html, "Environment variable initialization"; RANK 0 is the chief.
    """
    spec = json.loads(environment.get("CLUSTER_SPEC") or "{}")
    cluster, task = spec.get("cluster", {}), spec.get("task", {})
    pools = [name for name in ("workerpool0", "workerpool1") if name in cluster]  # without a Reduction Server
    workers = [(pool, index) for pool in pools for index in range(len(cluster[pool]))] or [("workerpool0", 0)]
    own_place = (task.get("type", "workerpool0"), int(task.get("index", 0)))
    host, _, port = (cluster[pools[0]][0] if pools else "127.0.0.1:29500").rpartition(":")
    rank = workers.index(own_place) if own_place in workers else 0
    return {"MASTER_ADDR": host, "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": str(len(workers)),
            "LOCAL_RANK": "0"}  # fmt: skip


def _machines(about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the devices for run.json: those of the tier, or the CPU that stands for them."""
    workers, accelerators = about["cluster"]["workers"], about["accelerators"]
    simulated = bool(int(os.environ.get("TRAINER_SIMULATED_DEVICES") or 0))
    of_worker = [f"GPU:{number}" for number in range(accelerators)] if accelerators and not simulated else ["CPU:0"]
    return {"simulated": simulated, "devices": of_worker * workers}


def _environment(torch: Mapping[str, str], pipe: str) -> dict[str, str]:
    """Returns the script's variables: those of this process without ours, and one file of ours on its path."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TRAINER_")}
    ours = os.path.dirname(os.path.dirname(HERE))  # of `deploy local`; in a job no such folder is on the path
    path_before = variables.get("PYTHONPATH", "").split(os.pathsep)
    path = [folder for folder in path_before if folder and os.path.abspath(folder) != ours]
    variables["PYTHONPATH"] = os.pathsep.join([os.path.join(HERE, "on_path"), *path])
    return {"PYTHONUNBUFFERED": "1", **torch, **variables, PIPE: pipe}


class ScriptProcess:
    """Represents one run of the script. `record`: None for a worker whose reports do not count."""

    def __init__(self, command: list[str], environment: Mapping[str, str], record: Record | None) -> None:
        self._command, self._environment, self._record = command, environment, record
        self._stopped = False

    def run(self) -> int:
        """Starts the script, passes on its output and signals, and returns its exit code."""
        # With a reader that is a writer too it never ends before the script.
        reports = os.open(self._environment[PIPE], os.O_RDWR | os.O_NONBLOCK)
        process = subprocess.Popen([sys.executable, *self._command, *sys.argv[1:]], env=dict(self._environment),
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip

        def stop(number: int, frame: Any) -> None:
            self._stopped = True
            process.send_signal(number)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        output = Output(process, reports, self._record.take if self._record else lambda line: None)
        watch, reports = _limit_watch(process), 0
        with watch.looking() if watch else contextlib.nullcontext():
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
                if self._record:
                    self._record.write_if_due()
                if watch and self._record and self._record.reports > reports:
                    watch.active, reports = True, self._record.reports
        output.finish()
        reason = watch.reason if watch else ""
        code = 128 - process.returncode if process.returncode < 0 else process.returncode
        if self._record:
            self._record.write(**self._end(code, reason, output.last_error))
        return 0 if reason else code  # Vertex AI restarts what exits otherwise

    def _end(self, code: int, reason: str, last_line: bytes) -> dict[str, Any]:
        """Returns state and error of a script that has ended."""
        if reason:
            return {"state": "stopped", "error": reason, **_memory()}
        if not code and not self._stopped:
            return {"state": "done", "error": None, **_memory()}
        last = last_line.decode(errors="replace").strip()[:500]
        error = f"{shlex.join(self._command)} exited with status {code}" + (f": {last}" if last else "")
        return {"state": "interrupted" if self._stopped else "failed", "error": error, "exit_code": code, **_memory()}


def _limit_watch(process: subprocess.Popen[bytes]) -> LimitWatch | None:
    """Returns what ends a script at the limits that were sent with its job; None without limits."""
    if not os.environ.get("TRAINER_LIMITS"):
        return None
    # A job has this file in its archive. On the path of a local run, which has no limits, a package of the user's may
    # have the same name.
    from trainer.base.limit_watch import LimitWatch, read_limits

    watch = LimitWatch(read_limits(), lambda line: say(line, "WARNING"), process.terminate, process.kill)
    watch.idle_s = -math.inf  # however long a script prepares: idle time counts from its first use of a GPU or report
    return watch


def _memory() -> dict[str, float]:
    """Returns the most memory of the script, or of a process that it started, in GiB."""
    import resource  # only where there is such a module

    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return {"peak_memory_gib": round(used / (2**30 if sys.platform == "darwin" else 2**20), 3)}


if __name__ == "__main__":
    sys.exit(main())
