"""Checks within seconds, before any training, that the data can be listed and the job directory can be written."""

import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

from trainer.errors import PlatformFault, UserError
from trainer.storage.address import Address, output_address, parse
from trainer.storage.gcs import LIMITS, Gcs, connect

SECONDS = 15  # for all checks together
_LIMITS = replace(LIMITS, retry=6, pause=2, connect=3, read=3, refused=3)


def preflight(inputs: dict[str, str], outputs: dict[str, str]) -> None:
    """Checks the addresses among these settings within 15 seconds; local paths pass unchecked.

    inputs: settings that name something to read, and their values; outputs: settings that name folders to write to.
    Raises UserError for the first address that cannot be used, or PlatformFault if Cloud Storage fails.
    """
    reads = [(name, parse(path, name)) for name, path in inputs.items()]
    writes = [(name, output_address(path, name)) for name, path in outputs.items()]
    checks = [(f"{name}={at}", at, _check_listing) for name, at in reads if at]
    checks += [(f"{name}={at}", at, _check_writing) for name, at in writes if at]
    if checks:
        _within(SECONDS, lambda: _run(checks), checks[0][0])


def _run(checks: Sequence[tuple[str, Address, Callable[[Gcs, Address], None]]]) -> None:
    for setting, address, check in checks:
        try:
            check(connect(_LIMITS), address)
        except (UserError, PlatformFault) as error:
            text = str(error)
            raise type(error)(text if text.startswith(setting) else f"{setting}: {text}") from error


def _check_listing(gcs: Gcs, address: Address) -> None:
    if not gcs.list(address, most=1) and not (address.name and gcs.get(address)):
        raise UserError(f"no objects found: check with `gcloud storage ls {address}`")


def _check_writing(gcs: Gcs, address: Address) -> None:
    probe = address / f".probe-{uuid.uuid4().hex}"
    gcs.upload(b"", probe)
    if found := gcs.get(probe):
        gcs.delete(found)
    gcs.list(address, most=1)


def _within(seconds: float, work: Callable[[], None], setting: str) -> None:
    """Runs `work` in a thread and abandons it after `seconds`, because a lookup of credentials cannot be cancelled."""
    failure: list[BaseException] = []

    def caught() -> None:
        try:
            work()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=caught, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise PlatformFault(
            f"{setting}: no response within {seconds:.0f} seconds: check the network and the credentials"
        )
    if failure:
        raise failure[0]
