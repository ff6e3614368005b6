"""Registers a run's model as a version in Vertex AI's Model Registry, exactly once, and reads
versions.

The user names the model's resource, so that a lost response cannot lead to a second model. Each
version has a label with a digest of its content, by which a version that is already registered is
found.
https://docs.cloud.google.com/gemini-enterprise-agent-platform/reference/rest/v1/projects.locations.models
"""

import hashlib
import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from deploy.base.console import say
from deploy.packaging.image_choice import check_image, installs, remembered
from deploy.platform import buckets
from deploy.platform.api_error import ApiError, unreadable_as_lost
from deploy.platform.rest import Platform
from deploy.platform.retries import retried
from deploy.platform.vertex_api import console_page
from deploy.tiers.gcp_config import GcpConfig, checked_address
from trainer.base.errors import UserError
from trainer.base.run_files.job_files import (
    MODEL,
    RESULT,
    RUN_INFO,
    Content,
    mapping,
    read_result,
    read_run_info,
)
from trainer.base.run_files.serving_file import SERVING, Servable, read_servable
from trainer.base.storage import expanded, parse
from trainer.base.storage.staging import Staged

LABEL = "vertex-trainer-model"
PORT = 8080
# between two looks at an upload, and the longest that it may take
_WAIT_S = 5.0
_OPERATION_S = 1800.0


class ModelVersion(NamedTuple):
    """Holds a registered version.

    `name`: the resource name of its model; `artifact`: the address of its files.
    """

    name: str
    version: str
    aliases: tuple[str, ...]
    image: str
    artifact: str
    labels: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.name}@{self.version}" + f" ({', '.join(self.aliases)})" * bool(self.aliases)


def checked_name(name: str) -> str:
    """Returns the name of a model. Raises UserError unless the registry accepts it as an ID."""
    if not re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", name):
        raise UserError(
            f"name={name}: use small letters, digits, - and _, at most 63, a letter first"
        )
    return name


def register_version(model: Content, backend: Platform) -> ModelVersion:
    """Registers `model` unless the registry has this version, and returns the version.

    A lost response is not an error: the next look at the registry finds the version. Raises
    ApiError if it fails.
    """
    clock = backend.clock
    name = str(model["displayName"])
    deadline = clock.now() + _OPERATION_S
    address = f"{backend.parent}/models/{name}"
    while True:
        # The versions that there are; the first one creates the model.
        try:
            versions = retried(
                lambda: [*map(_version, backend.listed(f"{address}:listVersions", "models"))], clock
            )
            place = {"parentModel": address}
        except ApiError as error:
            if error.code != 404:
                raise
            versions = []
            place = {"modelId": name}
        # Nothing is uploaded if one has this content.
        for version in versions:
            if version.labels.get(LABEL) == model["labels"][LABEL]:
                return version
        try:
            operation = backend.call(
                "POST", f"{backend.parent}/models:upload", json={**place, "model": model}
            )
            while not operation.get("done"):
                if clock.now() > deadline:
                    raise ApiError(
                        504,
                        f"{operation.get('name')} has not ended in {_OPERATION_S / 60:.0f} minutes",
                    )
                clock.sleep(_WAIT_S)
                operation = retried(
                    partial(backend.call, "GET", str(operation.get("name", ""))), clock
                )
            if refusal := operation.get("error"):
                raise ApiError(400, str(refusal.get("message", refusal)))
        # after a lost response, the next turn of the loop finds the version
        except ApiError as error:
            if not (error.transient or error.code == 409) or clock.now() > deadline:
                raise
            clock.sleep(_WAIT_S)


def find_version(reference: str, backend: Platform) -> ModelVersion:
    """Returns the version of NAME, NAME@VERSION or NAME@ALIAS.

    Raises ApiError 404 if there is none.
    """
    checked_name(reference.partition("@")[0])
    return _version(backend.call("GET", f"{backend.parent}/models/{reference}"))


def _version(model: Content) -> ModelVersion:
    with unreadable_as_lost():
        return ModelVersion(
            str(model["name"]).partition("@")[0],
            str(model["versionId"]),
            tuple(model.get("versionAliases", [])),
            model.get("containerSpec", {}).get("imageUri", ""),
            model.get("artifactUri", ""),
            model.get("labels", {}),
        )


class Registration(NamedTuple):
    """Holds a version to register: the model in the form of the API, and its files, which must be
    uploaded first."""

    model: Content
    about: Servable
    files: Path | None  # the run's model/, if it is on this machine


def serving_image(image: str) -> str:
    """Returns the address of the image that serves a model: `image` or, if empty, the one built in
    this folder.

    Raises UserError if there is neither, or if `image` asks for a plain Python image.
    """
    check_image(image)
    built = remembered()
    uri = image or (built.uri if built else "")
    if installs(image):
        raise UserError(
            f"image={image}: a server needs an image with all packages: python -m deploy image"
            " --image=URI"
        )
    if not uri:
        raise UserError(
            "no image to serve the model: build one with python -m deploy image --image=URI, or use"
            " --image="
        )
    return uri


def read_registration(
    run: str, name: str, image: str, gcp: GcpConfig, job: str = ""
) -> Registration:
    """Describes the model of the run at `run` as a version to register.

    `job`: the job that trained it, if known.

    Raises UserError if the run has no complete model, or if it is on this machine and no bucket is
    given.
    """
    address = parse(run, "run")
    is_read = {RUN_INFO, RESULT, f"{MODEL}/{SERVING}"}.__contains__  # no other file is fetched
    folder = Staged(address, "run").fetch(is_read, quiet=True) if address else expanded(run)
    about = read_servable(folder / MODEL, f"{run}/{MODEL}", whole=address is None)
    info = read_run_info(folder)[0]
    result = read_result(folder)[0]
    # What people read, the identity of its content, and the address of its files.
    description = {
        "run": run,
        "recipe": mapping(info, "config").get("recipe"),
        "commit": info.get("git_commit"),
        "data": mapping(info, "data").get("content"),
        "steps": result.get("steps"),
        **mapping(result, "final"),
        **({"job": console_page(job, gcp.project)} if job else {}),
    }
    image = serving_image(image)
    version = hashlib.sha256(json.dumps([image, dict(about.files)]).encode()).hexdigest()[:40]
    artifact = f"{address}/{MODEL}"
    if not address:  # the files are uploaded from this machine
        artifact = f"{checked_address('bucket', gcp.bucket)}/models/{name}/{version}"
    model = {
        "displayName": name,
        "versionDescription": json.dumps(description),
        "labels": {LABEL: version},
        "artifactUri": artifact,
        "containerSpec": {
            "imageUri": image,
            "command": ["python", "-m", "trainer.serve"],
            "ports": [{"containerPort": PORT}],
            "predictRoute": "/predict",
            "healthRoute": "/health",
        },
    }
    return Registration(model, about, None if address else folder / MODEL)


def register_run(registration: Registration, alias: str, backend: Platform) -> ModelVersion:
    """Uploads missing files, registers the version unless the registry has it, and moves `alias` to
    it unless empty.

    Prints and returns the version. Raises UserError if a file is missing in the bucket of a run,
    ApiError if a call fails.
    """
    artifact = str(registration.model["artifactUri"])
    files = registration.about.files
    for name in (*files, SERVING):
        if registration.files:
            buckets.upload(registration.files / name, f"{artifact}/{name}")
        elif not buckets.exists(f"{artifact}/{name}"):
            raise UserError(
                f"{artifact}/{name}: there is no such object: upload the whole folder again"
            )
    version = register_version(registration.model, backend)
    if alias and alias not in version.aliases:
        path = f"{version.name}@{version.version}:mergeVersionAliases"
        content = {"versionAliases": [alias]}
        # The registry takes the alias away from the version that has it.
        version = _version(retried(lambda: backend.call("POST", path, json=content), backend.clock))
    say(f"registered {version}")
    return version
