"""Describes a run's model for its server, and downloads a run's model or checkpoint for another
run.

The description is model/serving.json. It is written last and has the checksums of the other files,
so that a folder whose description can be read is complete. Imports no TensorFlow: `deploy` reads it
too.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path, PurePosixPath
from typing import Any

from trainer.base.errors import UserError, reason
from trainer.base.run_files.job_files import CHECKPOINTS, MANIFEST, MODEL, STEP_PREFIX, TOO_OLD
from trainer.base.storage import Address, expanded, parse, write_whole
from trainer.base.storage.gcs import connect
from trainer.base.storage.local_files import sha256_of
from trainer.base.storage.staging import Staged, stage

SERVING = "serving.json"


@dataclass(frozen=True)
class Servable:
    """Holds what a server needs to know about a model beside the network.

    `inputs`, `outputs`: [dtype, shape of a row] by name, null for a free dimension; `image`:
    [height, width, channels] if a row is an image of grey levels; `latent_dim`, `classes`: of a
    generator; `files`: SHA-256 by name; `scores`: whether a classifier with `class_names` returns
    logits or probabilities.
    """

    files: Mapping[str, str]
    inputs: Mapping[str, tuple[str, list[int | None]]]
    outputs: Mapping[str, tuple[str, list[int | None]]]
    image: tuple[int, ...] = ()
    class_names: tuple[str, ...] = ()
    latent_dim: int = 0
    classes: int = 0
    scores: str = ""

    @property
    def requested(self) -> dict[str, tuple[str, list[int | None]]]:
        """Returns the inputs of a request for one row, in the form of `inputs`."""
        if self.latent_dim:
            return {name: ("int32", []) for name in ("seed", "label")[: 1 + bool(self.classes)]}
        if self.image:
            return {name: ("uint8", [*self.image]) for name in self.inputs}
        return {**self.inputs}

    @property
    def answered(self) -> dict[str, tuple[str, list[int | None]]]:
        """Returns the values of the response for one row, in the form of `outputs`."""
        if self.latent_dim:
            return {"b64": ("string", [])}
        scores: dict[str, tuple[str, list[int | None]]] = {
            "probabilities": ("float64", [len(self.class_names)]),
            "label": ("string", []),
        }
        return {**self.outputs, **(scores if self.scores else {})}


def write_servable(folder: Path, **about: Any) -> None:
    """Writes serving.json, with the checksums of all files of `folder`.

    about: the other fields of `Servable`.
    """
    paths = filter(Path.is_file, sorted(folder.rglob("*")))
    files = {path.relative_to(folder).as_posix(): sha256_of(path) for path in paths}
    write_whole(folder / SERVING, json.dumps(asdict(Servable(files, **about)), indent=1) + "\n")


def read_servable(folder: Path, name: str, *, whole: bool = True) -> Servable:
    """Reads serving.json in `folder`; errors call the folder `name`.

    Raises UserError if it is missing, cannot be read or is of a version before 0.3, which lacks
    keys and, with `whole`, if a file is not as it was exported.
    """
    try:
        content = json.loads((folder / SERVING).read_text(encoding="utf-8"))
        servable = Servable(**{field.name: content[field.name] for field in fields(Servable)})
        servable = replace(servable, image=tuple(servable.image))
        digests = servable.files.items() if whole else ()
        broken = [file for file, digest in digests if sha256_of(folder / file) != digest]
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(
            f"{name}: there is no {Path(str(error.filename)).name}: name the job directory of a run"
            f" that is done, or its {MODEL}/"
        ) from None
    except KeyError:
        raise UserError(f"{name}: {TOO_OLD}") from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{name}: its {SERVING} cannot be read: {reason(error)}: export the model again"
        ) from None
    if broken:
        raise UserError(
            f"{name}: {broken[0]} is not the file that was exported: upload the folder again"
        )
    return servable


def model_folder(run: str) -> Path:
    """Returns the local folder of the model of `run`, a job directory or its model/.

    Downloads a gs:// one.
    """
    address = parse(run, "run")
    folder = expanded(run)
    if address:  # of a job directory or of its model/
        starts = (f"{MODEL}/", "saved_model/")
        folder = Staged(address, "run").fetch(
            lambda name: (
                name.startswith(starts)
                or name.endswith(SERVING)
                or ("/" not in name and "." in name)
            )
        )
    return folder if (folder / SERVING).is_file() else folder / MODEL


_SUFFIXES = (".keras", ".h5")
_MANIFEST = re.compile(rf"(?:{CHECKPOINTS}/)?(?:{STEP_PREFIX}(\d+)/)?{re.escape(MANIFEST)}")


def fetch_checkpoint(path: str, name: str, cache_dir: str) -> Path:
    """Returns a local copy of a checkpoint: a step folder, or the newest of a job directory.

    name: the setting that has the path, for errors. A local path is returned unchanged. Raises
        UserError if an address has no checkpoint.
    """
    address = parse(path, name)
    if address is None:
        return expanded(path)
    below = (remote.below(address) for remote in connect().list(address))
    manifests = [match for match in map(_MANIFEST.fullmatch, below) if match]
    if not manifests:
        raise UserError(
            f"{name}={path}: no checkpoint found: use a job directory, or one of its step-… folders"
        )
    newest = max(manifests, key=lambda match: int(match[1] or 0))
    return stage(str(_parent(address / newest[0])), name, cache_dir)


def fetch_model(path: str, name: str, cache_dir: str = "") -> Path:
    """Returns a local copy of a saved model: a file, or a folder or job directory with one.

    Files with the same suffix beside the file are downloaded too, because a GAN has several. A
    folder without a model.keras is returned itself. name: the setting that has the path, for
    errors.
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
        local = folder.fetch(
            lambda below: below.endswith(needed) and not below.startswith(f"{CHECKPOINTS}/")
        )
    files = (local / below for below in ("", "model.keras", f"{MODEL}/model.keras"))
    return next((file for file in files if file.is_file()), local)


def _parent(address: Address) -> Address:
    return Address(address.bucket, address.name.rpartition("/")[0])
