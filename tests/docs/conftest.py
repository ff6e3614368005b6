"""Provides the emulated services of tests/deploy, for the commands that call Google."""

from tests.deploy.conftest import cloud, flying, session  # noqa: F401 (fixtures)
