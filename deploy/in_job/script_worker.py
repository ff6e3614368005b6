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

from .script_output import Output
from .script_reports import Record
from .starter import say

if TYPE_CHECKING:
    from trainer.base.limit_watch import LimitWatch

PIPE = "VERTEX_REPORT_PIPE"
HERE = os.path.dirname(os.path.abspath(__file__))


def main() -> int:
    """Runs the script to its end, passes on its output and signals, and returns its exit code.

    That is 128 + n if signal n ended it.
    """
    plan = json.loads(os.environ["TRAINER_SCRIPT"])
    torch = torch_variables(os.environ)
    os.chdir(plan["folder"])
    # The devices are those of the tier, or the CPU that stands for them.
    simulated, count = bool(int(os.environ.get("TRAINER_SIMULATED_DEVICES") or 0)), plan["about"]["accelerators"]
    devices = [f"GPU:{number}" for number in range(count)] if count and not simulated else ["CPU:0"]
    about = {**plan["about"], "simulated": simulated, "devices": devices * plan["about"]["cluster"]["workers"],
             "versions": {"python": platform.python_version()},
             "command": os.environ.get("TRAINER_COMMAND") or shlex.join(["python", *plan["command"], *sys.argv[1:]]),
             }  # fmt: skip
    # The script gets the variables of this process without ours, and one file of ours on its path.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TRAINER_")}
    ours = os.path.dirname(os.path.dirname(HERE))  # of `deploy local`; in a job no such folder is on the path
    path_before = variables.get("PYTHONPATH", "").split(os.pathsep)
    path = [folder for folder in path_before if folder and os.path.abspath(folder) != ours]
    variables["PYTHONPATH"] = os.pathsep.join([os.path.join(HERE, "importable"), *path])
    record = Record(plan["job_dir"], about) if torch["RANK"] == "0" else None  # only the chief's reports count
    if record:
        record.begin()
    with tempfile.TemporaryDirectory() as folder:
        pipe = os.path.join(folder, "reports")
        os.mkfifo(pipe)
        # With a reader that is a writer too it never ends before the script.
        reports = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        command = [sys.executable, *plan["command"], *sys.argv[1:]]
        environment = {"PYTHONUNBUFFERED": "1", **torch, **variables, PIPE: pipe}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        output = Output(process, reports, record.take if record else lambda line: None)
        return _followed(process, output, record, shlex.join(plan["command"]))


def _followed(process: subprocess.Popen[bytes], output: Output, record: Record | None, name: str) -> int:
    """Waits for the script's end and records it; returns the exit code."""
    signals: list[int] = []

    def stop(number: int, frame: Any) -> None:
        signals.append(number)
        process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    watch: LimitWatch | None = None
    reports = 0
    if os.environ.get("TRAINER_LIMITS"):
        # A job has this file in its archive. On the path of a local run, which has no limits, a package of the user's
        # may have the same name.
        from trainer.base.limit_watch import LimitWatch, read_limits

        watch = LimitWatch(read_limits(), lambda line: say(line, "WARNING"), process.terminate, process.kill)
        watch.idle_s = -math.inf  # however long a script prepares: idle time counts from its first use or report
    with watch.looking() if watch else contextlib.nullcontext():
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
            if record:
                record.write_if_due()
            if watch and record and record.reports > reports:
                watch.active, reports = True, record.reports
    output.finish()
    code = 128 - process.returncode if process.returncode < 0 else process.returncode
    last = output.last_error.decode(errors="replace").strip()[:500]
    end: dict[str, Any] = {"state": "interrupted" if signals else "failed", "exit_code": code}
    end["error"] = f"{name} exited with status {code}" + (f": {last}" if last else "")
    if watch and watch.reason:
        end, code = {"state": "stopped", "error": watch.reason}, 0  # Vertex AI restarts what exits otherwise
    elif not code and not signals:
        end = {"state": "done", "error": None}
    if record:
        import resource  # only where there is such a module

        used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # of the script, or a process that it started
        record.write(**end, peak_memory_gib=round(used / (2**30 if sys.platform == "darwin" else 2**20), 3))
    return code


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
    rank = workers.index(own_place) if own_place in workers else len(workers)  # an evaluator, which records nothing
    return {"MASTER_ADDR": host, "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": str(len(workers)),
            "LOCAL_RANK": "0"}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
