"""Keeps a second run out of a job directory in a bucket, also one of another machine, by an object that a run renews.

The run that writes holds the object `lease.json`. It replaces it every RENEW_SECONDS, each time naming the generation
that it wrote before, so that of two runs only one can hold it. A lease that is not renewed for STALE_SECONDS is taken
over; that of a process that has ended on this machine, or of an earlier start of the same Vertex AI job, at once.
"""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from trainer.base.errors import PlatformFault, UserError
from trainer.base.log import log
from trainer.base.storage.address import Address
from trainer.base.storage.gcs import Gcs, Remote, writer
from trainer.base.storage.gcs_errors import Conflict
from trainer.base.storage.local_files import is_running
from trainer.base.storage.transfers import TooSlow, in_time

RENEW_SECONDS, STALE_SECONDS = 15.0, 45.0
_POLL_SECONDS = 1.0
_TRIES = 3
_LONG_AGO = 600.0  # seconds since the last renewal, also by a clock that is wrong by minutes


class Lease:
    """Holds the lease of one job directory. `on_loss` is called with the error when another run has taken it over."""

    def __init__(self, gcs: Gcs, address: Address, setting: str, on_loss: Callable[[UserError], None]) -> None:
        self._gcs, self._address, self._setting, self._on_loss = gcs, address, setting, on_loss
        self._generation, self._renewals = 0, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def acquire(self) -> None:
        """Takes the lease and keeps renewing it; raises UserError if another run renews it meanwhile."""
        for _ in range(_TRIES):
            current = self._wait_for_end()
            with suppress(Conflict):  # another run was faster, or the last renewal of one that has ended came late
                self._write(current.generation if current else 0)
                self._thread.start()
                return
        raise self._refusal(self._gcs.get(self._address))

    def _wait_for_end(self) -> Remote | None:
        """Waits until the lease may be replaced and returns it, None if there is none. Raises UserError if renewed."""
        current, began = self._gcs.get(self._address), time.monotonic()
        first = current.generation if current else 0
        if current and not self._may_replace(current):
            log.info(f"{self._setting}: waits to see if another run ({current.writer}) still writes to it")
        while current and not self._may_replace(current):
            if current.generation != first:
                raise self._refusal(current)
            if time.monotonic() - began >= STALE_SECONDS:
                break
            time.sleep(_POLL_SECONDS)
            current = self._gcs.get(self._address)
        return current

    def release(self) -> None:
        """Deletes the lease, unless another run has taken it over. Raises nothing: it would also become stale."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(RENEW_SECONDS)
        if self._generation:
            held = Remote(self._address, 0, "", self._generation)
            with suppress(UserError, PlatformFault, TooSlow):
                in_time(lambda: self._gcs.delete(held), RENEW_SECONDS)

    def _may_replace(self, current: Remote) -> bool:
        """Returns whether the holder of the lease has certainly ended."""
        if current.updated and time.time() - current.updated.timestamp() > _LONG_AGO:
            return True
        holder, here = current.metadata or {}, writer()
        if "trainer-job" in here and holder.get("trainer-job") == here["trainer-job"]:
            return True
        process, boot = holder.get("trainer-process", ""), holder.get("trainer-boot")
        return boot == here["trainer-boot"] and (process == here["trainer-process"] or not is_running(process))

    def _renew(self) -> None:
        taken = None
        while not self._over.wait(RENEW_SECONDS):
            try:
                self._write(self._generation)
            except Conflict:
                self._generation = 0
                with suppress(UserError, PlatformFault):
                    taken = self._gcs.get(self._address)
                self._on_loss(self._refusal(taken))
                return
            except (UserError, PlatformFault):
                continue  # an outage: whoever takes the lease over meanwhile is found at the next renewal

    def _write(self, replaced: int) -> None:
        self._renewals += 1
        content = json.dumps({**writer(), "renewals": self._renewals}).encode()
        self._generation = self._gcs.upload(content, self._address, replaced, strict=True)

    def _refusal(self, current: Remote | None) -> UserError:
        who = current.writer if current else "it has just ended"
        return UserError(
            f"{self._setting}: another run is writing to it ({who}): wait, or use another --job_dir; nothing of it was "
            "overwritten"
        )
