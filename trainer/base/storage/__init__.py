"""Resolves paths (local, gs:// and /gcs/), writes files atomically, and reads and writes Cloud
Storage.

local_files.py parses paths and writes local files; gcs.py alone uses google-cloud-storage, which is
imported only for gs:// paths; login.py finds the credentials; staging.py checks addresses
beforehand and downloads data.
"""

from trainer.base.storage.local_files import (
    Address,
    atomic_folder,
    cannot_write,
    expanded,
    is_locked,
    is_remote,
    local_path,
    lock_folder,
    make_writable,
    output_address,
    output_file,
    parse,
    remove_parts,
    sync,
    write_whole,
    writing,
)

__all__ = [
    "Address",
    "atomic_folder",
    "cannot_write",
    "expanded",
    "is_locked",
    "is_remote",
    "local_path",
    "lock_folder",
    "make_writable",
    "output_address",
    "output_file",
    "parse",
    "remove_parts",
    "sync",
    "write_whole",
    "writing",
]
