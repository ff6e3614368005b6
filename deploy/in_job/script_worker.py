"""Runs a user's script as one worker of a job: sets PyTorch's variables, records its reports, and
ends as it ends.

The variable TRAINER_SCRIPT is JSON: "command", Python's arguments (`["train.py"]` or `["-m",
"my.task"]`); "folder", in which the script runs; "job_dir"; and "about", the first content of
run.json. The arguments of this program are those of the script.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from .bootstrap import log_line
from .script_reports import Record

if TYPE_CHECKING:
    from trainer.base.limit_watch import LimitWatch

HERE = os.path.dirname(os.path.abspath(__file__))


def main() -> int:
    """Runs the script to its end, passes signals on to it, and returns the job's exit code.

    It is the script's, or 128 + n if signal n ended the script, or 0 if a limit of the job stopped
    it.
    """
    plan = json.loads(os.environ["TRAINER_SCRIPT"])
    torch = torch_variables(os.environ)
    os.chdir(plan["folder"])
    # The devices are the GPUs of the tier, or the CPU if it has none or if the CPU stands in for
    # them.
    simulated = bool(int(os.environ.get("TRAINER_SIMULATED_DEVICES") or 0))
    count = plan["about"]["accelerators"]
    devices = [f"GPU:{number}" for number in range(count)] if count and not simulated else ["CPU:0"]
    about = {
        **plan["about"],
        "simulated": simulated,
        "devices": devices * plan["about"]["cluster"]["workers"],
        "versions": {"python": platform.python_version()},
        "command": (
            os.environ.get("TRAINER_COMMAND")
            or shlex.join(["python", *plan["command"], *sys.argv[1:]])
        ),
    }
    # The script gets the variables of this process except TRAINER_*. Of this package it can import
    # only the folder `importable`: under `deploy local` the folder of the whole package may be on
    # the path, and is removed.
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith("TRAINER_")
    }
    own_root = os.path.dirname(os.path.dirname(HERE))
    path = [
        folder
        for folder in variables.get("PYTHONPATH", "").split(os.pathsep)
        if folder and os.path.abspath(folder) != own_root
    ]
    variables["PYTHONPATH"] = os.pathsep.join([os.path.join(HERE, "importable"), *path])
    # only the chief's reports count
    record = Record(plan["job_dir"], about) if torch["RANK"] == "0" else None
    if record:
        record.begin()
    with tempfile.TemporaryDirectory() as folder:
        # `vertex_report` appends to this file whatever the script reports.
        file = Path(folder, "reports.jsonl")
        file.touch()
        environment = {
            "PYTHONUNBUFFERED": "1",
            **torch,
            **variables,
            "VERTEX_REPORT_FILE": str(file),
        }
        with file.open("rb") as reports:
            process = subprocess.Popen(
                [sys.executable, *plan["command"], *sys.argv[1:]], env=environment
            )
            return _followed(process, reports, record, shlex.join(plan["command"]))


def _followed(
    process: subprocess.Popen[bytes], reports: BinaryIO, record: Record | None, name: str
) -> int:
    """Watches the script and the job's limits, records the end and returns the exit code.

    Signals that end this process are passed on to the script. `reports`: the file of its reports;
    `name`: what messages call the script.
    """
    signals: list[int] = []

    def stop(number: int, frame: Any) -> None:
        signals.append(number)
        process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    watch: LimitWatch | None = None
    if os.environ.get("TRAINER_LIMITS"):
        # A job has this file in its archive. It is not imported in a local run, which has no
        # limits, since a package of the user's may have the same name there.
        from trainer.base.limit_watch import LimitWatch, read_limits

        watch = LimitWatch(
            read_limits(), lambda line: log_line(line, "WARNING"), process.terminate, process.kill
        )
        # a script may prepare for long: idle time counts from its first use or report
        watch.idle_s = -math.inf
    with watch.watching() if watch else contextlib.nullcontext():
        unfinished = b""  # the end of the reports, after the last line break
        ended = False
        while not ended:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
            ended = process.returncode is not None  # looked at before the last reports are read
            *lines, unfinished = (unfinished + reports.read()).split(b"\n")
            if record:
                for line in lines:
                    record.take(line)
                record.write_if_due()
            if watch and lines:
                watch.active = True
    code = 128 - process.returncode if process.returncode < 0 else process.returncode
    end: dict[str, Any] = {"state": "interrupted" if signals else "failed", "exit_code": code}
    end["error"] = (
        f"{name} exited with status {code}: its traceback, if it printed one, is in the job's log"
    )
    if watch and watch.reason:
        # Vertex AI would restart it for another exit code
        end = {"state": "stopped", "error": watch.reason}
        code = 0
    elif not code and not signals:
        end = {"state": "done", "error": None}
    if record:
        record.write(**end)
    return code


def torch_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns torch.distributed's variables from CLUSTER_SPEC, for a process per worker.

    RANK 0 is the chief. https://docs.pytorch.org/docs/stable/distributed.html, "Environment
    variable initialization"
    """
    spec = json.loads(environment.get("CLUSTER_SPEC") or "{}")
    cluster = spec.get("cluster", {})
    task = spec.get("task", {})
    # a Reduction Server is no worker
    pools = [name for name in ("workerpool0", "workerpool1") if name in cluster]
    workers = [(pool, index) for pool in pools for index in range(len(cluster[pool]))] or [
        ("workerpool0", 0)
    ]
    own_place = (task.get("type", "workerpool0"), int(task.get("index", 0)))
    host, _, port = (cluster[pools[0]][0] if pools else "127.0.0.1:29500").rpartition(":")
    rank = workers.index(own_place) if own_place in workers else len(workers)  # else an evaluator
    return {
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "RANK": str(rank),
        "WORLD_SIZE": str(len(workers)),
        "LOCAL_RANK": "0",
    }


if __name__ == "__main__":
    sys.exit(main())
