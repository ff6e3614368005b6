"""Resolves paths (local, gs:// and /gcs/) and writes files atomically.

address.py parses paths; local_files.py writes local files atomically; gcs.py alone uses google-cloud-storage, which is
imported only for gs:// paths, and holds the limits on retries and times of requests, which transfers.py enforces;
login.py finds the credentials; staging.py downloads data; uploader.py uploads a run's results; preflight.py checks
beforehand that reading and writing will work.
"""

from trainer.base.storage.address import Address, expanded, is_remote, local_path, output_address, parse
from trainer.base.storage.local_files import (
    cannot_write,
    is_locked,
    keep_others_out,
    make_writable,
    sync,
    whole_folder,
    write_whole,
    writing,
)

__all__ = [
    "Address", "cannot_write", "expanded", "is_locked", "is_remote", "keep_others_out", "local_path", "make_writable",
    "output_address", "parse", "sync", "whole_folder", "write_whole", "writing",
]  # fmt: skip
