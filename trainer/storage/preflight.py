"""Proves before any training that the data can be listed and the job directory written to, in a few seconds."""

import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from trainer.errors import PlatformFault, UserError
from trainer.storage.address import Address, output_address, parse
from trainer.storage.gcs import LIMITS, Gcs, connect

SECONDS = 15  # for all of it
_PATIENCE = replace(LIMITS, retry=6, pause=2, connect=3, silence=3)


def preflight(inputs: dict[str, str], outputs: dict[str, str]) -> None:
    """One line within 15 seconds for the first setting whose address cannot be used: UserError, or PlatformFault where
    Cloud Storage itself fails or nothing answers.

    inputs: settings that name something to read, and their values; outputs: those to write below. Local paths pass.
    """
    reads = [(name, parse(path, name)) for name, path in inputs.items()]
    writes = [(name, output_address(path, name)) for name, path in outputs.items()]
    checks = [(f"{name}={at}", at, _prove_listing) for name, at in reads if at]
    checks += [(f"{name}={at}", at, _prove_writing) for name, at in writes if at]
    if checks:
        _within(SECONDS, lambda: _run(checks), checks[0][0])


def _run(checks: Sequence[tuple[str, Address, Callable[[Gcs, Address], None]]]) -> None:
    for what, address, prove in checks:
        try:
            prove(connect(_PATIENCE), address)
        except (UserError, PlatformFault) as error:
            text = str(error)
            raise type(error)(text if text.startswith(what) else f"{what}: {text}") from error


def _prove_listing(gcs: Gcs, address: Address) -> None:
    if not gcs.list(address, most=1) and not (address.name and gcs.get(address)):
        raise UserError(f"nothing lies there: check with `gcloud storage ls {address}`")


def _prove_writing(gcs: Gcs, address: Address) -> None:
    probe = address / f".probe-{uuid.uuid4().hex}"
    with TemporaryDirectory() as folder:
        file = Path(folder) / "probe"
        file.write_bytes(b"")
        gcs.upload(file, probe)
    found = gcs.get(probe)
    if found:
        gcs.delete(found)
    gcs.list(address, most=1)


def _within(seconds: float, work: Callable[[], None], what: str) -> None:
    """Runs `work` in a thread that is left behind when it takes longer: a look-up of credentials cannot be stopped."""
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
        raise PlatformFault(f"{what}: no answer within {seconds:.0f} seconds: check the network and the credentials")
    if failure:
        raise failure[0]
