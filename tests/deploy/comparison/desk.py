"""Runs a comparison on an emulated Vertex AI as a process that tests kill: `python desk.py URL TIER …`."""

import sys
import time

from google.auth.credentials import AnonymousCredentials

from deploy.cli import compare
from deploy.vertex.api import Backend
from deploy.vertex.retry import Clock
from deploy.vertex.sdk import Sdk
from deploy.vertex.session import Session


def main() -> int:
    """Runs the command with a clock on which every wait is short."""
    url, *arguments = sys.argv[1:]

    def opened(kind: str, project: str, region: str) -> Backend:
        return Sdk(project, region, url, url, AnonymousCredentials())

    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        time.sleep(0.02)  # lets the emulator's jobs run

    clock = Clock(lambda: time.time() + sum(slept), sleep)
    return compare.main(arguments, Session(clock, opened))


if __name__ == "__main__":
    sys.exit(main())
