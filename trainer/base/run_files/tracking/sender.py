"""Sends runs to trackers: a thread for each follows the files of a running training, and holds nothing up.

stats.jsonl is the queue: what a tracker cannot take now is sent when it answers, or by `python -m deploy track`.
"""

import importlib
import os
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from trainer.base.errors import UserError, reason
from trainer.base.log import log
from trainer.base.run_files.records import read_result
from trainer.base.run_files.tracking.tracked_files import RunFiles
from trainer.base.tracker import Address, Opened, Tracker, read_addresses

_POLL_S, _LONGEST_PAUSE_S = 1.0, 60.0
_BEGINNING_S = 15.0  # how long a training waits for a tracker's first answer
_ENDING_S, _LEAVING_S = 60.0, 3.0  # and for the rest to be sent: at its end, and after a signal or a failure
_BATCH = 200  # points
_SHARE = 0.01  # of a core's time, at most, to read the files again
_BUILT_IN = {"mlflow": "mlflow_runs:MlflowRuns", "wandb": "wandb_runs:WandbRuns", "vertex": "vertex_runs:VertexRuns"}


def open_tracker(address: Address) -> Tracker:
    """Returns the tracker at an address. Raises UserError if its package or a login is missing."""
    known = _BUILT_IN.get(address.kind)
    name, _, function = f"{__package__}.{known}".partition(":") if known else address.kind.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        tracker: Tracker = getattr(importlib.import_module(name), function)(address)
        return tracker
    except (ImportError, AttributeError) as error:
        raise UserError(f"track={address.text}: cannot import {address.kind} ({reason(error)})") from error


class Sender(threading.Thread):
    """Sends one run to one tracker, each point once: it asks first what the tracker has.

    As a thread it follows a training; `send` alone sends a run that has ended. `begun` is set after the first answer.
    """

    def __init__(self, address: Address, source: RunFiles) -> None:
        super().__init__(name="tracking", daemon=True)
        self.text, self._tracker, self._source = f"track={address.text}", open_tracker(address), source
        self._steps: dict[str, int] = {}  # of each metric, the last one that was read
        self.opened: Opened | None = None
        self.sent = 0  # points
        self.refusal: UserError | None = None
        self.outage = ""
        self.begun, self._wake, self._ended = threading.Event(), threading.Event(), False

    def send(self, *, ended: bool) -> None:
        """Sends what is new; of a run that has ended everything, and how it ended.

        Raises UserError if the tracker refuses it, and any other exception for an outage: the next call begins anew.
        """
        try:
            if self.opened is None:
                self._steps = {}
                self.opened = self._tracker.begin(self._source.run(ended=False))
            unsent = []
            for point in self._source.points(ended=ended):
                sent = {name: max(self._steps.get(name, -1), self.opened.last_step(name)) for name in point.values}
                if new := {name: value for name, value in point.values.items() if point.step > sent[name]}:
                    unsent.append(point._replace(values=new))
                    self._steps.update(dict.fromkeys(new, point.step))
            for start in range(0, max(len(unsent), int(ended)), _BATCH):
                batch, last = unsent[start : start + _BATCH], start + _BATCH >= len(unsent)
                self._tracker.send(self._source.run(ended=ended and last), batch)
                self.sent += len(batch)
        except Exception:
            self.opened = None
            raise

    def run(self) -> None:
        """Sends until the run has ended, or the tracker refuses it."""
        pause, over = _POLL_S, False
        while not over:
            self._wake.clear()
            ended, began = self._ended, time.thread_time()
            try:
                self.send(ended=ended)
                pause, self.outage, over = max(_POLL_S, (time.thread_time() - began) / _SHARE), "", ended
            except UserError as error:
                self.refusal, over = error, True
            except Exception as error:
                if not self.outage:
                    log.warning(f"{self.text}: {reason(error)}: the training goes on, and is sent later")
                pause, self.outage = min(2 * pause, _LONGEST_PAUSE_S), reason(error)
            self.begun.set()
            if not over:
                self._wake.wait(_POLL_S if self._ended else pause)

    def end(self, seconds: float, where: str) -> None:
        """Sends the rest, within these seconds; logs one line: what was sent, or how to send what was not."""
        self._ended = True
        self._wake.set()
        self.join(seconds)
        if self.opened and not self.is_alive():
            log.info(f"{self.text}: {self.sent:,} steps sent: {self.opened.link}")
            return
        why = self.refusal or self.outage or f"no answer within {seconds:g} seconds"
        log.warning(
            f"{self.text}: not all is sent ({why}): send it with `python -m deploy track {where} --{self.text}`"
        )


class Tracking:
    """Sends a training to its trackers, from `begin` to the end of the block, where result.json says how it ended."""

    def __init__(self, addresses: str, folder: Path, where: str) -> None:
        self._addresses, self._folder, self._where = read_addresses(addresses), folder, where
        self._senders: list[Sender] = []

    def begin(self) -> None:
        """Begins to send, once run.json is there. Raises UserError if a tracker refuses it."""
        if self._senders:
            return  # the run has gone back to a checkpoint: its files say so
        self._senders = [Sender(address, RunFiles(self._folder, self._where)) for address in self._addresses]
        for sender in self._senders:
            sender.start()
        until = time.monotonic() + _BEGINNING_S
        for sender in self._senders:
            if not sender.begun.wait(max(0.0, until - time.monotonic())):
                log.warning(f"{sender.text}: no answer within {_BEGINNING_S:g} seconds: the training begins without it")
            elif sender.refusal:
                self._senders.remove(sender)
                raise sender.refusal
            elif sender.opened:
                log.info(f"{sender.text}: {sender.opened.link}")

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        complete = read_result(self._folder)[0].get("state") in ("done", "budget", "stopped") and not error
        for sender in self._senders:
            sender.end(_ENDING_S if complete else _LEAVING_S, self._where)
