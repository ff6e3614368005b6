"""Opens a job directory: a local folder, or an address in Cloud Storage that mirrors a local
scratch folder.

Relies on `job_files.py` for the files and on `mirror.py` for the bucket. A directory that
`open_job_dir` returns is writable, belongs to this run, and is locked against other processes of
this machine.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.base.errors import UserError
from trainer.base.run_files.job_files import (
    CHECKPOINTS,
    LOGS,
    MODEL,
    RESULT,
    RUN_INFO,
    SAMPLES,
    STATS,
    Content,
    Result,
    StatsEntry,
    append_stats,
    mapping,
    number,
    read_result,
    read_run_info,
    write_json,
)
from trainer.base.run_files.mirror import Mirror
from trainer.base.settings.own_settings import changed_settings
from trainer.base.settings.train_config import TrainConfig
from trainer.base.storage import (
    expanded,
    lock_folder,
    make_writable,
    output_address,
    remove_parts,
    write_whole,
)
from trainer.base.storage.staging import home_of, naming

# Numbers in result.json that the next start of the run continues; a negative one is damaged.
_COUNTS = {"steps", "asked_steps", "restarts", "steps_repeated", "wall_seconds", "saving_seconds"}


@dataclass(frozen=True)
class JobDir:
    """Holds the paths to which one run writes.

    `root` contains run.json, stats.jsonl, result.json and samples/.

    All paths are local; `mirror` is notified of each file that is written.
    """

    root: Path
    checkpoints: Path
    logs: Path
    model: Path
    mirror: Mirror = dataclasses.field(default_factory=Mirror)

    @property
    def samples(self) -> Path:
        """Returns the folder of generated image grids; the first grid creates it."""
        return self.root / SAMPLES

    def read_result(self) -> Result:
        """Returns the last run's result.json, or {} if there is none.

        Raises UserError if the file is damaged.
        """
        result, problem = read_result(self.root)
        counts: dict[str, Any] = {name: value for name, value in result.items() if name in _COUNTS}
        for name, value in counts.items():
            if number(value) is None or value < 0:
                problem = f"{self.root / RESULT}: {name}={value!r} is damaged"
                break
        _refuse_damaged(self, RESULT, problem)
        return result

    def write(self, name: str, content: Content | Sequence[str]) -> None:
        """Replaces one of the run's files: an object as JSON, or lines of text."""
        if isinstance(content, Mapping):
            write_json(self.root / name, content)
        else:
            write_whole(self.root / name, "\n".join(content) + "\n")
        self.mirror.put(self.root / name)

    def add_to_run_info(self, **content: Any) -> None:
        """Adds entries to run.json, or replaces them."""
        self.write(RUN_INFO, {**read_run_info(self.root)[0], **content})

    def append_stats(self, entry: StatsEntry) -> None:
        """Appends one line to stats.jsonl."""
        append_stats(self.root, entry)
        self.mirror.put(self.root / STATS)


def open_job_dir(config: TrainConfig, *, make: bool = True, lock: bool = True) -> JobDir:
    """Creates, checks and locks the job directory, and returns its paths.

    `--job_dir` has precedence; without it the folders that Vertex AI sets (AIP_*) are used.
    `make=False` only returns the paths, for a worker that writes nothing; `lock=False` leaves the
    lock to the process that will run there. Raises UserError if no directory is set, or if it is
    not writable, in use, damaged, or of another run.
    """
    remotes = {}

    def local(path: str, name: str) -> Path:
        address = output_address(path, name)
        if address is None:
            return expanded(path)
        scratch = home_of(address, config.cache_dir) / "run"
        remotes[scratch] = address
        return scratch

    # Where each folder is on this machine.
    paths = outputs(config)
    if config.job_dir:
        root = local(config.job_dir, "job_dir")
        checkpoints, logs, model = (root / name for name in (CHECKPOINTS, LOGS, MODEL))
    else:
        root = local(paths["AIP_MODEL_DIR"].rstrip("/").rpartition("/")[0], "AIP_MODEL_DIR")
        # in the order of `outputs`
        model, checkpoints, logs = (local(path, name) for name, path in paths.items())
    job_dir = JobDir(root, checkpoints, logs, model, Mirror(remotes if make else {}))
    if not make:
        return job_dir
    address = job_dir.mirror.where(job_dir.root)
    remote = address != str(job_dir.root)
    # Reserved for this process. The lock of a scratch folder is in its parent, because `prepare`
    # empties the folder itself.
    locked = job_dir.root.parent if remote else job_dir.root
    make_writable(locked, "cache_dir" if remote else "job_dir")
    if lock:
        lock_folder(locked, "job_dir", address)
    job_dir.mirror.prepare(job_dir.root, job_dir.checkpoints)
    # It is empty, or of this run. Errors name the address instead of its local copy.
    with naming(job_dir.root, remotes.get(job_dir.root)):
        info, problem = read_run_info(job_dir.root)
    _refuse_damaged(job_dir, RUN_INFO, problem)
    for folder in (job_dir.model, job_dir.checkpoints, job_dir.samples):  # a run would replace them
        if not (job_dir.root / RUN_INFO).exists() and job_dir.mirror.holds(folder):
            raise UserError(
                f"job_dir={address}: {job_dir.mirror.where(folder)} exists and is not from a run:"
                " use another --job_dir"
            )
    changed = changed_settings(mapping(info, "config"), config)
    # Until there is a checkpoint, settings may be corrected.
    if changed and job_dir.mirror.holds(job_dir.checkpoints):
        differences = []
        for name, (before, now) in [*changed.items()][:5]:
            differences.append(f"{name}: {before!r} before, {now!r} now")
        raise UserError(
            f"job_dir={address} contains another run ({'; '.join(differences)}): use another"
            " --job_dir, or the settings of that run"
        )
    for folder in (job_dir.checkpoints, job_dir.logs, job_dir.model.parent):
        make_writable(folder, "job_dir")
    for folder in (job_dir.root, job_dir.samples):
        remove_parts(folder)
    return job_dir


def outputs(config: TrainConfig) -> dict[str, str]:
    """Returns the output folders by the setting or AIP_* variable that names them.

    Raises UserError if none does.
    """
    if config.job_dir:
        return {"job_dir": config.job_dir}
    model = os.environ.get("AIP_MODEL_DIR")
    if not model:
        raise UserError(
            "job_dir is missing: use --job_dir=FOLDER, for example --job_dir=runs/first"
        )
    root = model.rstrip("/").rpartition("/")[0]
    return {
        "AIP_MODEL_DIR": model,
        "AIP_CHECKPOINT_DIR": os.environ.get("AIP_CHECKPOINT_DIR") or f"{root}/{CHECKPOINTS}",
        "AIP_TENSORBOARD_LOG_DIR": os.environ.get("AIP_TENSORBOARD_LOG_DIR") or f"{root}/{LOGS}",
    }


def _refuse_damaged(job_dir: JobDir, name: str, problem: str) -> None:
    file = job_dir.root / name
    if problem and os.path.lexists(file):
        text = problem.replace(str(file), job_dir.mirror.where(file))
        raise UserError(f"{text}: remove it, or use another --job_dir")
