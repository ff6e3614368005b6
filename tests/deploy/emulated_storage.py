"""Emulates the parts of Cloud Storage that gcloud and Google's clients use beside Vertex AI."""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from email.parser import BytesParser
from typing import Any
from urllib.parse import quote, unquote

from google_crc32c import Checksum

from tests.fixtures import Json

Match = re.Match[str]
Query = dict[str, str]
Response = tuple[int, Json | bytes]


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def error(status: int, message: str, name: str = "") -> Json:
    """Returns the content of a failed response."""
    names = {
        400: "INVALID_ARGUMENT",
        401: "UNAUTHENTICATED",
        403: "PERMISSION_DENIED",
        404: "NOT_FOUND",
        409: "ABORTED",
        412: "FAILED_PRECONDITION",
        429: "RESOURCE_EXHAUSTED",
        500: "INTERNAL",
        501: "UNIMPLEMENTED",
        503: "UNAVAILABLE",
    }
    return {"error": {"code": status, "message": message, "status": name or names[status]}}


def _object(google: Any, match: Match, query: Query, body: bytes) -> Response:
    name = f"{match[1]}/{unquote(match[2])}"
    if name not in google.objects:
        return 404, error(404, f"No such object: {name}")
    return 200, google.objects[name] if query.get("alt") == "media" else _metadata(google, name)


def _delete(google: Any, match: Match, query: Query, body: bytes) -> Response:
    name = f"{match[1]}/{unquote(match[2])}"
    found = _metadata(google, name) if name in google.objects else {}
    if found and all(
        query.get(f"if{key.title()}Match", found[key]) == found[key]
        for key in ("generation", "metageneration")
    ):
        del google.objects[name]
        return 204, b""
    return 412, error(412, _CONDITION)


def _upload(google: Any, match: Match, query: Query, body: bytes) -> Response:
    """Reads the content alone, or multipart/related: the object's metadata, then its content."""
    if query.get("uploadType") == "media":
        return _store(google, f"{match[1]}/{query['name']}", query, body)
    boundary = body.split(b"\r\n" if b"\r\n" in body[:100] else b"\n", 1)[0][2:]
    message = BytesParser().parsebytes(
        b'Content-Type: multipart/related; boundary="' + boundary + b'"\n\n' + body
    )
    parts: Any = message.get_payload()
    metadata, content = parts
    name = f"{match[1]}/{json.loads(metadata.get_payload())['name']}"
    return _store(google, name, query, content.get_payload(decode=True))


def _store(google: Any, name: str, query: Query, content: bytes) -> Response:
    """Replaces an object, if its generation is as asked for."""
    with google.lock:
        generation = google.generations.get(name, 1) if name in google.objects else 0
        if query.get("ifGenerationMatch", str(generation)) != str(generation):
            return 412, error(412, _CONDITION)
        google.objects[name] = content
        google.generations[name] = google.generations.get(name, 0) + 1
        google.updated[name] = [now()]
    return 200, _metadata(google, name)


def _patch(google: Any, match: Match, query: Query, body: bytes) -> Response:
    name = f"{match[1]}/{unquote(match[2])}"
    if name in google.objects:
        google.updated.setdefault(name, [LONG_AGO]).append(now())
    return _object(google, match, query, body)


LONG_AGO = "2026-11-20T10:00:00.000000Z"
_CONDITION = "At least one of the pre-conditions you specified did not hold."


def _metadata(google: Any, name: str) -> Json:
    content = google.objects[name]
    times = google.updated.get(name, [LONG_AGO])
    bucket, _, inner = name.partition("/")
    media = f"{google.url}/download/storage/v1/b/{bucket}/o/{quote(inner, safe='')}?alt=media"
    return {
        "mediaLink": media,
        "kind": "storage#object",
        "bucket": bucket,
        "name": inner,
        "size": str(len(content)),
        "generation": str(google.generations.get(name, 1)),
        "metageneration": str(len(times)),
        "updated": times[-1],
        "timeCreated": times[0],
        "storageClass": "STANDARD",
        "crc32c": base64.b64encode(Checksum(content).digest()).decode(),
        "md5Hash": base64.b64encode(hashlib.md5(content).digest()).decode(),
    }


ROUTES: dict[str, Callable[..., Response]] = {
    r"GET /storage/v1/b/([^/]+)": lambda google, match, *_: (
        200,
        {
            "kind": "storage#bucket",
            "id": match[1],
            "name": match[1],
            "location": google.bucket_location,
        },
    ),
    r"GET (?:/download)?/storage/v1/b/([^/]+)/o/([^/]+)": _object,
    r"DELETE /storage/v1/b/([^/]+)/o/([^/]+)": _delete,
    r"PATCH /storage/v1/b/([^/]+)/o/([^/]+)": _patch,
    r"GET /storage/v1/b/([^/]+)/o": lambda google, match, query, _: (  # by prefix
        200,
        {
            "items": [
                _metadata(google, name)
                for name in google.objects
                if name.startswith(f"{match[1]}/{query.get('prefix', '')}")
            ]
        },
    ),
    r"POST /(?:resumable/)?upload/storage/v1/b/([^/]+)/o": _upload,
}
