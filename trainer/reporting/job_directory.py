"""The job directory: which file lies where, and whose run it holds; at an address, a scratch folder stands for it."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config.train_config import MAY_CHANGE, TrainConfig
from trainer.errors import UserError
from trainer.storage import Address, expanded, keep_others_out, make_writable, output_address, write_whole
from trainer.storage.mirror import BucketMirror, Mirror
from trainer.storage.staging import home_of

_COUNTS = {"steps", "asked_steps", "restarts", "steps_repeated", "rollbacks", "wall_seconds", "saving_seconds"}
_MOST = 1e15  # no count and no time of a run is larger


@dataclasses.dataclass(frozen=True)
class JobDir:
    """Where one run writes. `root` holds run.json, stats.jsonl, result.json and samples/.

    All paths are local; `mirror` hears of what is written to them.
    """

    root: Path
    checkpoints: Path
    logs: Path
    model: Path
    mirror: Mirror = dataclasses.field(default_factory=Mirror)

    @property
    def run_file(self) -> Path:
        """What the run is: settings, devices, versions."""
        return self.root / "run.json"

    @property
    def result_file(self) -> Path:
        """How far the run is, and how it ended."""
        return self.root / "result.json"

    @property
    def stats_file(self) -> Path:
        """One JSON object a report, an epoch, an evaluation and a measurement of quality."""
        return self.root / "stats.jsonl"

    @property
    def skipped_file(self) -> Path:
        """Image files that were left out, one a line."""
        return self.root / "skipped_images.txt"

    @property
    def samples(self) -> Path:
        """Grids of generated images, one PNG a step; made with the first."""
        return self.root / "samples"

    def read_result(self) -> dict[str, Any]:
        """The last run's result.json, or {} where there is none; UserError where its counts are none."""
        result = _read_json(self.result_file)
        for name in _COUNTS & result.keys():
            number = result[name]
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < _MOST:
                raise UserError(
                    f"{self.result_file}: {name}={number!r} is damaged: remove the file, or give another --job_dir"
                )
        return result

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Replaces result.json."""
        write_json(self.result_file, result)
        self.mirror.put(self.result_file)


def open_job_dir(
    config: TrainConfig, environment: Mapping[str, str] = os.environ, *, make: bool = True, lock: bool = True
) -> JobDir:
    """The job directory of this run: made, proved writable, not another run's, and in use by none; else UserError.

    `--job_dir` wins; without it the folders that Vertex AI names (AIP_*) are used. `make=False`: only named, for a
    worker that writes nothing. `lock=False`: for a run of another process, which keeps others out itself.
    """
    job_dir = _locate(config, environment, make=make)
    if not make:
        return job_dir
    remote = job_dir.mirror.where(job_dir.root) != str(job_dir.root)
    outside = job_dir.root.parent if remote else job_dir.root  # what a scratch folder holds is about to be removed
    make_writable(outside, "cache_dir" if remote else "job_dir")
    if lock:
        keep_others_out(outside, "job_dir", str(job_dir.mirror.where(job_dir.root)))
    job_dir.mirror.outline(job_dir.root, job_dir.checkpoints)
    _refuse_foreign_folders(job_dir)
    _refuse_another_run(job_dir, config)
    folders = [job_dir.checkpoints, job_dir.logs, job_dir.model.parent]
    if os.path.lexists(job_dir.samples):  # else the first grid makes it: a classifier has none
        folders.append(job_dir.samples)
    for folder in folders:
        make_writable(folder, "job_dir")
    return job_dir


def outputs(config: TrainConfig, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The settings that say where to write, and what they name; UserError where none does."""
    if config.job_dir:
        return {"job_dir": config.job_dir}
    model = environment.get("AIP_MODEL_DIR")
    if not model:
        raise UserError(
            "job_dir is missing: say where to write with --job_dir=FOLDER, for example --job_dir=runs/first"
        )
    root = model.rstrip("/").rpartition("/")[0]
    return {
        "AIP_MODEL_DIR": model,
        "AIP_CHECKPOINT_DIR": environment.get("AIP_CHECKPOINT_DIR") or f"{root}/checkpoints",
        "AIP_TENSORBOARD_LOG_DIR": environment.get("AIP_TENSORBOARD_LOG_DIR") or f"{root}/logs",
    }


def _locate(config: TrainConfig, environment: Mapping[str, str], *, make: bool) -> JobDir:
    places: dict[Path, Address] = {}

    def local(path: str, name: str) -> Path:
        address = output_address(path, name)
        if address is None:
            return expanded(path)
        scratch = home_of(address, config.cache_dir) / "run"
        places[scratch] = address
        return scratch

    named = outputs(config, environment)
    if config.job_dir:
        root = local(config.job_dir, "job_dir")
        folders = root, root / "checkpoints", root / "logs", root / "model"
    else:
        root = local(named["AIP_MODEL_DIR"].rstrip("/").rpartition("/")[0], "AIP_MODEL_DIR")
        checkpoints, logs = named["AIP_CHECKPOINT_DIR"], named["AIP_TENSORBOARD_LOG_DIR"]
        folders = (
            root,
            local(checkpoints, "AIP_CHECKPOINT_DIR"),
            local(logs, "AIP_TENSORBOARD_LOG_DIR"),
            local(named["AIP_MODEL_DIR"], "AIP_MODEL_DIR"),
        )
    return JobDir(*folders, BucketMirror(places) if places and make else Mirror())


def _refuse_foreign_folders(job_dir: JobDir) -> None:
    """A folder called model that is not ours must not be replaced by ours."""
    if job_dir.run_file.exists():
        return
    for folder in (job_dir.model, job_dir.checkpoints, job_dir.samples):
        if job_dir.mirror.holds(folder):
            root, there = job_dir.mirror.where(job_dir.root), job_dir.mirror.where(folder)
            raise UserError(f"job_dir={root}: {there} is there and not of a run: give another --job_dir")


def _refuse_another_run(job_dir: JobDir, config: TrainConfig) -> None:
    before = _read_json(job_dir.run_file).get("config")
    if not isinstance(before, dict) or not job_dir.mirror.holds(job_dir.checkpoints):
        return  # nothing was kept of it yet: the settings may be mended in place
    now = dataclasses.asdict(config)
    differing = [key for key in now if key not in MAY_CHANGE and key in before and before[key] != now[key]]
    if differing:
        shown = "; ".join(f"{key}: {before[key]!r} there, {now[key]!r} here" for key in differing[:5])
        raise UserError(
            f"job_dir={job_dir.mirror.where(job_dir.root)} holds another run ({shown}): give another --job_dir, or the "
            "settings of that run"
        )


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON object whole, with numbers that JSON cannot hold (NaN) as null."""
    write_whole(path, json.dumps(finite(content), indent=2, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """`value` with every NaN and infinity in it as None."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}): remove it, or give another --job_dir") from None
    return content if isinstance(content, dict) else {}
