"""Makes a version of the Model Registry from a job directory: files, image, schemata and what is known of the run."""

import dataclasses
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.tiers.gcp_config import GcpConfig, checked_address
from deploy.tiers.images import check_asked_image, installs, remembered
from deploy.tiers.output import say
from deploy.vertex import buckets
from deploy.vertex.registry import ModelVersion, digest, register, schemata, set_alias, upload_request
from deploy.vertex.rest import Backend
from deploy.vertex.retry import Clock, retried
from trainer.base.errors import UserError
from trainer.base.run_files.records import MODEL, RESULT, RUN_INFO, mapping, read_result, read_run_info
from trainer.base.run_files.serving_file import SERVING, Servable, read_servable
from trainer.base.storage import expanded, parse
from trainer.base.storage.staging import Staged

_DESCRIBING = (RUN_INFO, RESULT, f"{MODEL}/{SERVING}")  # the files that are read of a run


@dataclasses.dataclass(frozen=True)
class Registration:
    """Holds what is to be registered: the model, as the API has it, and the local files that are uploaded before."""

    model: Mapping[str, Any]
    about: Servable
    files: Path | None  # the run's model/, if it is on this machine


def serving_image(image: str) -> str:
    """Returns the image that serves a model. Raises UserError if none is named and none was built in this folder."""
    check_asked_image(image)
    if installs(image):
        raise UserError(f"image={image}: a server needs an image with all packages: python -m deploy image --image=URI")
    built = remembered()
    if image or built:
        return image or (built.uri if built else "")
    raise UserError("no image to serve the model: build one with python -m deploy image --image=URI, or use --image=")


def read_registration(run: str, name: str, image: str, gcp: GcpConfig, job: str = "") -> Registration:
    """Returns the version that a run makes. `job`: the name of the job that trained it, if it is known.

    Raises UserError if the run has no whole model, or is on this machine and no bucket is given.
    """
    address = parse(run, "run")
    folder = Staged(address, "run").fetch(_DESCRIBING.__contains__, quiet=True) if address else expanded(run)
    about = read_servable(folder / MODEL, f"{run}/{MODEL}", whole=address is None)
    info, (result, _) = read_run_info(folder)[0], read_result(folder)
    page = f"https://console.cloud.google.com/vertex-ai/locations/{gcp.region}/training/{job.rsplit('/', 1)[-1]}"
    description = {
        "run": run, "recipe": mapping(info, "config").get("recipe"), "commit": info.get("git_commit"),
        "data": mapping(info, "data").get("content"), "steps": result.get("steps"), **mapping(result, "final"),
        **({"job": page} if job else {}),
    }  # fmt: skip
    image = serving_image(image)
    elsewhere = "" if address else f"{checked_address('bucket', gcp.bucket)}/models/{name}/{digest(image, about)}"
    model = upload_request(name, image, elsewhere or f"{address}/{MODEL}", about, description)
    return Registration(model, about, None if address else folder / MODEL)


def register_run(registration: Registration, alias: str, backend: Backend, clock: Clock) -> ModelVersion:
    """Uploads what is missing, makes the version unless it is there, and moves `alias` to it if one is given."""
    artifact, files = str(registration.model["artifactUri"]), registration.about.files
    for name in files:
        if registration.files:
            buckets.upload(registration.files / name, f"{artifact}/{name}")
        elif not buckets.exists(f"{artifact}/{name}"):
            raise UserError(f"{artifact}/{name}: there is no such object: upload the whole folder again")
    if registration.files:
        buckets.upload(registration.files / SERVING, f"{artifact}/{SERVING}")
    with tempfile.TemporaryDirectory() as scratch:
        for name, text in schemata(registration.about).items():
            Path(scratch, name).write_text(text, encoding="utf-8")
            buckets.upload(Path(scratch, name), f"{artifact}/schemata/{name}")
    version = register(registration.model, backend, clock)
    if alias and alias not in version.aliases:
        version = retried(lambda: set_alias(version, alias, backend), clock)
    say(f"registered {version}")
    return version
