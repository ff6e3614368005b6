"""Saves and restores checkpoints: all that a run resumes from, each a folder that is written atomically.

    step-00000500/manifest.json           sizes and SHA-256 of the files and of itself, the weights that are trained,
                                          the state beside the variables
    step-00000500/variables.index, .data  in TensorFlow's format (tf.train.load_checkpoint reads it)

Training waits only for a snapshot, which a thread writes. Only the chief reads and writes.
"""

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.base.errors import NotFinite, UserError, reason
from trainer.base.log import log
from trainer.base.run_files.mirror import Mirror
from trainer.base.run_files.records import CHECKPOINTS, MANIFEST, STEP_PREFIX, finite, step_name, step_of, write_json
from trainer.base.storage import sync, whole_folder
from trainer.base.storage.local_files import sha256_of
from trainer.cluster.strategy import Replicas
from trainer.reporting.tensorflow_errors import tensorflow_writing
from trainer.training.state import WEIGHTS, check_fits, put_back, sharded, snapshot, variables_of

_PREFIX = "variables"


class Damaged(Exception):
    """Reports a checkpoint that differs from its manifest; the text names the file."""


class Checkpoints:
    """Keeps the newest `keep` checkpoints of `model` in `folder`, and the best one; gives each to `mirror`."""

    def __init__(
        self, model: keras.Model, replicas: Replicas, folder: Path, keep: int, mirror: Mirror | None = None
    ) -> None:
        self._variables, self._replicas = variables_of(model), replicas
        weights = {name: variable for name, variable in self._variables.items() if name.startswith(WEIGHTS)}
        self._trained = {name: weight.path for name, weight in weights.items() if weight.trainable}
        self._folder, self._keep, self._mirror = folder, keep, mirror or Mirror()
        self._saved = (-1, False)  # the newest step that is saved or being written, and whether its hooks are pending
        self._writer: threading.Thread | None = None
        self._error: Exception | None = None
        self.restored: str | None = None  # the address that restore() read
        self.saving_seconds = 0.0  # for which training waited

    def restore(self) -> dict[str, Any]:
        """Restores the newest intact checkpoint on all workers; returns its state with `step`, or {} if none exists."""
        manifest, values = self._newest() if self._replicas.cluster.is_chief else (None, None)
        if (manifest := self._replicas.from_chief(manifest)) is None:
            return {}
        put_back(self._variables, values, self._replicas)
        self._saved = (manifest["step"], bool(manifest["state"].get("pending")))
        return {**manifest["state"], "step": manifest["step"]}

    def _newest(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        damaged = []
        for folder in reversed(checkpoint_folders(self._folder)):
            self._mirror.fetch(folder)
            try:
                manifest, values = read_checkpoint(folder)
            except Damaged as error:
                log.warning(f"checkpoint {folder.name} is damaged ({error}): trying the one before")
                damaged.append(str(error))
                continue
            self.restored = self._mirror.where(folder)
            check_fits(self._variables, {name: value.shape for name, value in values.items()}, self.restored)
            return manifest, values
        if damaged:
            raise UserError(
                f"{self._mirror.where(self._folder)}: none of its checkpoints can be read ({damaged[0]}): nothing is "
                "overwritten; repair them, or use another --job_dir"
            )
        return None, None

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Takes a snapshot after `step` steps and writes it in the background; raises like `wait` for the last write.

        All workers must call it, as each may have parts of the state; the chief writes.
        A step is written only once, or again when its pending hooks have run. `state` is stored beside the variables;
        the checkpoint of its ["best"]["step"] is kept as well.
        """
        saved = (step, bool(state.get("pending")))
        if saved == self._saved:
            return
        self.wait()
        began = time.monotonic()
        self._saved, is_chief = saved, self._replicas.cluster.is_chief
        values = snapshot(self._variables if is_chief else sharded(self._variables), self._replicas)
        if not is_chief:
            return
        # Text now: later steps change the state while the thread writes. Arrays are the counts of metrics.
        manifest = json.dumps({"step": step, "trained": self._trained, "state": state}, default=np.ndarray.tolist)
        self._writer = threading.Thread(
            target=self._write, args=(step, values, manifest), name="checkpoint", daemon=True
        )
        self._writer.start()
        self.saving_seconds += time.monotonic() - began

    def wait(self) -> None:
        """Waits until the last save is written; raises UserError if that failed, NotFinite for NaN on one worker."""
        began = time.monotonic()
        if self._writer:
            self._writer.join()
            self._writer = None
        self.saving_seconds += time.monotonic() - began
        error, self._error = self._error, None
        if error:
            raise error

    def _write(self, step: int, values: Mapping[str, Any], text: str) -> None:
        try:
            self._refuse_not_finite(step, values)
            folder, manifest = self._folder / step_name(step), json.loads(text)
            write_checkpoint(folder, values, manifest)
            self._mirror.put(folder)
            self._prune(step, manifest["state"])
        except Exception as error:  # raised by the next save or wait, in the training thread
            self._error = error

    def _refuse_not_finite(self, step: int, values: Mapping[str, Any]) -> None:
        """Refuses a state with NaN, so that the checkpoint before stays the newest."""
        for name, value in values.items():
            if not np.isfinite(value).all():
                error = NotFinite.at(step, name)
                # Only the chief checks, so the other workers would not roll back with it.
                raise UserError(str(error)) if self._replicas.cluster.several else error

    def _prune(self, step: int, state: Mapping[str, Any]) -> None:
        """Keeps the newest up to `step` and the best. Those of later steps are damaged: restore() skipped them."""
        whole = checkpoint_folders(self._folder)
        best = (state.get("best") or {}).get("step")
        newest = [folder for folder in whole if step_of(folder.name) <= step][-self._keep :]
        for folder in whole:
            if folder not in newest and step_of(folder.name) != best:
                self._mirror.remove(folder)
        for folder in self._folder.glob(f".{STEP_PREFIX}*"):  # left half written by a kill
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def latest(self) -> str | None:
        """Returns the address of the newest checkpoint."""
        folders = checkpoint_folders(self._folder)
        return self._mirror.where(folders[-1]) if folders else None


def checkpoint_folders(folder: Path) -> list[Path]:
    """Returns the checkpoint folders in `folder`, oldest first. One that a kill left half written has another name."""
    folders = [path for path in folder.glob(f"{STEP_PREFIX}*") if path.is_dir() and step_of(path.name) >= 0]
    return sorted(folders, key=lambda path: step_of(path.name))


def write_checkpoint(folder: Path, values: Mapping[str, Any], manifest: dict[str, Any]) -> None:
    """Writes `folder` atomically: the variables, then the manifest with their sizes and checksums."""
    with tensorflow_writing(folder), whole_folder(folder) as beside:
        with tf.device("CPU:0"):
            tensors, slices = [tf.identity(value) for value in values.values()], [""] * len(values)
            tf.raw_ops.SaveV2(
                prefix=str(beside / _PREFIX), tensor_names=list(values), shape_and_slices=slices, tensors=tensors
            )
        files = {path.name: _fingerprint(path) for path in sorted(beside.iterdir())}
        for name in files:
            sync(beside / name)
        content = finite({**manifest, "files": files})
        write_json(beside / MANIFEST, {**content, "sha256": _digest(content)})


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the manifest and the variables by name; raises Damaged, naming the file, if they do not match."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        intact = manifest.pop("sha256") == _digest(manifest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{folder.name}/{MANIFEST}: {type(error).__name__}") from None
    if not intact:
        raise Damaged(f"{folder.name}/{MANIFEST} has another checksum")
    files, step = manifest.get("files"), manifest.get("step")
    known = isinstance(files, dict) and all(Path(name).name == name and isinstance(files[name], dict) for name in files)
    if not (known and isinstance(manifest.get("state"), dict) and type(step) is int and 0 <= step < 2**63):
        raise Damaged(f"{folder.name}/{MANIFEST} is not of this trainer")
    for name, fingerprint in files.items():
        try:
            actual = _fingerprint(folder / name)
        except (OSError, ValueError):
            raise Damaged(f"{folder.name}/{name} is missing") from None
        if actual != fingerprint:
            difference = "has another size" if actual["bytes"] != fingerprint.get("bytes") else "has another checksum"
            raise Damaged(f"{folder.name}/{name} {difference}")
    try:
        reader = tf.train.load_checkpoint(str(folder / _PREFIX))
        return manifest, {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        raise Damaged(f"{folder.name}/{_PREFIX}: {reason(error)}") from None


def load_weights(model: keras.Model, path: Path, replicas: Replicas, origin: str = "") -> None:
    """Loads the networks' weights from another run: from the checkpoint `path`, or the newest below it.

    Raises UserError, calling the checkpoint `origin`, if it is damaged or does not fit.
    """
    origin = origin or f"initial_checkpoint={path}"
    candidates = [path, *reversed(checkpoint_folders(path)), *reversed(checkpoint_folders(path / CHECKPOINTS))]
    whole = next((folder for folder in candidates if (folder / MANIFEST).is_file()), None)
    if whole is None:
        raise UserError(f"{origin}: no checkpoint found: use a job directory, or one of its step-… folders")
    try:
        _, values = read_checkpoint(whole)
    except Damaged as error:
        raise UserError(f"{origin}: damaged ({error}): use another one") from None
    variables = {name: variable for name, variable in variables_of(model).items() if name.startswith(WEIGHTS)}
    saved = {name: value for name, value in values.items() if name.startswith(WEIGHTS)}
    check_fits(variables, {name: value.shape for name, value in saved.items()}, origin)
    put_back(variables, saved if replicas.cluster.is_chief else None, replicas)


def _fingerprint(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
