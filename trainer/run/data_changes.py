"""Compares the data of a run with those of its earlier starts, which run.json describes."""

from collections.abc import Mapping
from typing import Any

from trainer.base.errors import PlatformFault, UserError
from trainer.base.log import log
from trainer.base.run_files.job_directory import JobDir
from trainer.base.run_files.records import mapping, number, read_run_info
from trainer.base.settings.train_config import DATA_SOURCES, TrainConfig
from trainer.data.fingerprint import differing, files_of

_COUNTS = ("files of data", "training examples")


def data_files(config: TrainConfig) -> dict[str, Any]:
    """Returns what is known of the files of the data before they are read; {} if they are not files.

    A failure is part of what is returned: workers compare it, and loading the data reports it.
    """
    try:
        files = files_of(config)
    except (UserError, PlatformFault, OSError) as error:
        return {"files of data": f"cannot be listed: {error}"}
    return files.named() if files else {}


def refuse_changed_data(config: TrainConfig, job_dir: JobDir, name: str, now: Mapping[str, Any]) -> None:
    """Raises UserError if the data differ from those of the run's checkpoints, unless data_changed=accept.

    name: "files" or "content" of the data in run.json. Built-in sources never change their rows; those of another
    version of TensorFlow may be rounded otherwise, so only their counts are compared.
    """
    if any(isinstance(value, str) and value.startswith("cannot be listed") for value in now.values()):
        return
    before = mapping(mapping(read_run_info(job_dir.root)[0], "data"), name)
    if config.data in DATA_SOURCES:
        before = {key: value for key, value in before.items() if not key.endswith(" rows")}
    changes = differing(before, now)
    if not changes or not job_dir.mirror.holds(job_dir.checkpoints):
        return
    if config.data_changed == "accept":
        log.warning(f"data={config.data} have changed ({changes}): the run goes on with other numbers")
        return
    counts = [(number(before.get(key)), number(now.get(key))) for key in _COUNTS if key in now]
    fewer = any(old is not None and new is not None and new < old for old, new in counts)
    lost = "restore what is missing or, after a listing that was late, run the same command again" if fewer else ""
    raise UserError(
        f"data={config.data} have changed since this run began ({changes}): {lost or 'restore them'}; or use another "
        "--job_dir, or continue with the changed data: --data_changed=accept"
    )
