"""Reads and writes small files of a job directory, on this disk or in a bucket, by the standard library alone."""

from __future__ import annotations

import json
import os
import urllib.parse

from .starter import request, token


class LocalFiles:
    """Holds a job directory on a disk."""

    every_s = 1.0  # between writes

    def __init__(self, folder: str) -> None:
        self._folder = folder
        os.makedirs(folder, exist_ok=True)

    def read(self, name: str) -> str:
        """Returns a file's content, empty if there is none."""
        try:
            with open(os.path.join(self._folder, name), encoding="utf-8", errors="replace") as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def write(self, name: str, content: str) -> None:
        """Writes a file whole. Raises OSError if that fails."""
        path = os.path.join(self._folder, name)
        partial = os.path.join(self._folder, f".{name}.part")
        with open(partial, "w", encoding="utf-8") as file:
            file.write(content)
        os.replace(partial, path)


class BucketFiles:
    """Holds a job directory at a gs:// address, which the job's account can read and write."""

    every_s = 30.0

    def __init__(self, address: str) -> None:
        self._bucket, _, self._prefix = address.removeprefix("gs://").partition("/")
        self._host = os.environ.get("STORAGE_EMULATOR_HOST", "https://storage.googleapis.com")

    def read(self, name: str) -> str:
        """Returns an object's content, empty if there is none. Raises OSError if it cannot be read."""
        found = urllib.parse.quote(f"{self._prefix}/{name}", safe="")
        url = f"{self._host}/storage/v1/b/{self._bucket}/o/{found}?alt=media"
        return (request(url, self._login(), missing=b"") or b"").decode(errors="replace")

    def write(self, name: str, content: str) -> None:
        """Replaces an object: https://cloud.google.com/storage/docs/uploading-objects. Raises OSError."""
        about = json.dumps({"name": f"{self._prefix}/{name}"})
        boundary = "part-of-a-run"
        parts = (
            f"--{boundary}\r\nContent-Type: application/json\r\n\r\n{about}\r\n--{boundary}\r\n"
            f"Content-Type: application/json\r\n\r\n{content}\r\n--{boundary}--\r\n"
        )
        headers = {**self._login(), "Content-Type": f"multipart/related; boundary={boundary}"}
        request(f"{self._host}/upload/storage/v1/b/{self._bucket}/o?uploadType=multipart", headers, parts.encode())

    def _login(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {token()}"}


def files_at(place: str) -> LocalFiles | BucketFiles:
    """Returns the job directory at a path or a gs:// address."""
    return BucketFiles(place) if place.startswith("gs://") else LocalFiles(place)
