"""Saves and restores checkpoints: all that a run resumes from, each a folder that is written
atomically.

    step-00000500/manifest.json           sizes and SHA-256 of the files and of itself, the weights
                                          that are trained, the state beside the variables
    step-00000500/variables.index, .data  in TensorFlow's format (tf.train.load_checkpoint reads it)

Training waits only for a snapshot, which a thread writes. Only the chief reads and writes.
TensorFlow's object graph silently leaves out the state of Keras's SeedGenerators, so variables are
named here.
"""

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainer.base.errors import NotFinite, UserError, reason
from trainer.base.log import log
from trainer.base.run_files.job_files import (
    CHECKPOINTS,
    MANIFEST,
    STEP_PREFIX,
    finite,
    step_name,
    step_of,
    write_json,
)
from trainer.base.run_files.mirror import Mirror
from trainer.base.storage import atomic_folder, sync
from trainer.base.storage.local_files import sha256_of
from trainer.cluster.strategy import Replicas
from trainer.invariance.gradients import reachable
from trainer.reporting.error_lines import tensorflow_writing
from trainer.reporting.progress import State

Variables = Mapping[str, Any]  # of a model, or their values, by name
Arrays = dict[str, npt.NDArray[Any]]
WEIGHTS = "model/"  # the prefix of a network's variables; all others have "training/"
# The prefix is that of arrays that callbacks hold, such as the best weights of EarlyStopping.
CALLBACKS = "callbacks/"
METRICS = "metrics/"  # the prefix of what metrics have counted in the epoch so far


def variables_of(model: keras.Model) -> Variables:
    """Returns every variable that training changes, by name.

    The name does not depend on strategy or replicas. Metrics are left out, as each replica has
    counts of its own (see `Checkpoints`), and so are learning rates, which LearningRates holds.
    """
    variables: dict[str, Any] = {}
    for variable in _all(model, {id(variable) for variable in model.metrics_variables}):
        if not _is_rate(variable):
            prefix = WEIGHTS if len(variables) < len(model.weights) else "training/"
            # The words before the last may contain Keras's count of layers.
            kind = variable.name.split(":")[0].split("_")[-1]
            variables[f"{prefix}{len(variables):04d}/{kind}"] = variable
    return variables


def of_networks(variables: Variables) -> dict[str, Any]:
    """Returns those of the variables, or of their values, that are weights of networks."""
    return {name: variable for name, variable in variables.items() if name.startswith(WEIGHTS)}


class LearningRates:
    """Holds by what factors callbacks changed constant learning rates."""

    def __init__(self, model: keras.Model) -> None:
        self._rates = [variable for variable in _all(model, set()) if _is_rate(variable)]
        self._configured = self._now()

    def _now(self) -> list[float]:
        return [float(keras.ops.convert_to_numpy(rate)) for rate in self._rates]

    def state(self) -> list[float]:
        """Returns a factor for each rate; 1 if no callback changed it."""
        pairs = zip(self._now(), self._configured, strict=True)
        return [now / before if before else 1.0 for now, before in pairs]

    def resume(self, factors: Sequence[float]) -> None:
        """Sets each rate to the configured one times its factor."""
        for rate, before, factor in zip(self._rates, self._configured, factors, strict=True):
            rate.assign(before * float(factor))


def _is_rate(variable: Any) -> bool:
    return getattr(variable, "name", "") == "learning_rate"


def _all(model: keras.Model, seen: set[int]) -> Iterator[Any]:
    """Yields the model's weights, then its random state, then all other variables it reaches."""
    others = []
    for item in reachable(model):
        if isinstance(item, keras.optimizers.Optimizer):
            others += item.variables
        elif isinstance(item, tf.Variable | keras.Variable) and not isinstance(item, keras.Metric):
            others.append(item)
    for variable in (*model.weights, *model.variables, *others):
        if id(variable) not in seen:
            seen.add(id(variable))
            yield variable


def snapshot(variables: Variables) -> Arrays:
    """Returns copies of the current values in the host's memory.

    They are copies because a tensor that refers to a variable's buffer would make the next step
    copy the variable on the device, which would then hold the whole state twice until the
    checkpoint is written.
    """
    return {name: tf.convert_to_tensor(variable).numpy() for name, variable in variables.items()}


def digest_of(values: Arrays) -> str:
    """Returns the SHA-256 of variables with their names and types.

    It is equal only where all bits are.
    """
    digest = hashlib.sha256()
    for name, value in values.items():
        digest.update(f"{name} {value.dtype} {value.shape}\n".encode() + value.tobytes())
    return digest.hexdigest()


def assign_values(variables: Variables, values: Arrays | None, replicas: Replicas) -> None:
    """Sets every variable to its value on all replicas of all workers.

    Only the chief needs `values`.
    """
    with replicas.strategy.scope():
        for name, variable in variables.items():
            value = values[name] if values is not None else np.zeros(variable.shape)
            if replicas.cluster.several:
                value = replicas.sum_over_workers(value)
            variable.assign(tf.cast(value, variable.dtype))


def check_fits(variables: Variables, values: Arrays, origin: str) -> None:
    """Raises UserError if the saved names and shapes are not those of this model."""
    ours = {name: list(variable.shape) for name, variable in variables.items()}
    theirs = {name: list(value.shape) for name, value in values.items()}
    name = next((name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)), None)
    if name:
        raise UserError(
            f"{origin}: {name} is {theirs.get(name, 'missing')} in it, {ours.get(name, 'missing')}"
            " in this model: it is of another model, or of another version of Keras: use those of"
            " its run.json, or another folder"
        )


_PREFIX = "variables"


class Damaged(Exception):
    """Reports a checkpoint that differs from its manifest; the text names the file."""


@dataclass
class Checkpoints:
    """Keeps the newest `keep` checkpoints of `model` in `folder`, and the best one.

    Gives each to `mirror`.
    steps: those of which this model has checkpoints, if the run trains several one after another;
        ends: the steps whose checkpoints are kept, too.
    """

    model: keras.Model
    replicas: Replicas
    folder: Path
    keep: int
    mirror: Mirror = field(default_factory=Mirror)
    steps: range = range(sys.maxsize)
    ends: Collection[int] = ()
    restored: str | None = None  # the address that restore() read
    saving_seconds: float = 0.0  # for which training waited

    def __post_init__(self) -> None:
        self._variables = variables_of(self.model)
        weights = of_networks(self._variables)
        self._trained = {name: weight.path for name, weight in weights.items() if weight.trainable}
        # It is the newest step that is saved or being written, and whether its hooks are pending.
        self._saved = (-1, False)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def restore(self) -> tuple[int, State] | None:
        """Restores the newest intact checkpoint on all workers.

        Returns its step and state, with the "arrays" of `save` if there are any; None if none
        exists.
        """
        # The chief tries its checkpoints, the newest first, until one is intact.
        manifest = None
        values = None
        arrays = {}
        damaged = []
        folders = checkpoint_folders(self.folder) if self.replicas.cluster.is_chief else []
        folders = [folder for folder in folders if step_of(folder.name) in self.steps]
        for folder in reversed(folders):
            self.mirror.fetch(folder)
            try:
                manifest, values = read_checkpoint(folder)
            except Damaged as error:
                log.warning(f"checkpoint {folder.name} is damaged ({error}): trying the one before")
                damaged.append(str(error))
                continue
            self.restored = self.mirror.where(folder)
            beside = [name for name in values if name.startswith((CALLBACKS, METRICS))]
            arrays = {name: values.pop(name) for name in beside}
            check_fits(self._variables, values, self.restored)
            break
        if damaged and manifest is None:
            raise UserError(
                f"{self.mirror.where(self.folder)}: none of its checkpoints can be read"
                f" ({damaged[0]}): nothing is overwritten; repair them, or use another --job_dir"
            )

        # All workers get its values.
        manifest = self.replicas.from_worker(manifest)
        if manifest is None:
            return None
        assign_values(self._variables, values, self.replicas)
        counts = [name for name in arrays if name.startswith(METRICS)]
        self._restore_counts({name: arrays.pop(name) for name in counts})
        if self.replicas.cluster.several:
            kinds = [(name, array.dtype.name, array.shape) for name, array in arrays.items()]
            for name, dtype, shape in self.replicas.from_worker(kinds):
                array = self.replicas.sum_over_workers(arrays.get(name, np.zeros(shape)))
                arrays[name] = array.astype(dtype)
        self._saved = (manifest["step"], bool(manifest["state"].get("pending")))
        return manifest["step"], manifest["state"] | ({"arrays": arrays} if arrays else {})

    def save(self, step: int, state: State) -> None:
        """Takes a snapshot after `step` steps and writes it in the background.

        First raises what `wait` raises. The chief writes, and a step only once, or again when its
        pending hooks have run. `state` is stored beside the variables, its "arrays" with them; the
        checkpoint of its ["best"]["step"] is kept as well.
        """
        saved = (step, bool(state.get("pending")))
        if saved == self._saved:
            return
        self.wait()
        began = time.monotonic()
        self._saved = saved
        counts = {name: self._of_all(parts) for name, parts in self._counts().items()}
        if not self.replicas.cluster.is_chief:
            return
        state = dict(state)
        values = snapshot(self._variables) | counts | state.pop("arrays", {})
        # The state becomes text now, as later steps change it while the thread writes. Arrays in it
        # are the counts of metrics.
        content = {"step": step, "trained": self._trained, "state": state}
        manifest = json.dumps(content, default=np.ndarray.tolist)
        self._writing = self._thread.submit(self._write, step, values, manifest)
        self.saving_seconds += time.monotonic() - began

    def _counts(self) -> dict[str, list[Any]]:
        """Returns what metrics have counted in the epoch so far.

        It is, by name, the part of each variable on each of this worker's replicas.
        """
        counts = {}
        for number, variable in enumerate(self.model.metrics_variables):
            value = variable.value if isinstance(variable, keras.Variable) else variable
            parts = self.replicas.strategy.experimental_local_results(value)
            counts[f"{METRICS}{number:04d}"] = list(parts)
        return counts

    def _of_all(self, parts: list[Any]) -> npt.NDArray[Any]:
        """Returns the counts of all replicas, (replicas, …); every worker must call it."""
        cluster = self.replicas.cluster
        local = np.stack([part.numpy() for part in parts])
        if not cluster.several:
            return local
        by_worker = np.zeros((cluster.workers, *local.shape))
        by_worker[cluster.index] = local
        return self.replicas.sum_over_workers(by_worker).reshape(-1, *local.shape[1:])

    def _restore_counts(self, arrays: Arrays) -> None:
        """Sets the counts that `save` has stored, unless the model has other metrics now.

        Only the chief needs `arrays`.
        For another number of replicas the first one gets the sums of all: a metric is read as a sum
        over replicas.
        """
        # The chief decides whether the metrics are the same.
        replicas = self.replicas
        counts = self._counts()
        shapes = {name: tuple(parts[0].shape) for name, parts in counts.items()}
        saved_shapes = {name: array.shape[1:] for name, array in arrays.items()}
        if not replicas.from_worker(saved_shapes == shapes):
            return

        # It sends every worker the counts of all replicas, of which each takes its own.
        for name, parts in counts.items():
            values = np.zeros((replicas.count, *shapes[name]))
            if replicas.cluster.is_chief:
                saved = arrays[name]
                if len(saved) == len(values):
                    values[:] = saved
                else:
                    values[0] = saved.sum(axis=0)
            own = slice(replicas.first, replicas.first + replicas.local)
            rows = replicas.sum_over_workers(values)[own]
            for part, row in zip(parts, rows, strict=True):
                part.assign(tf.cast(row, part.dtype))

    def wait(self) -> None:
        """Waits until the last save is written.

        Raises UserError if it failed, or NotFinite for NaN on one worker.
        """
        began = time.monotonic()
        error = self._writing.exception() if self._writing else None
        self._writing = None
        self.saving_seconds += time.monotonic() - began
        if error:
            raise error

    def _write(self, step: int, values: Arrays, text: str) -> None:
        """Writes a checkpoint and removes old ones, in a thread.

        `text` is the manifest without files. The next save or wait raises its exception, in the
        training thread.
        """
        # Values are checked before anything is written, so that the last good checkpoint stays the
        # newest.
        for name, value in values.items():
            if not name.startswith((CALLBACKS, METRICS)) and not np.isfinite(value).all():
                raise NotFinite.at(step, name)
        folder = self.folder / step_name(step)
        manifest = json.loads(text)
        write_checkpoint(folder, values, manifest)
        self.mirror.put(folder)
        # The newest up to `step` are kept, and the best. Those of later steps are damaged:
        # restore() skipped them.
        whole = checkpoint_folders(self.folder)
        best = (manifest["state"].get("best") or {}).get("step")
        newest = [old for old in whole if step_of(old.name) <= step][-self.keep :]
        for old in whole:
            if old not in newest and step_of(old.name) not in (best, *self.ends):
                self.mirror.remove(old)
        # A process that was killed may have left one half written.
        for half in self.folder.glob(f".{STEP_PREFIX}*"):
            shutil.rmtree(half, ignore_errors=True)

    def remove_after(self, step: int) -> None:
        """Removes the checkpoints of all later steps."""
        for folder in checkpoint_folders(self.folder):
            if step_of(folder.name) > step:
                self.mirror.remove(folder)

    @property
    def latest(self) -> str | None:
        """Returns the address of the newest checkpoint."""
        folders = checkpoint_folders(self.folder)
        return self.mirror.where(folders[-1]) if folders else None


def checkpoint_folders(folder: Path) -> list[Path]:
    """Returns the checkpoint folders in `folder`, oldest first.

    One that a kill left half written has another name.
    """
    paths = folder.glob(f"{STEP_PREFIX}*")
    folders = [path for path in paths if path.is_dir() and step_of(path.name) >= 0]
    return sorted(folders, key=lambda path: step_of(path.name))


def write_checkpoint(folder: Path, values: Arrays, manifest: dict[str, Any]) -> None:
    """Writes `folder` atomically: the variables, then the manifest with checksums."""
    with tensorflow_writing(folder), atomic_folder(folder) as beside:
        with tf.device("CPU:0"):
            tf.raw_ops.SaveV2(
                prefix=str(beside / _PREFIX),
                tensor_names=list(values),
                shape_and_slices=[""] * len(values),
                tensors=[tf.identity(value) for value in values.values()],
            )
        files = {path.name: _fingerprint(path) for path in sorted(beside.iterdir())}
        for name in files:
            sync(beside / name)
        content = finite({**manifest, "files": files})
        write_json(beside / MANIFEST, {**content, "sha256": _digest(content)})


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the manifest and the variables by name.

    Raises Damaged, naming the file, if they do not match.
    """
    # The manifest must be whole and of this trainer.
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        intact = manifest.pop("sha256") == _digest(manifest)
    # A damaged file may hold any JSON, or none.
    except Exception as error:
        raise Damaged(f"{folder.name}/{MANIFEST}: {type(error).__name__}") from None
    if not intact:
        raise Damaged(f"{folder.name}/{MANIFEST} has another checksum")
    files = manifest.get("files")
    step = manifest.get("step")
    known = isinstance(files, dict) and all(
        Path(name).name == name and isinstance(files[name], dict) for name in files
    )
    if not (
        known
        and isinstance(manifest.get("state"), dict)
        and type(step) is int
        and 0 <= step < 2**63
    ):
        raise Damaged(f"{folder.name}/{MANIFEST} is not of this trainer")

    # Each of its files must have the size and the checksum that it states.
    for name, fingerprint in files.items():
        try:
            actual = _fingerprint(folder / name)
        except (OSError, ValueError):
            raise Damaged(f"{folder.name}/{name} is missing") from None
        if actual != fingerprint:
            kind = "checksum" if actual["bytes"] == fingerprint.get("bytes") else "size"
            raise Damaged(f"{folder.name}/{name} has another {kind}")

    # TensorFlow reads the variables, and raises many types of errors.
    try:
        reader = tf.train.load_checkpoint(str(folder / _PREFIX))
        names = reader.get_variable_to_shape_map()
        return manifest, {name: reader.get_tensor(name) for name in names}
    except Exception as error:
        raise Damaged(f"{folder.name}/{_PREFIX}: {reason(error)}") from None


def load_weights(model: keras.Model, path: Path, replicas: Replicas, origin: str = "") -> None:
    """Loads the networks' weights from another run.

    path: a checkpoint, or a folder whose newest one is taken. Raises UserError, calling the
    checkpoint `origin`, if it is damaged or does not fit.
    """
    origin = origin or f"initial_checkpoint={path}"
    candidates = [
        path,
        *reversed(checkpoint_folders(path)),
        *reversed(checkpoint_folders(path / CHECKPOINTS)),
    ]
    whole = next((folder for folder in candidates if (folder / MANIFEST).is_file()), None)
    if whole is None:
        raise UserError(
            f"{origin}: no checkpoint found: use a job directory, or one of its step-… folders"
        )
    try:
        _, values = read_checkpoint(whole)
    except Damaged as error:
        raise UserError(f"{origin}: damaged ({error}): use another one") from None
    variables = of_networks(variables_of(model))
    saved = of_networks(values)
    check_fits(variables, saved, origin)
    assign_values(variables, saved if replicas.cluster.is_chief else None, replicas)


def _fingerprint(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
