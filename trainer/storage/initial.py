"""What a run begins from, of another run at an address: only what is needed of it is fetched."""

import re
from pathlib import Path, PurePosixPath

from trainer.errors import UserError
from trainer.storage.address import Address, expanded, parse
from trainer.storage.gcs import connect
from trainer.storage.run_layout import CHECKPOINTS, MODEL, STEP_PREFIX
from trainer.storage.staging import Staged, stage

_MODEL_FILES = ("", "model.keras", f"{MODEL}/model.keras")  # below what is named, the first that is there
_MANIFEST = re.compile(rf"(?:{CHECKPOINTS}/)?(?:{STEP_PREFIX}(\d+)/)?manifest\.json")


def fetch_checkpoint(path: str, name: str, cache_dir: str = "") -> Path:
    """A local checkpoint folder for what the setting `name` names: one, or a folder or job directory of several.

    Of several the newest is fetched. A local path is returned as it is. UserError where there is none.
    """
    address = parse(path, name)
    if address is None:
        return expanded(path)
    below = [remote.address.name[len(address.prefix) :] for remote in connect().list(address)]
    manifests = [found for found in map(_MANIFEST.fullmatch, below) if found]
    if not manifests:
        raise UserError(f"{name}={path}: no checkpoint there: give a job directory, or one of its step-… folders")
    newest = max(manifests, key=lambda found: int(found[1] or 0))
    return stage(str(_parent(address / newest[0])), name, cache_dir)


def fetch_model(path: str, name: str, cache_dir: str = "") -> Path:
    """A local file or folder for a saved model: a file, a SavedModel folder, or a model or job directory.

    A file comes with those of its kind beside it: a GAN has several. Where none is found, the folder is returned.
    """
    address = parse(path, name)
    if address is None:
        local = expanded(path)
        return next((file for file in (local / below for below in _MODEL_FILES) if file.is_file()), local)
    for file in (address / below if below else address for below in _MODEL_FILES):
        if file.name and connect().get(file):
            return _with_its_kind(file, name, cache_dir)
    return Staged(address, name, cache_dir).fetch(lambda below: not below.startswith(f"{CHECKPOINTS}/"))


def _with_its_kind(file: Address, name: str, cache_dir: str) -> Path:
    whole = PurePosixPath(file.name)
    beside = Staged(_parent(file), name, cache_dir)
    return beside.fetch(lambda below: "/" not in below and below.endswith(whole.suffix)) / whole.name


def _parent(address: Address) -> Address:
    return Address(address.bucket, address.name.rpartition("/")[0])
