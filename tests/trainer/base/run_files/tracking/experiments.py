"""Emulates the methods of Vertex AI's MetadataService and TensorboardService that trackers and Google's SDK call.

Bodies are parsed as the SDK's own messages, which reject unknown fields. `refusal`: a status that every call gets.
"""

import json
import re
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from google.cloud.aiplatform_v1 import types
from google.protobuf.json_format import MessageToDict, ParseDict

from tests.trainer.base.storage.fault_proxy import serving

MESSAGES: dict[str, Any] = {
    "metadataStores": types.MetadataStore, "contexts": types.Context, "artifacts": types.Artifact,
    "tensorboards": types.Tensorboard, "experiments": types.TensorboardExperiment, "runs": types.TensorboardRun,
    "timeSeries": types.TensorboardTimeSeries,
}  # fmt: skip
LISTS = {"timeSeries": "tensorboardTimeSeries"}


class Experiments:
    """Holds resources by name, and the points of time series."""

    def __init__(self) -> None:
        self.resources: dict[str, dict[str, Any]] = {}
        self.points: dict[str, list[dict[str, Any]]] = {}
        self.refusal = 0

    def answer(self, method: str, name: str, query: dict[str, str], body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.refusal:
            return self.refusal, {"error": {"message": "permission aiplatform.contexts.get denied"}}
        name, _, verb = name.partition(":")
        if verb == "write":
            ParseDict(body, types.WriteTensorboardRunDataRequest.pb(types.WriteTensorboardRunDataRequest()))
            for series in body["timeSeriesData"]:
                known = self.points.setdefault(f"{name}/timeSeries/{series['tensorboardTimeSeriesId']}", [])
                assert not {point["step"] for point in known} & {point["step"] for point in series["values"]}, "twice"
                known.extend(series["values"])
        if verb == "batchRead":
            return 200, {"timeSeriesData": [
                {"tensorboardTimeSeriesId": one.rsplit("/", 1)[-1], "valueType": "SCALAR", "values": self.points[one]}
                for one in query["timeSeries"].split(",") if one in self.points
            ]}  # fmt: skip
        if verb:
            return 200, {}
        collection = name.rsplit("/", 2)[-2] if name.count("/") % 2 else name.rsplit("/", 1)[-1]
        if method == "POST":
            identity = next((value for key, value in query.items() if key.endswith("Id")), str(len(self.resources) + 1))
            name = f"{name}/{identity}"
            if name in self.resources:
                return 409, {"error": {"message": f"{name} already exists"}}
            self.resources[name] = {**_checked(collection, body), "name": name}
            if collection in ("metadataStores", "tensorboards"):
                return 200, {"name": f"{name}/operations/1", "done": True, "response": self.resources[name]}
        if method == "PATCH":
            assert query["updateMask"] == "metadata"
            self.resources[name] |= _checked(collection, body)
        if name in self.resources:
            return 200, self._shown(name)
        if collection == name.rsplit("/", 1)[-1]:
            below = [self._shown(known) for known in self.resources if re.fullmatch(f"{re.escape(name)}/[^/]+", known)]
            schema = re.search(r'schema_title="([^"]+)"', query.get("filter", ""))
            fitting = [known for known in below if schema is None or known.get("schemaTitle") == schema[1]]
            return 200, {LISTS.get(collection, collection): fitting}
        return 404, {"error": {"message": f"{name} not found"}}

    def _shown(self, name: str) -> dict[str, Any]:
        points = self.points.get(name)
        latest = {"metadata": {"maxStep": str(max(int(point["step"]) for point in points))}} if points else {}
        return {**self.resources[name], **latest}


def _checked(collection: str, body: dict[str, Any]) -> dict[str, Any]:
    """Returns the body as the message of this collection. Raises ParseError for a field that it does not have."""
    message = MESSAGES[collection].pb(MESSAGES[collection]())
    ParseDict(body, message)
    return dict(MessageToDict(message))


def serving_of(experiments: Experiments) -> AbstractContextManager[str]:
    """Serves them within the block; yields the address."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            url = urlsplit(self.path)
            query = {key: ",".join(values) for key, values in parse_qs(url.query).items()}
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"{}")
            status, content = experiments.answer(self.command, unquote(url.path).removeprefix("/v1/"), query, body)
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PATCH = _answer

        def log_message(self, *_: object) -> None:
            """Prints nothing."""

    return serving(Handler)
