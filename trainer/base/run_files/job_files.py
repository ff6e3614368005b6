"""Names the files of a job directory, and defines, reads and writes run.json, stats.jsonl and
result.json.

No other module contains these names. Imports no TensorFlow: `deploy` uses it.

Readers return the intact part of a file, and a line that says what is wrong with the rest. Values
of a damaged file may have other types than the schema says; `number`, `mapping` and their like
check them.
"""

import json
import math
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, cast

from trainer.base.errors import UserError
from trainer.base.storage import write_whole, writing

RUN_INFO = "run.json"
STATS = "stats.jsonl"
RESULT = "result.json"
GPU_CHECK = "gpu_check.json"  # written by `trainer.check --on_gpus`
RUN_FILES = (RUN_INFO, STATS, RESULT)
# the cost of the Vertex AI jobs that wrote to the directory, written by `deploy`
BILLED = "billed.json"
# confusion matrix and accuracy by class, from a classifier's last evaluation
CLASSES = "classes.json"
SKIPPED_IMAGES = "skipped_images.txt"
# of a checkpoint; uploaded last and deleted first: a folder that has it is complete
MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
LOGS = "logs"
MODEL = "model"
SAMPLES = "samples"
STEP_PREFIX = "step-"
SAMPLE_FILES = f"{SAMPLES}/{STEP_PREFIX}*.png"  # a pattern, relative to the job directory
COMMIT_FILE = "commit.txt"  # setup.py writes it into the wheel
TOO_OLD = "written by a version before 0.3: use vertex-trainer 0.3 to read it"
_LIMIT = 1e15  # no count, time or loss of a run is larger: a larger number is damaged
Scalars = dict[str, float]
Content = Mapping[str, Any]  # of a JSON object


def step_name(step: int) -> str:
    """Returns the name of a step's checkpoint folder or, before the suffix, of its sample grid."""
    return f"{STEP_PREFIX}{step:08d}"


def step_of(name: str) -> int:
    """Returns the step in a name that `step_name` made, without suffix; -1 for any other name."""
    digits = name.removeprefix(STEP_PREFIX)
    return int(digits) if digits != name and digits.isdecimal() else -1


class RunInfo(TypedDict, total=False):
    """Describes run.json: what a run is."""

    config: dict[str, Any]
    batch: str
    cluster: dict[str, Any]  # workers, addresses, replicas, rows_per_replica
    devices: list[str]  # of each worker
    gpus: list[str]  # models of the chief's GPUs
    processor: str  # model of the chief's processor
    gpu_environment: dict[str, str]  # variables that TensorFlow and CUDA read at their start
    on_vertex: bool  # a job of Vertex AI, which is billed from its start to its end
    simulated: bool  # logical CPU devices stand for accelerators
    strategy: str
    collectives: str | None  # how replicas sum: nccl or ring; null for one replica
    # examples, examples_per_step, steps_per_epoch, classes, skipped, notes of the source
    data: dict[str, Any]
    # whether and why XLA compiles the steps, and the steps per program; {} until chosen
    compilation: dict[str, Any]
    depends_on_replicas: list[str]
    # whether one replica and two agreed before training: a ReplicaVerdict
    replica_check: dict[str, Any]
    replica_checks: dict[str, str]  # as in result.json
    # --virtual_replicas: weights are bit-identical on any number of replicas that divides it
    equal_bits: int
    total_steps: int
    versions: dict[str, str]
    # versions, and a digest of the own code, with their first step
    versions_by_step: list[dict[str, Any]]
    git_commit: str | None  # of the trainer
    command: str
    started: str  # UTC
    id: str  # of the run, the same after each restart


class QualityOf(TypedDict, total=False):
    """Describes how image metrics, such as FID, were computed.

    Two values are comparable only if all fields but `features` are equal.
    """

    features: str  # the network, as the user named it
    features_sha256: str  # of its input and weights
    samples: int  # real images, and as many generated ones
    formulas: int  # version of the formulas


class Speeds(TypedDict, total=False):
    """Describes how fast steps run; TFLOP/s count the matrix products and convolutions in the graph
    of a step."""

    images_per_second: float | None
    step_seconds: float | None
    input_wait_seconds: float | None  # the part of step_seconds spent waiting for the batch
    tflop_per_second: float | None  # of all replicas
    # model FLOPs utilization: its share of the GPUs' data-sheet rate at the run's precision
    mfu: float | None


class StatsEntry(Speeds, total=False):
    """Describes one line of stats.jsonl: a report, epoch, evaluation, or measurement of images."""

    kind: str
    time: float  # when it was reported, in seconds since 1970
    step: int
    epoch: float
    seconds: float
    # steps that step_seconds leaves out; above 0 in the first line after each start
    untimed_steps: int
    losses: Scalars
    metrics: Scalars
    memory_gib: float
    # memory_gib, utilization_percent; null if nvidia-smi does not know
    gpus: list[dict[str, float | None]]
    # by device of the chief, as TensorFlow counts it; [] where it does not
    peak_device_memory_gib: list[float]
    quality: QualityOf  # in the line of a measurement of images


class Result(Speeds, total=False):
    """Describes result.json: how far a run is, and how it ended."""

    state: str  # running, interrupted, stopped, failed, budget, done
    error: str | None
    exit_code: int  # of a failure
    settings: str  # of a failure: a digest of the settings that failed
    vertex_job: str | None
    written_at: float  # when this file was written, in seconds since 1970
    job_began_at: float  # when the first process of this `vertex_job` began, in seconds since 1970
    steps: int
    asked_steps: int
    epochs: float
    startup_seconds: float | None  # from the start of the process to the end of its first step
    training_seconds: float
    step_flops: int | None  # of all replicas; a multiplication and an addition are two FLOPs
    wall_seconds: float
    # seconds of each class of trainer.base.run_files.goodput; their sum is wall_seconds
    goodput: dict[str, float]
    # from the end of one job to the start of the next, which nobody pays for
    between_jobs_seconds: float
    slow_worker: dict[str, str]  # name, and why
    saving_seconds: float
    peak_memory_gib: float
    peak_device_memory_gib: list[float]  # of this process, as in stats.jsonl
    restarts: int
    steps_repeated: int
    # whether the loaded model/ predicts and evaluates as the model in memory; or why not compared
    saved_model: str
    # why one replica and two were not compared before training, though they should have been
    not_compared: str
    # by kind of step: whether one replica and two agreed; or why they were not compared
    replica_checks: dict[str, str]
    # what the number of replicas changes, if --allow_replica_dependence allows it
    depends_on_replicas: list[str]
    # with --virtual_replicas: their number, and the SHA-256 of all variables at the end
    equal_bits: dict[str, Any]
    epoch_seconds: list[float]
    history: dict[str, list[float]]  # as History.history of Keras: by name, the value of each epoch
    # of a classifier's last evaluation: step, examples, formulas, and the file
    classes: dict[str, Any]
    final: dict[str, Any]  # losses, metrics, and quality (a QualityOf)


def read_run_info(folder: Path) -> tuple[RunInfo, str]:
    """Returns the content of run.json in `folder` and "", or {} and what is wrong with the file.

    Raises UserError for a run of a version before 0.3.
    """
    info, problem = read_json(folder / RUN_INFO)
    if str(mapping(info, "versions").get("trainer")).startswith(("0.1.", "0.2.")):
        raise UserError(f"{folder}: {TOO_OLD}")
    return cast(RunInfo, info), problem


def read_result(folder: Path) -> tuple[Result, str]:
    """Returns result.json of `folder` and "", or {} and what is wrong with the file."""
    return cast(tuple[Result, str], read_json(folder / RESULT))


def record_failure(folder: Path, error: str) -> None:
    """Writes `error` into result.json in `folder`, unless that holds one already."""
    result, _ = read_result(folder)
    if not result.get("error"):
        write_json(folder / RESULT, {**result, "state": "failed", "error": error})


def append_stats(folder: Path, entry: StatsEntry) -> None:
    """Appends one line to stats.jsonl in `folder`; NaN and infinity become null."""
    with writing(folder / STATS), open(folder / STATS, "a", encoding="utf-8") as file:
        file.write(json.dumps(finite(entry), allow_nan=False) + "\n")


def read_stats(folder: Path) -> tuple[list[StatsEntry], str]:
    """Returns the valid lines of stats.jsonl in `folder`, and what is wrong with the others."""
    try:
        text = (folder / STATS).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return [], f"{folder / STATS} is missing"
    except OSError as error:
        return [], f"{folder / STATS} cannot be read ({error})"
    entries = parse_stats(text)
    damaged = len(text.splitlines()) - len(entries)  # a kill may have cut the last one short
    return entries, f"{folder}: damaged lines of {STATS} are left out: {damaged}" if damaged else ""


def drop_stats_after(folder: Path, step: int) -> None:
    """Removes lines after `step`, at which the run resumes, and damaged ones from stats.jsonl."""
    entries = [entry for entry in _valid_entries(folder) if entry["step"] <= step]
    write_whole(folder / STATS, "".join(json.dumps(entry) + "\n" for entry in entries))


def last_reported_step(folder: Path) -> int:
    """Returns the largest step in stats.jsonl in `folder`; 0 if there is none."""
    return max((entry["step"] for entry in _valid_entries(folder)), default=0)


def _valid_entries(folder: Path) -> list[StatsEntry]:
    """Returns the valid lines; raises OSError for an unreadable file, which is then kept."""
    file = folder / STATS
    return parse_stats(file.read_text(encoding="utf-8", errors="replace")) if file.is_file() else []


def parse_stats(text: str) -> list[StatsEntry]:
    """Returns the valid entries in the text of a stats.jsonl."""
    entries = []
    for line in text.splitlines():
        with suppress(ValueError, RecursionError):
            entry = json.loads(line)
            valid = isinstance(entry, dict) and whole(entry.get("step")) is not None
            times = (
                [entry.get(name) for name in ("step_seconds", "images_per_second")] if valid else []
            )
            if (
                valid
                and isinstance(entry.get("kind"), str)
                and all(t is None or number(t) is not None for t in times)
            ):
                entries.append(cast(StatsEntry, entry))
    return entries


def read_json(path: Path) -> tuple[dict[str, Any], str]:
    """Returns the object in a JSON file and "", or {} and what is wrong with the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, f"{path} is missing"
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{path} cannot be read ({error})"
    return (content, "") if isinstance(content, dict) else ({}, f"{path} contains no JSON object")


def write_json(path: Path, content: Content) -> None:
    """Writes a JSON object atomically; NaN and infinity, which JSON does not have, become null."""
    write_whole(path, json.dumps(finite(content), indent=2, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """Returns a copy of `value` in which NaN and infinity are None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def mapping(content: Content, key: str) -> Content:
    """Returns the object under `key`, or an empty one."""
    value = content.get(key)
    return value if isinstance(value, Mapping) else {}


def items(content: Content, key: str) -> list[Any]:
    """Returns the list under `key`, or an empty one."""
    value = content.get(key)
    return value if isinstance(value, list) else []


def losses_and_metrics(entry: Content) -> Scalars:
    """Returns the numbers among the losses and metrics of a line of stats.jsonl."""
    values = {**mapping(entry, "losses"), **mapping(entry, "metrics")}
    return {name: valid for name, value in values.items() if (valid := number(value)) is not None}


def number(value: Any) -> float | None:
    """Returns a number of plausible size as float; None for anything else."""
    valid = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LIMIT
    return float(value) if valid else None


def positive(value: Any) -> float | None:
    """Returns a `number` above 0; None for anything else."""
    valid = number(value)
    return valid if valid is not None and valid > 0 else None


def whole(value: Any) -> int | None:
    """Returns a whole number of plausible size, 0 or more; None for anything else."""
    valid = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LIMIT
    return value if valid else None


def trainer_commit() -> str | None:
    """Returns the Git commit of this package's checkout or wheel; None if unknown."""
    package = Path(__file__).parents[2]
    git = partial(
        subprocess.run, cwd=package, capture_output=True, text=True, timeout=5, check=True
    )
    try:
        git(["git", "ls-files", "--error-unmatch", "__init__.py"])
        return str(git(["git", "rev-parse", "HEAD"]).stdout).strip()
    except (OSError, subprocess.SubprocessError):
        built = package / COMMIT_FILE
        return built.read_text(encoding="utf-8").strip() or None if built.is_file() else None
