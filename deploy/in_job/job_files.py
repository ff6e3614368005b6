"""Reads and writes small files of a job directory, on this disk or in a bucket, by the standard library alone."""

from __future__ import annotations

import os
import urllib.parse

from .starter import STORAGE, object_url, request, token


def in_bucket(folder: str) -> bool:
    """Returns whether a job directory is at a gs:// address, which the job's account can read and write."""
    return folder.startswith("gs://")


def read_file(folder: str, name: str) -> str:
    """Returns the content of a file, empty if there is none. Raises OSError if it cannot be read."""
    if in_bucket(folder):
        return request(object_url(f"{folder}/{name}"), _login(), missing=b"").decode(errors="replace")
    try:
        with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def write_file(folder: str, name: str, content: str) -> None:
    """Replaces a file as a whole. Raises OSError if that fails.

    https://cloud.google.com/storage/docs/uploading-objects
    """
    if in_bucket(folder):
        bucket, _, path = f"{folder}/{name}".removeprefix("gs://").partition("/")
        target = urllib.parse.urlencode({"uploadType": "media", "name": path})
        headers = {**_login(), "Content-Type": "application/json"}
        request(f"{STORAGE}/upload/storage/v1/b/{bucket}/o?{target}", headers, content.encode())
        return
    os.makedirs(folder, exist_ok=True)
    partial = os.path.join(folder, f".{name}.part")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(content)
    os.replace(partial, os.path.join(folder, name))


def _login() -> dict[str, str]:
    return {"Authorization": f"Bearer {token()}"}
