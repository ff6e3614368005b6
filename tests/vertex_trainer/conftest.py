"""Provides the emulated services of tests/deploy/."""

from tests.deploy.conftest import (  # noqa: F401 (fixtures)
    _own_folder,
    _pictures_of_reports_alone,
    cloud,
    command,
    flying,
    target,
    typed,
)
