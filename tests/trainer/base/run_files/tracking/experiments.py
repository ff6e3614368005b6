"""Emulates the methods of Vertex AI's MetadataService and TensorboardService that trackers and
Google's SDK call.

Bodies are parsed as the SDK's own messages, which reject unknown fields.
"""

import json
import re
from typing import Any

from google.cloud.aiplatform_v1 import types
from google.protobuf.json_format import MessageToDict, ParseDict

from tests.deploy.emulator import _ROUTES, Emulator, Query, Response, error

MESSAGES: dict[str, Any] = {
    "metadataStores": types.MetadataStore,
    "contexts": types.Context,
    "artifacts": types.Artifact,
    "tensorboards": types.Tensorboard,
    "experiments": types.TensorboardExperiment,
    "runs": types.TensorboardRun,
    "timeSeries": types.TensorboardTimeSeries,
}
LISTS = {"timeSeries": "tensorboardTimeSeries"}


def _answer(google: Emulator, match: re.Match[str], query: Query, content: bytes) -> Response:
    method, name, verb = match.groups()
    body = json.loads(content or b"{}")
    resources = google.resources
    points = google.points
    if verb == ":write":
        ParseDict(
            body, types.WriteTensorboardRunDataRequest.pb(types.WriteTensorboardRunDataRequest())
        )
        for series in body["timeSeriesData"]:
            known = points.setdefault(f"{name}/timeSeries/{series['tensorboardTimeSeriesId']}", [])
            assert not {point["step"] for point in known} & {
                point["step"] for point in series["values"]
            }, "twice"
            known.extend(series["values"])
    if verb == ":batchRead":
        return 200, {
            "timeSeriesData": [
                {
                    "tensorboardTimeSeriesId": one.rsplit("/", 1)[-1],
                    "valueType": "SCALAR",
                    "values": points[one],
                }
                for one in query["timeSeries"].split(",")
                if one in points
            ]
        }
    if verb:
        return 200, {}
    collection = name.rsplit("/", 2)[-2] if name.count("/") % 2 else name.rsplit("/", 1)[-1]
    if method == "POST":
        identity = next(
            (value for key, value in query.items() if key.endswith("Id")), str(len(resources) + 1)
        )
        name = f"{name}/{identity}"
        if name in resources:
            return 409, error(409, f"{name} already exists")
        resources[name] = {**_checked(collection, body), "name": name}
        if collection in ("metadataStores", "tensorboards"):
            return 200, {"name": f"{name}/operations/1", "done": True, "response": resources[name]}
    if method == "PATCH":
        assert query["updateMask"] == "metadata"
        resources[name] |= _checked(collection, body)
    if name in resources:
        return 200, _shown(google, name)
    if collection == name.rsplit("/", 1)[-1]:
        below = [
            _shown(google, known)
            for known in resources
            if re.fullmatch(f"{re.escape(name)}/[^/]+", known)
        ]
        schema = re.search(r'schema_title="([^"]+)"', query.get("filter", ""))
        fitting = [
            known for known in below if schema is None or known.get("schemaTitle") == schema[1]
        ]
        return 200, {LISTS.get(collection, collection): fitting}
    return 404, error(404, f"{name} not found")


def _shown(google: Emulator, name: str) -> dict[str, Any]:
    points = google.points.get(name)
    latest = (
        {"metadata": {"maxStep": str(max(int(point["step"]) for point in points))}}
        if points
        else {}
    )
    return {**google.resources[name], **latest}


def _checked(collection: str, body: dict[str, Any]) -> dict[str, Any]:
    """Returns the body as the message of this collection. Raises ParseError for a field that it
    does not have."""
    message = MESSAGES[collection].pb(MESSAGES[collection]())
    ParseDict(body, message)
    return dict(MessageToDict(message))


_ROUTES[
    r"(\w+) /v1/(projects/[^/]+/locations/[^/]+/(?:metadataStores|tensorboards)[^:]*)(:\w+)?"
] = _answer
