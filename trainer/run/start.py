"""Starts a job: reads the cluster, opens the job directory, reads earlier results, and connects the
workers."""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import tensorflow as tf

from trainer.base.errors import FAULT, USER_MUST_CHANGE, PlatformFault, UserError
from trainer.base.log import log
from trainer.base.run_files.job_directory import JobDir, open_job_dir
from trainer.base.run_files.job_files import RunInfo, items, mapping, number, read_run_info
from trainer.base.run_files.tracking.sender import Tracking
from trainer.base.settings.own_settings import own_sources
from trainer.base.settings.train_config import DATA_SOURCES, TrainConfig
from trainer.cluster.cluster_spec import Cluster, read_cluster
from trainer.cluster.rendezvous import Peers, arithmetic_switches, meet
from trainer.cluster.strategy import Replicas, local_devices, make_replicas
from trainer.data.fingerprint import changed_values, files_of
from trainer.reporting.error_lines import one_line
from trainer.reporting.result import ResultWriter, library_versions
from trainer.training.signals import keep_handlers
from trainer.training.xla_choice import XlaChoice
from trainer.user_code.mistakes import as_user_mistake


@dataclass
class StartedJob:
    """Holds what a job needs from start to end."""

    config: TrainConfig
    command: Sequence[str]
    cluster: Cluster
    job_dir: JobDir
    result: ResultWriter
    # the data's files as listed before they are read; {} for data without files
    files: Mapping[str, Any]
    code: str  # a digest of the packages of model, data and callbacks; "" if they are the trainer's
    tracking: Tracking
    named: Collection[str] = ()  # the settings that the command names
    peers: Peers | None = None  # the other workers, once they have met
    # that of this run, once it is made or taken from an earlier start
    xla_choice: XlaChoice | None = None

    @classmethod
    def open(
        cls,
        config: TrainConfig,
        command: Sequence[str],
        began: float,
        job_dir: JobDir | None = None,
        named: Collection[str] = (),
    ) -> "StartedJob":
        """Reads the cluster, the result of earlier processes and the list of data files.

        Opens `job_dir` if needed.
        """
        # Only the chief writes the result and tells trackers.
        cluster = read_cluster()
        job_dir = job_dir or open_job_dir(config, make=cluster.is_chief)
        result = ResultWriter.of_job(config, job_dir if cluster.is_chief else None, began)
        tracking = Tracking(
            config.track if cluster.is_chief else (),
            job_dir.root,
            job_dir.mirror.where(job_dir.root),
        )
        job_dir.mirror.begin(job_dir.logs)

        # Loading the data will report a failed listing.
        try:
            files = files_of(config)
        except (UserError, PlatformFault, OSError) as error:
            files = {"listing of data": f"failed: {error}"}
        sources = []
        for function in (config.model, config.data, config.callbacks):
            sources += [path.read_bytes() for _, path in own_sources(function)]
        code = hashlib.sha256(b"".join(sources)).hexdigest()[:16] if sources else ""
        return cls(config, command, cluster, job_dir, result, files, code, tracking, named)

    @cached_property
    def earlier(self) -> RunInfo:
        """Returns run.json as an earlier start left it, or {} without one.

        It is read once, before this start writes it.
        """
        return read_run_info(self.job_dir.root)[0]

    @contextmanager
    def workers(self) -> Iterator[None]:
        """Connects to the other workers for the block, and sends them how it ends.

        Writes a failure to result.json. Workers that differ in versions, devices, settings,
        arithmetic or files refuse to start.
        """
        try:
            if self.cluster.several:
                runs = {
                    **library_versions(),
                    "devices": len(local_devices(self.config, self.cluster)),
                    **asdict(self.config),
                    **arithmetic_switches(),
                    **self.files,
                }
                self.peers = meet(
                    self.cluster, runs, self.config.worker_timeout_seconds, self._write_failure
                )
            yield
            if self.peers:
                self.peers.finish()
        except Exception as error:
            # The cause may be a lost worker, which the others then report by name.
            mistake = as_user_mistake(error)
            if self.peers and isinstance(error, tf.errors.OpError) and not mistake:
                self.peers.await_verdict()

            # Every worker ends for the same reason, which result.json keeps.
            line = one_line(mistake or error)
            code = USER_MUST_CHANGE if isinstance(mistake or error, UserError) else FAULT
            if self.peers:
                self.peers.fail(code, line)
            self._write_failure(line, code)
            if mistake:
                raise mistake from error
            raise

    def connect(self, *, has_batch: bool = True) -> Replicas:
        """Starts TensorFlow, on all workers at the same time, and returns the replicas.

        has_batch: whether the settings say the size of a batch, which in a script each `fit` does.
        """
        with self.peers.connecting() if self.peers else nullcontext():
            replicas = make_replicas(self.config, self.cluster)
        if self.peers:
            keep_handlers()
        by = f", summed by {replicas.collectives}" if self.cluster.several else ""
        line = f"{replicas.count} replica{'s' if replicas.count > 1 else ''}"
        if has_batch:
            line = replicas.sentence()
        log.info(f"{line} on {', '.join(replicas.devices)}{by}")
        return replicas

    def refuse_changed_data(self, name: str, now: Mapping[str, Any]) -> None:
        """Raises UserError if the data differ from those of the run's checkpoints.

        name: what to compare `now` with in run.json of an earlier start: "files" or "content".
            Built-in sources never change, but another version of TensorFlow may round their rows
            differently, so their digests are not compared.
        """
        config = self.config
        job_dir = self.job_dir
        before = mapping(mapping(self.earlier, "data"), name)
        if config.data in DATA_SOURCES:
            before = {key: value for key, value in before.items() if "digest" not in key}
        changes = changed_values(before, now)
        if changes and job_dir.mirror.holds(job_dir.checkpoints):
            raise UserError(
                f"data={config.data} have changed since this run began ({changes}): restore them"
                " or, after a listing that was late, run the same command again; or begin another"
                f" run with the weights of this one: --initial_checkpoint={config.job_dir}, and"
                " another --job_dir"
            )

    def versions_by_step(self, before: Mapping[str, Any], step: int) -> list[dict[str, Any]]:
        """Returns the versions and the user's code that the run has used, each with its step.

        The versions are those of TensorFlow and Keras, and the step is the first that used them.
        before: run.json of the previous start; step: where this start resumes. Logs a warning if
            the code, or the versions, which may round differently, have changed. Raises UserError
            if the versions have changed and the settings promise equal bits.
        """
        config = self.config
        now = {name: library_versions()[name] for name in ("tensorflow", "keras")}
        entries = [entry for entry in items(before, "versions_by_step") if isinstance(entry, dict)]
        entries = [entry for entry in entries if (number(entry.get("step")) or 0) < step]

        # Other versions may round differently, so they are refused where equal bits are promised.
        changes = changed_values(entries[-1], now) if entries else ""
        if changes and (config.virtual_replicas or config.deterministic):
            promise = "virtual_replicas"
            without = ""
            if not config.virtual_replicas:
                promise = "deterministic"
                without = ", or go on with other bits without --deterministic"
            raise UserError(
                f"{promise}={getattr(config, promise)}: the versions have changed since this run"
                f" began ({changes}): install those again, or use another --job_dir{without}"
            )
        if changes:
            log.warning(
                f"the versions have changed ({changes}): the run continues with other rounding"
            )

        # An entry has no digest if all functions were built in.
        other_code = bool(entries) and entries[-1].get("code", self.code) != self.code
        if other_code:
            log.warning(
                "a file of the packages of model, data or callbacks has changed: what was trained"
                f" before step {step} is of the code before; for a new run use another --job_dir"
            )
        if self.code:
            now["code"] = self.code
        if changes or other_code or not entries:
            entries.append({"step": step, **now})
        return entries

    def _write_failure(self, error: str, code: int) -> None:
        """Writes a failed result.json, and sends what the job directory still has to send."""
        self.result.write_end("failed", error, code)
        self.job_dir.mirror.leave()
