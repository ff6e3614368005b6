"""Tests that the profile of workers whose messages arrive late says that their steps wait for all-reduces."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.localrun.workers import free_addresses
from tests import workers
from trainer.base.run_files.breakdown import ALL_REDUCE, INPUT, advice


@contextmanager
def slow_link(address: str, seconds: float) -> Iterator[str]:
    """Gives the address of a proxy that passes on what it gets `seconds` later."""
    host, _, port = address.rpartition(":")

    def pump(source: socket.socket, target: socket.socket) -> None:
        with source, target:
            try:
                while chunk := source.recv(1 << 20):
                    time.sleep(seconds)
                    target.sendall(chunk)
            except OSError:
                pass  # one of both has closed it

    def accept() -> None:
        while True:
            try:
                client = server.accept()[0]
            except OSError:  # the test has ended
                return
            try:
                target = socket.create_connection((host, int(port)))
            except OSError:  # the worker has not started yet
                client.close()
                continue
            for pair in ((client, target), (target, client)):
                threading.Thread(target=pump, args=pair, daemon=True).start()

    with socket.create_server((host, 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield f"{host}:{server.getsockname()[1]}"


@pytest.mark.slow
def test_two_workers_with_a_slow_link_wait_for_each_other(tmp_path: Path) -> None:
    """Without the proxy's 30 ms, all-reduces take about a quarter of these steps."""
    found = tmp_path / "shares.json"
    flags = (str(found), "--recipe=mlp_mnist", "--data=digits", "--global_batch_size=1000")
    chief, worker = free_addresses(2)
    with slow_link(chief, 0.03) as delayed:
        both = [
            workers.start(addresses, index, flags, tmp_path / f"{index}.log", "tests.profiled_worker")
            for index, addresses in enumerate(([chief, worker], [delayed, worker]))
        ]
        codes = workers.end(both)
    assert codes == [0, 0], (tmp_path / "0.log").read_text() + (tmp_path / "1.log").read_text()
    shares = json.loads(found.read_text())
    assert shares[ALL_REDUCE] > 0.5
    assert shares[INPUT] < 0.1
    assert advice(shares)[0].startswith("all-reduce")
