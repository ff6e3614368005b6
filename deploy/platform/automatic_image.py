"""Finds the image that has what a job requires in the project's Artifact Registry, or has Cloud
Build make it: --image=auto.

Its tag is a SHA-256 of what it has, so that equal jobs share it. Nobody waits for a build: the job
that asks for it starts in a plain image.
"""

import hashlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from deploy.packaging.distributions import PYTHON
from deploy.packaging.image_choice import AUTO, INSTALL, PLAIN_IMAGE, TO_BUILD
from deploy.platform.api_error import ApiError, unreadable_as_lost
from deploy.platform.rest import address, call, pages
from deploy.tiers.gcp_config import GcpConfig
from trainer.base.errors import UserError

REPOSITORY = "trainer"


def automatic_images(gcp: GcpConfig) -> list[Mapping[str, Any]]:
    """Returns the images of --image=auto in a region. Raises ApiError, 404 without the repository.

    https://docs.cloud.google.com/artifact-registry/docs/reference/rest/v1/projects.locations.repositories.dockerImages
    """
    service = address("ARTIFACTREGISTRY", "https://artifactregistry.googleapis.com")
    place = f"projects/{gcp.project}/locations/{gcp.region}/repositories/{REPOSITORY}"
    url = f"{service}/v1/{place}/dockerImages"
    images = pages("dockerImages", lambda token: call("GET", url, params=token))
    return [image for image in images if f"/{AUTO}@" in image["uri"]]


def automatic_image(gcp: GcpConfig, requirements: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the value of --image= for a job with these requirements, and lines on why its image
    cannot be used.

    `auto:URI` names the image, TO_BUILD says that there is none yet, INSTALL that none can be made.
    Raises UserError for a requirement that is an option of pip.
    """
    if any(line.startswith("-") for line in requirements):
        raise UserError(
            f"image={AUTO}: requirements.txt has options of pip: list packages alone, or use"
            f" --image={INSTALL}"
        )
    if not requirements:
        return INSTALL, []
    try:
        tag, _ = _contents(tuple(requirements))
        uris = [image["uri"] for image in automatic_images(gcp) if tag in image.get("tags", [])]
    except ApiError as error:
        return INSTALL, [_not_made(error, gcp)]
    if uris:
        return f"{AUTO}:{uris[0]}", []
    return TO_BUILD, [f"image={AUTO}: Cloud Build makes the image that the next such job runs in"]


def request_image(gcp: GcpConfig, requirements: Sequence[str]) -> str:
    """Asks Cloud Build for the image of these requirements, unless it was asked before, and returns
    a line on that.

    https://docs.cloud.google.com/build/docs/api/reference/rest/v1/projects.builds
    """
    service = address("CLOUDBUILD", "https://cloudbuild.googleapis.com")
    builds = f"{service}/v1/projects/{gcp.project}/builds"
    try:
        tag, dockerfile = _contents(tuple(requirements))
        listed = call("GET", builds, params={"filter": f'tags="{tag}"', "pageSize": 1})
        newest = next(iter(listed.get("builds", [])), {"status": "SUCCESS"})
        if newest["status"] != "SUCCESS":
            state = f"{newest['status']}: {newest.get('logUrl', newest['id'])}"
            return f"image={AUTO}: the state of its build is {state}"
        uri = f"{gcp.region}-docker.pkg.dev/{gcp.project}/{REPOSITORY}/{AUTO}:{tag}"
        script = f"docker build --tag={uri} - <<'END'\n{dockerfile}END\n"
        build = {
            "steps": [{"name": "gcr.io/cloud-builders/docker", "script": script}],
            "images": [uri],
            "tags": [tag],
            "timeout": "3600s",
            "options": {"machineType": "E2_HIGHCPU_8"},
        }
        call("POST", builds, json=build)
    except ApiError as error:
        return _not_made(error, gcp)
    page = f"https://console.cloud.google.com/cloud-build/builds?project={gcp.project}"
    return f"image={AUTO}: Cloud Build makes {uri}: {page}"


def _contents(requirements: Sequence[str]) -> tuple[str, str]:
    """Returns the tag and the Dockerfile of the image with these requirements."""
    lines = _resolved(requirements)
    base = f"{PLAIN_IMAGE.partition(':')[0]}@{_base_digest()}"
    install = ["pip", "install", "--no-cache-dir", "uv", *lines]
    tag = hashlib.sha256("\n".join([base, PYTHON, *lines]).encode()).hexdigest()
    return tag, f"FROM {base}\nRUN {json.dumps(install)}\n"


@cache
def _resolved(requirements: Sequence[str]) -> list[str]:
    """Returns the sorted versions that uv chooses for requirements; these as they are without
    uv."""
    command = "uv pip compile --quiet --no-header --no-annotate --python-platform=linux"
    with suppress(OSError):
        done = subprocess.run(
            [*command.split(), f"--python-version={PYTHON}", "-"],
            input="\n".join(requirements),
            capture_output=True,
            text=True,
        )
        if not done.returncode:
            return sorted(done.stdout.splitlines())
    return sorted(set(requirements))


@cache
def _base_digest() -> str:
    """Returns the digest of the plain image for x86. Raises ApiError if Docker Hub does not say it.

    https://docs.docker.com/reference/api/hub/latest/
    """
    from google.auth.credentials import AnonymousCredentials

    name, _, tag = PLAIN_IMAGE.partition(":")
    hub = address("DOCKERHUB", "https://hub.docker.com")
    url = f"{hub}/v2/namespaces/library/repositories/{name}/tags/{tag}"
    with unreadable_as_lost():
        images = call("GET", url, AnonymousCredentials())["images"]
        return {image["architecture"]: str(image["digest"]) for image in images}["amd64"]


def _not_made(error: ApiError, gcp: GcpConfig) -> str:
    """Returns a line on an image that cannot be found or made, with what is done about it once."""
    apis = "artifactregistry.googleapis.com cloudbuild.googleapis.com"
    return (
        f"image={AUTO}: {error}: this job installs what it needs; once for the project: `gcloud"
        f" services enable {apis} --project={gcp.project}` and `gcloud artifacts repositories"
        f" create {REPOSITORY} --repository-format=docker --location={gcp.region}"
        f" --project={gcp.project}`"
    )
