"""Provides the emulated services of tests/deploy/."""

from tests.deploy.conftest import (
    _own_folder,
    _pictures_of_reports_alone,
    cloud,
    command,
    flying,
    session,
    target,
)

__all__ = [
    "_own_folder",
    "_pictures_of_reports_alone",
    "cloud",
    "command",
    "flying",
    "session",
    "target",
]
