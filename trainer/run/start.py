"""Starts a job: its cluster, its job directory, the result of earlier processes, its workers and their devices."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from trainer.base.errors import FAULT, USER_MUST_CHANGE, UserError
from trainer.base.log import log
from trainer.base.run_files.job_directory import JobDir, open_job_dir
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.arithmetic import arithmetic
from trainer.cluster.cluster_spec import Cluster, read_cluster
from trainer.cluster.meeting import Peers, meet
from trainer.cluster.strategy import Replicas, local_devices, make_replicas
from trainer.reporting.result import RunResult
from trainer.reporting.run_info import versions
from trainer.run.data_changes import data_files
from trainer.training.error_lines import one_line
from trainer.training.preemption import keep_handlers
from trainer.user_code.mistakes import as_user_mistake


@dataclass
class Job:
    """Holds what a job has from its start to its end, however often a rollback builds its model again."""

    config: TrainConfig
    command: Sequence[str]
    cluster: Cluster
    job_dir: JobDir
    result: RunResult
    files: Mapping[str, Any]  # what is known of the files of the data before they are read
    peers: Peers | None = None  # the other workers, once they have met

    @classmethod
    def open(cls, config: TrainConfig, command: Sequence[str], began: float, job_dir: JobDir | None = None) -> "Job":
        """Reads the cluster and the result of earlier processes; `job_dir`: if it is open already."""
        cluster = read_cluster()
        if cluster.note:
            log.warning(cluster.note)
        job_dir = job_dir or open_job_dir(config, make=cluster.is_chief)
        result = RunResult.of_job(config, job_dir if cluster.is_chief else None, began)
        job_dir.mirror.begin(job_dir.logs)
        return cls(config, command, cluster, job_dir, result, data_files(config))

    @property
    def is_chief(self) -> bool:
        """Returns whether this worker writes the files."""
        return self.cluster.is_chief

    @contextmanager
    def workers(self) -> Iterator[None]:
        """Connects to the other workers within the block and notifies them of its end; writes a failure to result.json.

        Workers compare what they run: versions, devices, settings, arithmetic and files.
        """
        try:
            if self.cluster.several:
                devices = {"devices": len(local_devices(self.config, self.cluster))}
                runs = {**versions(), **devices, **dataclasses.asdict(self.config), **arithmetic(), **self.files}
                self.peers = meet(self.cluster, runs, self.config.worker_timeout_seconds, self._write_failure)
            yield
            if self.peers:
                self.peers.finish()
        except Exception as error:
            mistake = as_user_mistake(error)
            if self.peers and isinstance(error, tf.errors.OpError) and not mistake:
                self.peers.await_verdict()  # the cause may be a lost worker, which is then reported by name
            line = one_line(mistake or error)
            code = USER_MUST_CHANGE if isinstance(mistake or error, UserError) else FAULT
            if self.peers:
                self.peers.fail(code, line)
            self._write_failure(line, code)
            if mistake:
                raise mistake from error
            raise

    def connect(self) -> Replicas:
        """Starts TensorFlow, on all workers at once if there are several."""
        if self.peers is None:
            replicas = make_replicas(self.config, self.cluster)
        else:
            with self.peers.connecting():
                replicas = make_replicas(self.config, self.cluster)
            keep_handlers()
        by = f", summed by {replicas.collectives}" if self.cluster.several else ""
        log.info(f"{replicas.sentence()} on {', '.join(replicas.devices)}{by}")
        return replicas

    def _write_failure(self, error: str, code: int) -> None:
        self.result.write_failure(error, code)
        self.job_dir.mirror.leave()
