"""Starts servers of models in processes of their own, and asks them."""

import subprocess
import sys
import time
import urllib.request


def started(run: str, port: int) -> subprocess.Popen[bytes]:
    """Returns the process of `trainer.serve` once it has loaded its model."""
    return once_healthy(
        subprocess.Popen([sys.executable, "-m", "trainer.serve", run, f"--port={port}"]), port
    )


def once_healthy(server: subprocess.Popen[bytes], port: int) -> subprocess.Popen[bytes]:
    """Returns a server's process once it answers; ends it and exits if it does not within two
    minutes."""
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return server
        except OSError:
            if server.poll() is not None:
                break
            time.sleep(0.2)
    server.kill()
    raise SystemExit(f"{server.args!r} does not begin to answer")
