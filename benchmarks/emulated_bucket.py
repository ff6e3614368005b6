"""Starts fake-gcs-server on loopback, on the same cores: benchmarks show the cost of the client, not of the network."""

import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.trainer.base.storage.emulator import fake_gcs
from trainer.base.storage.gcs import connect


@contextmanager
def emulated_bucket() -> Iterator[tuple[str, Any, Path]]:
    """Yields the name of a new bucket, the SDK's client and an empty local folder."""
    with fake_gcs() as url, tempfile.TemporaryDirectory() as folder:
        os.environ["STORAGE_EMULATOR_HOST"] = url
        client: Any = connect().client
        bucket = f"b-{uuid.uuid4().hex}"
        client.create_bucket(bucket)
        yield bucket, client, Path(folder)
