"""Emulates what --image=auto asks: Artifact Registry, Cloud Build and Docker Hub."""

import json
import re
from typing import Any

from tests.deploy.emulator import _ROUTES, Emulator, Response, _page

REPOSITORY = "us-central1-docker.pkg.dev/my-proj/trainer"
BASE = f"sha256:{'b' * 64}"


def _images(google: Emulator, match: re.Match[str], query: Any, body: bytes) -> Response:
    """In pages of two; another region has a repository without images."""
    found = google.images if match[1] == "us-central1" else []
    return 200, _page("dockerImages", found, 2, query)


def _asked(google: Emulator, match: re.Match[str], query: Any, body: bytes) -> Response:
    number = len(google.builds) + 1
    build = {"id": str(number), "status": "QUEUED", "logUrl": f"https://logs/{number}"}
    google.builds.insert(0, {**json.loads(body), **build})
    return 200, {"name": "operations/build", "metadata": {"build": google.builds[0]}}


def _builds(google: Emulator, match: re.Match[str], query: Any, body: bytes) -> Response:
    wanted = re.fullmatch(r'tags="(\w+)"', query["filter"])
    assert wanted
    found = [build for build in google.builds if wanted[1] in build["tags"]]
    return 200, _page("builds", found, int(query["pageSize"]), query)


def push(google: Emulator) -> str:
    """Ends the newest build well, and returns the address of its image."""
    build = google.builds[0]
    build["status"] = "SUCCESS"
    address, _, tag = build["images"][0].rpartition(":")
    uri = f"{address}@sha256:{len(google.images):064x}"
    about = {"tags": [tag], "imageSizeBytes": "3500000000", "uploadTime": "2026-01-01T00:00:00Z"}
    google.images.append({"uri": uri, **about})
    return uri


_ROUTES |= {
    r"GET /v1/projects/my-proj/locations/([^/]+)/repositories/trainer/dockerImages": _images,
    r"POST /build/v1/projects/my-proj/builds": _asked,
    r"GET /build/v1/projects/my-proj/builds": _builds,
    r"GET /v2/namespaces/library/repositories/python/tags/3.12-slim": lambda *_: (
        200,
        {
            "images": [
                {"architecture": "arm64", "digest": f"sha256:{'a' * 64}"},
                {"architecture": "amd64", "digest": BASE},
            ]
        },
    ),
}
