"""Registers a run's model as a version in Vertex AI's Model Registry, once, and reads versions.

The model's resource is named by the user, so a lost answer cannot make a second model; a label with a digest of what is
registered finds a version that is there.
https://docs.cloud.google.com/gemini-enterprise-agent-platform/reference/rest/v1/projects.locations.models
"""

import dataclasses
import hashlib
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from deploy.base.console import say
from deploy.packaging.images import check_asked_image, installs, remembered
from deploy.platform import buckets, vertex_api
from deploy.platform.rest import Platform
from deploy.platform.vertex_api import ApiError, Clock, backoff, console_page, retried
from deploy.tiers.gcp_config import GcpConfig, checked_address
from trainer.base.errors import UserError
from trainer.base.run_files.records import MODEL, RESULT, RUN_INFO, mapping, read_result, read_run_info
from trainer.base.run_files.serving_file import SERVING, Servable, read_servable
from trainer.base.storage import expanded, parse
from trainer.base.storage.staging import Staged

LABEL = "vertex-trainer-model"
PORT = 8080
_WAIT_S, _OPERATION_S = 5.0, 1800.0  # between looks at an upload, and its longest time
_TYPES = {"b": "boolean", "i": "integer", "u": "integer", "f": "number", "s": "string"}  # by a dtype's first letter


@dataclasses.dataclass(frozen=True)
class ModelVersion:
    """Holds a registered version: the model's resource name, number, aliases, image, address of the files, labels."""

    name: str
    version: str
    aliases: tuple[str, ...]
    image: str
    artifact: str
    labels: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.name}@{self.version}" + f" ({', '.join(self.aliases)})" * bool(self.aliases)


def checked_name(name: str) -> str:
    """Returns the name of a model. Raises UserError unless the registry takes it as an ID."""
    if not re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", name):
        raise UserError(f"name={name}: use small letters, digits, - and _, at most 63, a letter first")
    return name


def checked_alias(alias: str) -> str:
    """Returns an alias. Raises UserError unless the registry takes it."""
    if alias and not re.fullmatch(r"[a-z][a-zA-Z0-9-]{0,126}[a-z0-9]", alias):
        raise UserError(f"alias={alias}: use letters, digits and -, 2 to 128, a small letter first, as champion")
    return alias


def digest(image: str, about: Servable) -> str:
    """Returns what tells a version from others: of its image and its files."""
    return hashlib.sha256(json.dumps([image, dict(about.files)]).encode()).hexdigest()[:40]


def schemata(about: Servable) -> dict[str, str]:
    """Returns the schema of an instance and of a prediction, as YAML of OpenAPI 3, by the name of their file."""
    schemas = {}
    for kind, values in (("instance", about.requested), ("prediction", about.answered)):
        properties: dict[str, Any] = {}
        for name, (dtype, shape) in values.items():
            properties[name] = {"type": _TYPES[dtype[0]]}
            for size in reversed(shape):  # nested lists of this shape
                bounds = {"minItems": size, "maxItems": size} if size else {}
                properties[name] = {"type": "array", "items": properties[name], **bounds}
        # One value stands without its name, but not those of a generator.
        alone = len(properties) == 1 and not about.latent_dim
        whole = {"type": "object", "properties": properties, "required": [*properties]}
        schemas[kind] = next(iter(properties.values())) if alone else whole
    return {f"{kind}.yaml": yaml.safe_dump({"title": kind, **schema}) for kind, schema in schemas.items()}


def register(model: Mapping[str, Any], backend: Platform, clock: Clock) -> ModelVersion:
    """Returns the version of this model, which is made unless it is there. Raises ApiError, UserError if it fails."""
    name, deadline = str(model["displayName"]), clock.now() + _OPERATION_S
    address = f"{backend.parent}/models/{name}"
    for wait in backoff(_WAIT_S):
        try:
            versions = retried(lambda: [*map(_version, backend.listed(f"{address}:listVersions", "models"))], clock)
            place = {"parentModel": address}
        except ApiError as error:
            if error.code != 404:
                raise
            versions, place = [], {"modelId": name}
        for version in versions:
            if version.labels.get(LABEL) == model["labels"][LABEL]:
                return version
        try:
            operation = backend.call("POST", f"{backend.parent}/models:upload", json={**place, "model": model})
            _finish(operation, backend, clock)
        except ApiError as error:  # a lost answer: the next look finds the version
            if not (error.transient or error.code == 409) or clock.now() > deadline:
                raise
            clock.sleep(wait)
    raise AssertionError("backoff never ends")


def find_version(reference: str, backend: Platform) -> ModelVersion:
    """Returns the version of NAME, NAME@VERSION or NAME@ALIAS. Raises ApiError 404 if there is none."""
    name, _, version = reference.partition("@")
    return _version(backend.call("GET", f"{backend.parent}/models/{checked_name(name)}{f'@{version}' * bool(version)}"))


def _version(model: Mapping[str, Any]) -> ModelVersion:
    with vertex_api.unreadable_as_lost():
        return ModelVersion(
            str(model["name"]).partition("@")[0], str(model["versionId"]), tuple(model.get("versionAliases", [])),
            model.get("containerSpec", {}).get("imageUri", ""), model.get("artifactUri", ""), model.get("labels", {}),
        )  # fmt: skip


def _finish(operation: Mapping[str, Any], backend: Platform, clock: Clock) -> None:
    """Waits for an upload. Raises ApiError if it fails or does not end."""
    deadline = clock.now() + _OPERATION_S
    while not operation.get("done"):
        if clock.now() > deadline:
            raise ApiError(504, f"{operation.get('name')} has not ended in {_OPERATION_S / 60:.0f} minutes")
        clock.sleep(_WAIT_S)
        name = str(operation.get("name", ""))
        operation = retried(lambda name=name: backend.call("GET", name), clock)  # type: ignore[misc]
    if error := operation.get("error"):
        raise ApiError(400, str(error.get("message", error)))


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
    description = {
        "run": run, "recipe": mapping(info, "config").get("recipe"), "commit": info.get("git_commit"),
        "data": mapping(info, "data").get("content"), "steps": result.get("steps"), **mapping(result, "final"),
        **({"job": console_page(job, gcp.project)} if job else {}),
    }  # fmt: skip
    image = serving_image(image)
    elsewhere = "" if address else f"{checked_address('bucket', gcp.bucket)}/models/{name}/{digest(image, about)}"
    artifact = elsewhere or f"{address}/{MODEL}"
    model = {
        "displayName": name, "versionDescription": json.dumps(description), "labels": {LABEL: digest(image, about)},
        "artifactUri": artifact,
        "containerSpec": {
            "imageUri": image, "command": ["python", "-m", "trainer.serve"], "ports": [{"containerPort": PORT}],
            "predictRoute": "/predict", "healthRoute": "/health",
        },
        "predictSchemata": {
            f"{kind}SchemaUri": f"{artifact}/schemata/{kind}.yaml" for kind in ("instance", "prediction")
        },
    }  # fmt: skip
    return Registration(model, about, None if address else folder / MODEL)


def register_run(registration: Registration, alias: str, backend: Platform, clock: Clock) -> ModelVersion:
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
        path, content = f"{version.name}@{version.version}:mergeVersionAliases", {"versionAliases": [alias]}
        version = _version(retried(lambda: backend.call("POST", path, json=content), clock))  # from whichever has it
    say(f"registered {version}")
    return version
