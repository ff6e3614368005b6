"""Tests that the emulator reports its own failures, which tests would otherwise take for Google's."""

import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.deploy.emulator import PARENT, Emulator, Fault


def test_a_fault_that_is_never_triggered_is_reported() -> None:
    with pytest.raises(AssertionError, match="match='customJob/'"), Emulator() as google:
        google.faults = [Fault("GET", 503), Fault("customJob/", 503)]
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{google.url}/storage/v1/b/bucket", timeout=10)


def test_its_own_exception_is_reported() -> None:
    with pytest.raises(AssertionError, match=r"entries:list: KeyError\('filter'\)"), Emulator() as google:
        request = urllib.request.Request(f"{google.url}/v2/entries:list", data=b"{}")
        with pytest.raises(urllib.error.HTTPError, match="500"):
            urllib.request.urlopen(request, timeout=10)


def test_a_job_that_raises_an_exception_is_reported() -> None:
    def run(google: Emulator, job: dict[str, Any]) -> None:
        raise LookupError("no such state")

    with pytest.raises(AssertionError, match="no such state"), Emulator(run) as google:
        google.create(PARENT, {"displayName": "x"})


def test_the_failure_of_the_block_itself_comes_first() -> None:
    with pytest.raises(KeyError), Emulator() as google:
        google.faults = [Fault("nothing", 503)]
        raise KeyError
