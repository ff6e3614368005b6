"""Emulates Vertex AI's Model Registry, as the SDK's own messages read them."""

import json
from typing import Any

from google.cloud.aiplatform_v1.types import Model
from google.protobuf.json_format import MessageToDict

from tests.deploy.emulated_storage import Match
from tests.deploy.emulator import _ROUTES, Emulator, Response, _page, error, now
from tests.fixtures import Json

PLACE = r"/v1/(projects/[^/]+/locations/[^/]+)"


def _versions(google: Emulator, name: str) -> list[Json]:
    return [version for version in google.models if version["name"].endswith(f"/models/{name}")]


def _upload(google: Emulator, match: Match, query: Any, body: bytes) -> Response:
    """Makes a version. modelId names a new model; parentModel is one that exists."""
    request = json.loads(body)
    model = MessageToDict(Model.pb(Model.from_json(json.dumps(request["model"]))))
    new = request.get("modelId")
    name = new or request["parentModel"].rsplit("/", 1)[-1]
    with google.lock:
        same = _versions(google, name)
        if bool(new) == bool(same):
            code = 409 if new else 404
            return code, error(code, f"models/{name}")
        model |= {
            "name": f"projects/123456/locations/us-central1/models/{name}",
            "versionId": str(len(same) + 1),
            "versionAliases": [] if same else ["default"],
            "versionCreateTime": now(),
        }
        google.models.append(model)
        operation = f"{match[1]}/operations/{len(google.models)}"
    return 200, {"name": operation, "done": False}


def _listed(google: Emulator, match: Match, query: Any, body: bytes) -> Response:
    found = _versions(google, match[2])
    return (200, _page("models", found, 2, query)) if found else (404, error(404, match[2]))


def _of(google: Emulator, name: str, reference: str) -> Json | None:
    for version in _versions(google, name):
        if reference in (version["versionId"], *version["versionAliases"]):
            return version
    return None


def _get(google: Emulator, match: Match, query: Any, body: bytes) -> Response:
    version = _of(google, match[2], match[3] or "default")
    return (200, version) if version else (404, error(404, match[0]))


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
