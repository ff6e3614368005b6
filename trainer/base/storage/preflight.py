"""Checks within seconds, before any training, that the data can be listed and the job directory can be written."""

import uuid
from dataclasses import replace

from trainer.base.errors import PlatformFault, UserError
from trainer.base.storage.address import Address, output_address, parse
from trainer.base.storage.gcs import LIMITS, connect
from trainer.base.storage.transfers import TooSlow, in_time

SECONDS = 15  # for all checks together
_LIMITS = replace(LIMITS, retry=6, pause=2, connect=3, read=3)


def preflight(inputs: dict[str, str], outputs: dict[str, str]) -> None:
    """Checks the addresses among these settings within 15 seconds; local paths pass unchecked.

    inputs: settings that name something to read, and their values; outputs: settings that name folders to write to.
    Raises UserError for the first address that cannot be used, or PlatformFault if Cloud Storage fails.
    """
    addresses = [(name, parse(path, name), False) for name, path in inputs.items()]
    addresses += [(name, output_address(path, name), True) for name, path in outputs.items()]
    checks = [(f"{name}={address}", address, written) for name, address, written in addresses if address]

    def run() -> None:
        for setting, address, written in checks:
            try:
                _check(address, written)
            except (UserError, PlatformFault) as error:
                text = str(error)
                raise type(error)(text if text.startswith(setting) else f"{setting}: {text}") from error

    if checks:
        try:
            in_time(run, SECONDS)  # also ends a look-up of credentials
        except TooSlow:
            raise PlatformFault(
                f"{checks[0][0]}: no response within {SECONDS:.0f} seconds: check the network and the credentials"
            ) from None


def _check(address: Address, written: bool) -> None:
    gcs = connect(_LIMITS)
    if written:
        probe = address / f".probe-{uuid.uuid4().hex}"
        gcs.upload(b"", probe)
        if remote := gcs.get(probe):
            gcs.delete(remote)
    listed = gcs.list(address, most=1)
    if not (listed or written or (address.name and gcs.get(address))):
        raise UserError(f"no objects found: check with `gcloud storage ls {address}`")
