"""The one place that knows where a path leads: local folders, gs:// and /gcs/; and how things appear there whole.

address.py reads paths; local.py writes local files whole; gcs.py is the one door to google-cloud-storage, which is
imported only when a gs:// path is used, and holds every limit on retries; staging.py and rolling.py bring data here;
mirror.py and uploader.py take a run's results there and back; initial.py fetches of another run what one begins from;
preflight.py proves beforehand that both will work.
"""

from trainer.storage.address import Address, expanded, is_remote, local_path, output_address, parse
from trainer.storage.local_files import (
    cannot_write,
    keep_others_out,
    make_writable,
    sync,
    whole_folder,
    write_whole,
    writing,
)

__all__ = [
    "Address",
    "cannot_write",
    "expanded",
    "is_remote",
    "keep_others_out",
    "local_path",
    "make_writable",
    "output_address",
    "parse",
    "sync",
    "whole_folder",
    "write_whole",
    "writing",
]
