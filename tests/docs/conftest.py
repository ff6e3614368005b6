"""The emulated services of tests/deploy, for the commands that speak to Google."""

from tests.deploy.conftest import cloud, desk, flying, google  # noqa: F401 (fixtures)
