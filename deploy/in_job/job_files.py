"""Reads and writes small files of a job directory, on this disk or in a bucket, by the standard library alone."""

from __future__ import annotations

import os
import urllib.parse

from .starter import STORAGE, object_url, request, token


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
        partial = os.path.join(self._folder, f".{name}.part")
        with open(partial, "w", encoding="utf-8") as file:
            file.write(content)
        os.replace(partial, os.path.join(self._folder, name))


class BucketFiles:
    """Holds a job directory at a gs:// address, which the job's account can read and write."""

    every_s = 30.0

    def __init__(self, address: str) -> None:
        self._address = address

    def read(self, name: str) -> str:
        """Returns an object's content, empty if there is none. Raises OSError if it cannot be read."""
        return request(object_url(f"{self._address}/{name}"), _login(), missing=b"").decode(errors="replace")

    def write(self, name: str, content: str) -> None:
        """Replaces an object: https://cloud.google.com/storage/docs/uploading-objects. Raises OSError."""
        bucket, _, path = f"{self._address}/{name}".removeprefix("gs://").partition("/")
        target = urllib.parse.urlencode({"uploadType": "media", "name": path})
        headers = {**_login(), "Content-Type": "application/json"}
        request(f"{STORAGE}/upload/storage/v1/b/{bucket}/o?{target}", headers, content.encode())


def _login() -> dict[str, str]:
    return {"Authorization": f"Bearer {token()}"}


def files_at(place: str) -> LocalFiles | BucketFiles:
    """Returns the job directory at a path or a gs:// address."""
    return BucketFiles(place) if place.startswith("gs://") else LocalFiles(place)
