"""Proves, before a run on several replicas trains, that its steps give the same on one replica and on two.

A child process of the chief makes the comparison of `trainer.check` on the CPU while the run starts.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.base.errors import UserError
from trainer.base.log import log
from trainer.base.settings.train_config import TrainConfig
from trainer.run.rehearsal import has_own_parts

LONGEST_SECONDS = 60.0
SKIP = "TRAINER_SKIP_REPLICA_PROOF"  # an environment variable: this project's own tests prove it elsewhere
# What a child must not take over: the cluster, the GPUs, and the folders of the job.
_OF_THE_JOB = ("TF_CONFIG", "CLUSTER_SPEC", "AIP_MODEL_DIR", "AIP_CHECKPOINT_DIR", "AIP_TENSORBOARD_LOG_DIR")


@dataclass(frozen=True)
class Verdict:
    """Holds what the comparison found; run.json keeps it. `agrees`: None if nothing could be compared."""

    agrees: bool | None
    problems: list[str] = field(default_factory=list)  # what differs, and what to change
    reason: str = ""  # why nothing could be compared
    equal_bits: bool = False  # whether all bits were compared, with --virtual_replicas, and are equal

    def as_json(self) -> dict[str, Any]:
        """Returns what run.json has of it."""
        return asdict(self)


def needs_proof(config: TrainConfig, replicas: int) -> bool:
    """Returns whether a new run with a model or data of the user's own, on several replicas, is to be compared."""
    return replicas > 1 and has_own_parts(config) and not os.environ.get(SKIP)


class ReplicaProof:
    """Runs the comparison in a child process, from its creation on. `arguments`: the flags of the run."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="trainer-replicas-")
        self._file, self._output = (Path(self._folder.name) / name for name in ("verdict.json", "output"))
        self._began = time.monotonic()
        environment = {name: value for name, value in os.environ.items() if name not in _OF_THE_JOB}
        words = [sys.executable, "-m", "trainer.check", *arguments, f"--verdict={self._file}"]
        with self._output.open("wb") as output:
            self._child = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**environment, "CUDA_VISIBLE_DEVICES": "-1"},
            )  # fmt: skip
        with suppress(OSError):  # on Linux: where memory is short, the child goes first
            Path(f"/proc/{self._child.pid}/oom_score_adj").write_text("1000")

    def verdict(self) -> Verdict:
        """Waits for the child, LONGEST_SECONDS from its start, and returns what it found."""
        try:
            self._child.wait(max(0.0, self._began + LONGEST_SECONDS - time.monotonic()))
        except subprocess.TimeoutExpired:
            return Verdict(None, reason=f"it took longer than {LONGEST_SECONDS:g} s")
        with suppress(OSError, ValueError, TypeError):
            return Verdict(**json.loads(self._file.read_text()))
        lines = self._output.read_text(errors="replace").split("\n")
        errors = [line.partition("error: ")[2] for line in lines if "error: " in line]
        return Verdict(None, reason=errors[-1] if errors else f"it ended with exit code {self._child.returncode}")

    def close(self) -> None:
        """Ends the child, if it still runs, and removes its files."""
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        self._folder.cleanup()


def judge(verdict: Verdict, *, allowed: bool) -> None:
    """Logs a verdict. Raises UserError if the steps differ and that is not `allowed` (--allow_replica_dependence)."""
    if verdict.equal_bits:
        log.info("equal bits: steps on 1 and on 2 replicas, compared before training")
    elif verdict.agrees:
        log.info("steps on 1 and on 2 replicas give the same, compared in float64 before training")
    elif verdict.agrees is None:
        log.warning(
            f"one replica and two could not be compared before training ({verdict.reason}): python -m trainer.check "
            "with the same flags tells whether the result depends on their number"
        )
    elif allowed:
        log.warning(f"the result depends on the number of replicas, as allowed: {'; '.join(verdict.problems)}")
    else:
        raise UserError(
            f"{'; '.join(verdict.problems)}: change that, train on one replica (--replicas=1), or go on with "
            "--allow_replica_dependence and numbers of this many replicas alone"
        )
