"""Reads and writes the objects in buckets that a submission needs.

The client of `trainer.base.storage` retries what may be repeated. Every function raises UserError
or PlatformFault, with one line, if it fails in the end.
"""

import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trainer.base.errors import UserError
from trainer.base.storage import Address, parse
from trainer.base.storage.gcs import LIMITS, NoPermission, Remote, connect

_MANY = 1000  # the number of objects that one request lists
# for what is only shown, and is read again a minute later
QUICK = replace(LIMITS, retry=10, pause=2)


def upload(file: Path, uri: str) -> bool:
    """Uploads `file`, or renews the time of the object if it exists, so that `clean` leaves it for
    an hour.

    `uri` must contain a hash of the content, so that it never changes. Returns whether it was
    uploaded.
    """
    present = connect().touch(_address(uri))
    if not present:
        connect().upload(file, _address(uri))
    return not present


def read_text(uri: str, *, quick: bool = False) -> tuple[str, int]:
    """Returns the text and the generation of a small object; ("", 0) if there is none.

    `quick`: give up soon.
    """
    client = connect(QUICK if quick else None)
    item = client.get(_address(uri))
    return (client.read(item).decode(errors="replace"), item.generation) if item else ("", 0)


def write(uri: str, text: str, generation: int, *, quick: bool = False) -> int:
    """Writes a small object and returns its new generation.

    Raises Conflict unless the present one is `generation`.

    A generation of 0 means that there must be no object. `quick`: give up soon.
    """
    return connect(QUICK if quick else None).upload(
        text.encode(), _address(uri), generation, strict=True
    )


def delete(uri: str, generation: int) -> None:
    """Deletes an object if its generation is still `generation`."""
    item = connect().get(_address(uri))
    if item and item.generation == generation:
        connect().delete(item)


def exists(uri: str) -> bool:
    """Returns whether there is an object at gs://BUCKET/… or below it.

    Returns True if the account may not list the bucket, since the job's account may be allowed to.
    """
    address = _address(uri)
    try:
        return bool(connect().list(address, most=1) or (address.name and connect().get(address)))
    except NoPermission:
        return True


def size(uri: str) -> float:
    """Returns the total bytes of the objects below an address; nan if there are many, or they may
    not be listed."""
    with suppress(NoPermission):
        objects = connect().list(_address(uri), most=_MANY)
        return sum(item.size for item in objects) if len(objects) < _MANY else math.nan
    return math.nan


def below(uri: str) -> list[Remote]:
    """Returns the objects below an address."""
    return connect().list(_address(uri))


def location(bucket: str) -> str:
    """Returns the location of gs://NAME, such as US or EUROPE-WEST4; "" if the account may not read
    it."""
    try:
        return connect().location(_address(bucket).bucket)
    except NoPermission:
        return ""


def _address(uri: str) -> Address:
    address = parse(uri, "address")
    if address is None:
        raise UserError(f"{uri}: an address looks like gs://bucket/object")
    return address
