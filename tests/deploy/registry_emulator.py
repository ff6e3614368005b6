"""Emulates Vertex AI's Model Registry, as the SDK's own messages read them."""

import json
from typing import Any

from google.cloud.aiplatform_v1.types import Model
from google.protobuf.json_format import MessageToDict

from tests.deploy.emulated_storage import Match
from tests.deploy.emulator import _ROUTES, Emulator, Response, _page, error, now
from tests.fixtures import Json

PLACE = r"/v1/(projects/[^/]+/locations/[^/]+)"


def _upload(google: Emulator, match: Match, query: Any, body: bytes) -> Response:
    """Makes a version. modelId names a new model; parentModel is one that exists."""
    request = json.loads(body)
    model = MessageToDict(Model.pb(Model.from_json(json.dumps(request["model"]))))
    with google.lock:
        found = google.models
        name = request.get("parentModel", f"{match[1]}/models/{request.get('modelId')}").rsplit(
            "/", 1
        )[-1]
        same = [version for version in found if version["name"].endswith(f"/models/{name}")]
        if "modelId" in request and same:
            return 409, error(409, f"models/{name} exists")
        if "parentModel" in request and not same:
            return 404, error(404, f"models/{name} is not found")
        aliases = [] if same else ["default"]
        model |= {
            "name": f"projects/123456/locations/us-central1/models/{name}",
            "versionId": str(len(same) + 1),
            "versionAliases": aliases,
            "versionCreateTime": now(),
        }
        found.append(model)
        operation = f"{match[1]}/operations/{len(found)}"
    return 200, {"name": operation, "done": False}


def _listed(google: Emulator, match: Match, query: Any, body: bytes) -> Response:
    found = [
        version for version in google.models if version["name"].endswith(f"/models/{match[2]}")
    ]
    return (
        (200, _page("models", found, 2, query))
        if found
        else (404, error(404, f"{match[2]} is not found"))
    )


def _of(google: Emulator, name: str, reference: str) -> Json | None:
    found = [version for version in google.models if version["name"].endswith(f"/models/{name}")]
    return next(
        (
            version
            for version in found
            if reference in (version["versionId"], *version["versionAliases"])
        ),
        None,
    )


def _get(google: Emulator, match: Match, query: Any, body: bytes) -> Response:
    version = _of(google, match[2], match[3] or "default")
    return (200, version) if version else (404, error(404, f"{match[2]}@{match[3]} is not found"))


def _merge(google: Emulator, match: Match, query: Any, body: bytes) -> Response:
    """Gives aliases to a version, and takes them from the others."""
    aliases = json.loads(body)["versionAliases"]
    version = _of(google, match[2], match[3])
    assert version
    for other in google.models:
        other["versionAliases"] = [
            alias for alias in other["versionAliases"] if alias not in aliases
        ]
    version["versionAliases"] += aliases
    return 200, version


_ROUTES |= {
    rf"POST {PLACE}/models:upload": _upload,
    rf"GET {PLACE}/operations/(\d+)": lambda google, match, *_: (
        200,
        {
            "name": match[0],
            "done": True,
            "response": {"model": google.models[int(match[2]) - 1]["name"]},
        },
    ),
    rf"GET {PLACE}/models/([\w-]+):listVersions": _listed,
    rf"GET {PLACE}/models/([\w-]+)(?:(?:@|%40)([\w-]+))?": _get,
    rf"POST {PLACE}/models/([\w-]+)(?:@|%40)([\w-]+):mergeVersionAliases": _merge,
}
