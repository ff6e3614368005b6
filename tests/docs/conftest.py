"""Provides the emulated services of tests/deploy, for the commands that call Google."""

from tests.deploy.conftest import cloud, flying  # noqa: F401 (fixtures)
