"""Provides each test with a new bucket behind a proxy that can inject faults, all on loopback."""

import gc
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures import Patch
from tests.trainer.base.storage.fault_proxy import Proxy, fault_proxy
from trainer.base.run_files import mirror
from trainer.base.storage import gcs
from trainer.base.storage.local_files import Address

QUICK = gcs.TransferLimits(
    retry=4, pause=0.1, connect=1, read=0.5, rate=2**30, workers=4, block=2**20
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignores a warning: the SDK does not close the responses that it retries."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"))


@pytest.fixture(scope="session")
def server(gcs_server: str) -> Iterator[str]:
    gc.freeze()  # excludes everything imported so far from the collections after each test
    yield gcs_server
    gc.unfreeze()


@pytest.fixture
def proxy(server: str, monkeypatch: Patch) -> Iterator[Proxy]:
    with fault_proxy(server) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        monkeypatch.setattr(gcs, "LIMITS", QUICK)
        monkeypatch.setattr(mirror, "_RETRY_SECONDS", 0.1)
        gcs._connect.cache_clear()
        yield proxy
        gcs._connect.cache_clear()
        if proxy.faults:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                gc.collect()
    assert [fault for fault in proxy.faults if not fault.struck] == []


@pytest.fixture
def bucket(proxy: Proxy) -> "Bucket":
    return Bucket(proxy)


class Bucket:
    """Represents a new bucket, accessed with the client alone."""

    def __init__(self, proxy: Proxy) -> None:
        self.name = f"b-{uuid.uuid4().hex}"
        self.client = gcs.connect().client
        self.bucket = self.client.create_bucket(self.name)
        self.proxy = proxy

    def put(self, name: str, content: bytes) -> None:
        self.bucket.blob(name).upload_from_string(content)

    def put_folder(self, folder: Path, prefix: str) -> None:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                self.bucket.blob(f"{prefix}/{file.relative_to(folder)}").upload_from_filename(
                    str(file)
                )

    def names(self) -> list[str]:
        return [blob.name for blob in self.client.list_blobs(self.name)]

    def content(self, name: str) -> bytes:
        return bytes(self.bucket.blob(name).download_as_bytes())

    def address(self, name: str = "") -> Address:
        return Address(self.name, name)

    def url(self, name: str = "") -> str:
        return str(self.address(name))
