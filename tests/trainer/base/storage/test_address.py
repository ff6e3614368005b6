"""Tests how paths are parsed, and the suggestions for typos."""

from tests.fixtures import parametrize
from tests.support import refused
from trainer.base.storage import Address, output_address, parse


@parametrize(
    "path, address",
    [
        ("gs://my-bucket/photos/a b/", Address("my-bucket", "photos/a b")),
        ("gs://my-bucket", Address("my-bucket", "")),
        ("/gcs/my-bucket/photos", None),
        ("photos", None),
        ("gsx:photos", None),
    ],
)
def test_paths(path: str, address: Address | None) -> None:
    assert parse(path, "data") == address


@parametrize(
    "path, line",
    [
        ("gs:/bucket/x", "not an address: did you mean gs://bucket/x?"),
        ("gs:bucket/x", "not an address: did you mean gs://bucket/x?"),
        ("gcs://bucket/x", "not an address: did you mean gs://bucket/x?"),
        ("https://storage.googleapis.com/bucket/x", "not an address: did you mean gs://bucket/x?"),
        ("gs://", "'' is not a valid bucket name"),
        ("gs:///", "not an address: did you mean gs://BUCKET/…?"),
        ("gs://Bucket/x", "'Bucket' is not a valid bucket name"),
        ("s3://bucket/x", "must be a local path, gs://BUCKET/… or /gcs/BUCKET/…"),
    ],
)
def test_typos(path: str, line: str) -> None:
    with refused(f"data={path}: {line}"):
        parse(path, "data")


def test_what_is_written_below_the_mount_goes_to_the_bucket() -> None:
    assert output_address("/gcs/my-bucket/runs/7/", "job_dir") == Address("my-bucket", "runs/7")
    assert output_address("runs/7", "job_dir") is None
