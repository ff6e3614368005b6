"""Compares one replica with two again beside the running job: after its first epoch, and at steps 1,000, 10,000, …

What begins after the first steps, as a term of the loss whose weight a callback raises, is not in the comparison before
training. A child of the chief takes the variables of the running job and fresh callbacks, and compares the next steps
on the CPU as that one does, while the job goes on.
"""

from collections.abc import Sequence

from trainer.base.errors import UserError
from trainer.base.log import log
from trainer.reporting.progress import Progress
from trainer.run.replica_check import COMPARED_STEPS, REMEDY, ReplicaCheck, ReplicaVerdict
from trainer.run.start import StartedJob
from trainer.run.training_setup import TrainingSetup
from trainer.training.checkpoint import sharded, snapshot, variables_of
from trainer.training.loop import Cuts, Hook

_POWERS = tuple(10**exponent for exponent in range(3, 16))
_LAST_SECONDS = 300.0  # that the end of a run waits for a comparison, unless its budget is spent
_STARTED = ReplicaVerdict(None, reason="the run ended meanwhile")


class LaterReplicaChecks:
    """Starts the comparisons of a run and takes their verdicts; every worker has one, and the chief's has the child."""

    def __init__(self, job: StartedJob, setup: TrainingSetup, progress: Progress) -> None:
        self._job, self._replicas, self._variables = job, setup.replicas, variables_of(setup.model)
        self._steps = tuple(step for step in sorted({progress.steps_per_epoch, *_POWERS}) if step > progress.step)
        self._child: ReplicaCheck | None = None
        self._compared = ""  # the steps that it compares
        before = [steps for steps, outcome in job.result.replica_checks.items() if outcome == "differ"]
        if before and not job.config.allow_replica_dependence:
            raise UserError(f"steps {before[0]} differ on 1 and on 2 replicas, as an earlier start found: {REMEDY}")

    def hooks(self) -> Sequence[Hook]:
        """Returns the hooks that end calls at the steps, and act after each call."""
        cuts = Cuts(0, lambda progress: None, at_end=False, steps=self._steps)
        return [cuts, Hook(0, self._act, requested=lambda: True)]

    def close(self) -> None:
        """Ends the child, if one runs."""
        if self._child:
            self._child.close()
            self._child = None

    def _act(self, progress: Progress) -> None:
        """Takes the verdict of a child that has ended, at the end of the run of each, and starts another child."""
        if self._child and (self._child.ended or progress.ends):
            verdict = self._child.verdict(0.0 if progress.budget_spent else _LAST_SECONDS)
            self.close()
            self._take(verdict)
        if progress.step in self._steps and not progress.ends:
            steps = f"{progress.step + 1:,} to {progress.step + COMPARED_STEPS:,}"
            # Of slots that are sharded each worker has parts.
            of_worker = self._variables if self._job.is_chief else sharded(self._variables)
            values = snapshot(of_worker, self._replicas)
            if self._child:
                self._record(steps, ReplicaVerdict(None, reason=f"that of steps {self._compared} still ran"))
            elif self._job.is_chief:
                epoch = progress.step // progress.steps_per_epoch
                manifest = {"step": progress.step, "state": {"epoch": epoch}}
                self._child, self._compared = ReplicaCheck(self._job.command[3:], values, manifest), steps
                self._record(steps, _STARTED)

    def _take(self, verdict: ReplicaVerdict) -> None:
        """Records a verdict. Raises UserError if steps differ and that is not allowed."""
        result, steps = self._job.result, self._compared
        self._record(steps, verdict)
        if verdict.agrees is None:
            log.warning(f"steps {steps} of one replica and of two were not compared: {verdict.reason}")
        elif verdict.agrees:
            log.info(f"steps {steps} on 1 and on 2 replicas give the same, compared beside the run")
        else:
            problems = f"{'; '.join(verdict.problems)} (steps {steps}, from the state of this run)"
            if not self._job.config.allow_replica_dependence:
                raise UserError(f"{problems}: {REMEDY}")
            log.warning(f"the result depends on the number of replicas, as allowed: {problems}")
            result.depends_on_replicas = [*result.depends_on_replicas, problems]

    def _record(self, steps: str, verdict: ReplicaVerdict) -> None:
        """Keeps the outcome in run.json, and in result.json when that is written next."""
        if self._job.is_chief:
            self._job.result.replica_checks[steps] = verdict.outcome
            self._job.job_dir.add_to_run_info(replica_checks=self._job.result.replica_checks)
