"""Reads and writes what a submission needs in buckets.

The client of `trainer.base.storage` repeats what may be repeated. Raises UserError or PlatformFault, one line each.
"""

import dataclasses
import math
from contextlib import suppress
from pathlib import Path

from trainer.base.errors import UserError
from trainer.base.storage import Address, parse
from trainer.base.storage.gcs import LIMITS, NoPermission, Remote, connect

_MANY = 1000  # objects, which one request lists
QUICK = dataclasses.replace(LIMITS, retry=10, pause=2)  # for what is only shown: it is read again a minute later


def upload(file: Path, uri: str) -> None:
    """Uploads `file`, unless the object exists: its address has a hash of the content."""
    if connect().get(_address(uri)) is None:
        connect().upload(file, _address(uri))


def read(uri: str, *, quick: bool = False) -> tuple[str, int]:
    """Returns text and generation of a small object; ("", 0) if there is none."""
    client = connect(QUICK if quick else None)
    item = client.get(_address(uri))
    return (client.read(item).decode(errors="replace"), item.generation) if item else ("", 0)


def write(uri: str, text: str, generation: int, *, quick: bool = False) -> int:
    """Replaces a small object of this generation, 0 for none; returns its new one. Raises Conflict for another one."""
    return connect(QUICK if quick else None).upload(text.encode(), _address(uri), generation, strict=True)


def delete(uri: str, generation: int) -> None:
    """Deletes an object of this generation, if it still has that."""
    item = connect().get(_address(uri))
    if item and item.generation == generation:
        connect().delete(item)


def exists(uri: str) -> bool:
    """Returns whether an object is at gs://BUCKET/… or below it; True if the account may not list the bucket."""
    address = _address(uri)
    try:
        return bool(connect().list(address, most=1) or (address.name and connect().get(address)))
    except NoPermission:  # the job's account may have it
        return True


def size(uri: str) -> float:
    """Returns the bytes of the objects below an address; nan if they are many, or may not be listed."""
    with suppress(NoPermission):
        objects = connect().list(_address(uri), most=_MANY)
        return sum(item.size for item in objects) if len(objects) < _MANY else math.nan
    return math.nan


def below(uri: str) -> list[Remote]:
    """Returns the objects below an address."""
    return connect().list(_address(uri))


def location(bucket: str) -> str:
    """Returns the location of gs://NAME, as US or EUROPE-WEST4; empty if the account may not read it."""
    try:
        return connect().location(_address(bucket).bucket)
    except NoPermission:
        return ""


def _address(uri: str) -> Address:
    address = parse(uri, "address")
    if address is None:
        raise UserError(f"{uri}: an address looks like gs://bucket/object")
    return address
