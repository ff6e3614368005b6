"""Describes a run's model for whoever serves it, in model/serving.json: written last, so a folder that has it is whole.

Imports no TensorFlow: what registers a model reads it too.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.base.errors import UserError, reason
from trainer.base.run_files.run_layout import MODEL, RUN_INFO
from trainer.base.storage import expanded, parse, write_whole
from trainer.base.storage.checksum import sha256_of
from trainer.base.storage.staging import Staged

SERVING = "serving.json"
FIXED_BATCH = 8  # rows of each call, unless --fixed_batch says otherwise


@dataclasses.dataclass(frozen=True)
class Servable:
    """Holds what a server needs to know beside the network.

    `inputs`, `outputs`: [dtype, shape of a row] by name, null for a free dimension; `image`: [height, width, channels]
    if a row is an image of grey levels; `latent_dim`, `classes`: of a generator; `files`: SHA-256 by name.
    """

    files: Mapping[str, str]
    inputs: Mapping[str, tuple[str, list[int | None]]]
    outputs: Mapping[str, tuple[str, list[int | None]]]
    image: tuple[int, ...] = ()
    class_names: tuple[str, ...] = ()
    latent_dim: int = 0
    classes: int = 0
    fixed_batch: int = FIXED_BATCH


def write_servable(folder: Path, **about: Any) -> None:
    """Writes the description of the model in `folder`, which is otherwise complete."""
    files = {
        path.relative_to(folder).as_posix(): sha256_of(path) for path in sorted(folder.rglob("*")) if path.is_file()
    }
    write_whole(folder / SERVING, json.dumps(dataclasses.asdict(Servable(files, **about)), indent=1) + "\n")


def read_servable(folder: Path, name: str, *, whole: bool = True) -> Servable:
    """Returns the description of a folder, which errors call `name`.

    Raises UserError if there is none or, if it must be `whole`, a file is not as it was exported.
    """
    try:
        about = Servable(**json.loads((folder / SERVING).read_text(encoding="utf-8")))
        about = dataclasses.replace(about, image=tuple(about.image))
        broken = [file for file, digest in about.files.items() if whole and sha256_of(folder / file) != digest]
    except FileNotFoundError as error:
        raise UserError(f"{name}: {_why_missing(folder, Path(str(error.filename)).name)}") from None
    except NotADirectoryError:
        raise UserError(f"{name}: it is a file: name the job directory, or its {MODEL}/") from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{name}: its {SERVING} cannot be read: {reason(error)}: export the model again") from None
    if broken:
        raise UserError(f"{name}: {broken[0]} is not the file that was exported: upload the folder again")
    return about


def _why_missing(folder: Path, file: str) -> str:
    """Returns what the absence of a file of the model means."""
    if not folder.exists() and not folder.parent.exists():
        return "there is no such folder"
    if folder.name == MODEL and not (folder.parent / RUN_INFO).exists() and not folder.exists():
        return f"it holds no run: there is no {RUN_INFO}"
    return f"there is no {file}: wait until the run is done and its model is uploaded"


def model_folder(run: str) -> Path:
    """Returns the local folder with the model of a run, or of a model directory; of one at gs://, a copy."""
    address = parse(run, "run")
    folder = Staged(address, "run").fetch(_of_model) if address else expanded(run)
    return folder if (folder / SERVING).is_file() else folder / MODEL


def _of_model(name: str) -> bool:
    """Returns whether an object below a job directory, or below its model/, is a file of the model."""
    return name.startswith((f"{MODEL}/", "saved_model/")) or name.endswith(SERVING) or ("/" not in name and "." in name)
