"""Provides the emulated services of tests/deploy/."""

from tests.deploy.conftest import _own_folder, cloud, command, flying, session, target

__all__ = ["_own_folder", "cloud", "command", "flying", "session", "target"]
