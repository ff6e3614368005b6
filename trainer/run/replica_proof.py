"""Proves, before a run on several replicas trains, that its steps give the same on one replica and on two.

A child process of the chief makes the comparison of `trainer.check` on the CPU while the run starts.
"""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from trainer.base.errors import FAULT, PlatformFault, UserError
from trainer.base.log import log
from trainer.base.settings.train_config import TrainConfig
from trainer.run.child import last_error, start
from trainer.run.rehearsal import has_own_parts

# The comparison is bounded by its work, a few steps of a few rows; this only ends one that hangs.
LONGEST_SECONDS = 1800.0
SKIP = "TRAINER_SKIP_REPLICA_PROOF"  # an environment variable: this project's own tests prove it elsewhere


@dataclass(frozen=True)
class ReplicaVerdict:
    """Holds what the comparison found; run.json keeps it. `agrees`: None if nothing could be compared."""

    agrees: bool | None
    problems: list[str] = field(default_factory=list)  # what differs, and what to change
    reason: str = ""  # why nothing could be compared, or with which other settings it was
    equal_bits: bool = False  # whether all bits were compared, with --virtual_replicas, and are equal
    by_settings: bool = False  # whether nothing was compared as settings ask for a dependence, which the log tells
    fault: bool = False  # whether the comparison itself failed, by no mistake of the user

    @property
    def not_compared(self) -> str:
        """Returns why it is not known whether the number of replicas changes the result, "" if it is."""
        return self.reason if self.agrees is None and not self.by_settings else ""


def needs_proof(config: TrainConfig, replicas: int) -> bool:
    """Returns whether a new run with a model or data of the user's own, on several replicas, is to be compared."""
    return (replicas > 1 or config.virtual_replicas > 0) and has_own_parts(config) and not os.environ.get(SKIP)


class ReplicaProof:
    """Runs the comparison in a child process, from its creation on. `arguments`: the flags of the run."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="trainer-replicas-")
        self._file, self._log = (Path(self._folder.name) / name for name in ("verdict.json", "log"))
        self._began = time.monotonic()
        self._child = start(["trainer.check", *arguments, f"--verdict={self._file}"], self._log)
        with suppress(OSError):  # on Linux: where memory is short, the child goes first
            Path(f"/proc/{self._child.pid}/oom_score_adj").write_text("1000")

    def verdict(self) -> ReplicaVerdict:
        """Waits for the child, LONGEST_SECONDS from its start, and returns what it found."""
        try:
            self._child.wait(max(0.0, self._began + LONGEST_SECONDS - time.monotonic()))
        except subprocess.TimeoutExpired:
            return ReplicaVerdict(None, reason=f"it took longer than {LONGEST_SECONDS / 60:g} minutes")
        with suppress(OSError, ValueError, TypeError):
            return ReplicaVerdict(**json.loads(self._file.read_text()))
        if self._child.returncode < 0:  # as where memory is short
            return ReplicaVerdict(None, reason=f"its process was ended by signal {-self._child.returncode}")
        return ReplicaVerdict(None, reason=last_error(self._log), fault=self._child.returncode == FAULT)

    def close(self) -> None:
        """Ends the child, if it still runs, and removes its files."""
        self._child.kill()
        self._child.wait()
        self._folder.cleanup()


def judge(verdict: ReplicaVerdict, *, allowed: bool, paid: bool = False) -> None:
    """Logs a verdict. Raises UserError if the steps differ and that is not `allowed` (--allow_replica_dependence).

    The same holds where several `paid` replicas were not compared; PlatformFault if the comparison itself failed.
    """
    if verdict.equal_bits:
        log.info("equal bits: steps on 1 and on 2 replicas, compared before training")
    elif verdict.agrees:
        log.info(
            f"steps on 1 and on 2 replicas give the same, compared in float64 before training {verdict.reason}".rstrip()
        )
    elif verdict.agrees is None:
        line = f"one replica and two were not compared before training: {verdict.reason}"
        if verdict.fault and not allowed:
            raise PlatformFault(f"{line}: --allow_replica_dependence trains all the same")
        if paid and verdict.not_compared and not allowed:
            raise UserError(
                f"{line}: compare them at your desk (python -m trainer.check with the same flags), then pay for "
                "several replicas with --allow_replica_dependence"
            )
        log.warning(line)
    elif allowed:
        log.warning(f"the result depends on the number of replicas, as allowed: {'; '.join(verdict.problems)}")
    else:
        raise UserError(
            f"{'; '.join(verdict.problems)}: change that, train on one replica (--replicas=1), or go on with "
            "--allow_replica_dependence and numbers of this many replicas alone"
        )
