"""Downloads what a run starts from, a checkpoint or a model of another run, without the rest of that run."""

import re
from pathlib import Path, PurePosixPath

from trainer.base.errors import UserError
from trainer.base.run_files.run_layout import CHECKPOINTS, MANIFEST, MODEL, STEP_PREFIX
from trainer.base.storage.address import Address, expanded, parse
from trainer.base.storage.gcs import connect
from trainer.base.storage.staging import Staged, stage

_SUFFIXES = (".keras", ".h5")
_MODEL_FILES = ("", "model.keras", f"{MODEL}/model.keras")  # below the given path; the first one found counts
_MANIFEST = re.compile(rf"(?:{CHECKPOINTS}/)?(?:{STEP_PREFIX}(\d+)/)?{re.escape(MANIFEST)}")


def fetch_checkpoint(path: str, name: str, cache_dir: str = "") -> Path:
    """Returns a local copy of the checkpoint that the setting `name` names: a step folder, or the newest one below.

    A local path is returned unchanged. Raises UserError if no checkpoint is found.
    """
    address = parse(path, name)
    if address is None:
        return expanded(path)
    below = [remote.address.name[len(address.prefix) :] for remote in connect().list(address)]
    manifests = [match for match in map(_MANIFEST.fullmatch, below) if match]
    if not manifests:
        raise UserError(f"{name}={path}: no checkpoint found: use a job directory, or one of its step-… folders")
    newest = max(manifests, key=lambda match: int(match[1] or 0))
    return stage(str(_parent(address / newest[0])), name, cache_dir)


def fetch_model(path: str, name: str, cache_dir: str = "") -> Path:
    """Returns a local copy of a saved model: a file, a SavedModel folder, or a model or job directory.

    Files of the same suffix beside the file come along, because a GAN has several. Without a file, returns the folder.
    """
    address = parse(path, name)
    if address is None:
        local = expanded(path)
    elif (suffix := PurePosixPath(address.name).suffix) in _SUFFIXES:
        folder = Staged(_parent(address), name, cache_dir)
        if (file := PurePosixPath(address.name).name) not in folder.objects:
            raise UserError(f"{name}={path}: no such object: check with `gcloud storage ls {path}`")
        return folder.fetch(lambda below: "/" not in below and below.endswith(suffix)) / file
    else:
        folder = Staged(address, name, cache_dir)
        needed = ".keras" if any(below.endswith(".keras") for below in folder.objects) else ""
        local = folder.fetch(lambda below: below.endswith(needed) and not below.startswith(f"{CHECKPOINTS}/"))
    return next((file for file in (local / below for below in _MODEL_FILES) if file.is_file()), local)


def _parent(address: Address) -> Address:
    return Address(address.bucket, address.name.rpartition("/")[0])
