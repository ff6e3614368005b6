"""Describes a run's model for whoever serves it, in model/serving.json: written last, so a folder that has it is whole.

Imports no TensorFlow: what registers a model reads it too.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.base.errors import UserError, reason
from trainer.base.storage import write_whole

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
    files = {path.relative_to(folder).as_posix(): _sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    write_whole(folder / SERVING, json.dumps(dataclasses.asdict(Servable(files, **about)), indent=1) + "\n")


def read_servable(folder: Path, name: str, *, whole: bool = True) -> Servable:
    """Returns the description of a folder, which errors call `name`.

    Raises UserError if there is none or, if it must be `whole`, a file is not as it was exported.
    """
    try:
        about = Servable(**json.loads((folder / SERVING).read_text(encoding="utf-8")))
        about = dataclasses.replace(about, image=tuple(about.image))
        broken = [file for file, digest in about.files.items() if whole and _sha256(folder / file) != digest]
    except FileNotFoundError as error:
        missing = Path(str(error.filename)).name
        raise UserError(
            f"{name}: there is no {missing}: wait until the run is done and its model is uploaded"
        ) from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{name}: its {SERVING} cannot be read: {reason(error)}: export the model again") from None
    if broken:
        raise UserError(f"{name}: {broken[0]} is not the file that was exported: upload the folder again")
    return about


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()
