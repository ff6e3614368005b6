"""What the desk's commands take, against a Python that does nothing: `python -m benchmarks.desk`."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial

from benchmarks.measure import alternate, base_parser, keep, run_main, table

WHERE = ["--project=p", "--region=us-central1", "--bucket=gs://my-bucket"]
DRY_RUN = ["submit", "l4x4", "--dry_run", "--recipe=wgan_gp_photos", "--data=gs://my-bucket/photos", *WHERE]


def seconds(*arguments: str) -> float:
    """Of a whole process of this interpreter."""
    environment = {**os.environ, "CLOUDSDK_CONFIG": tempfile.gettempdir()}
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    return base_parser(__doc__, repeats=10)


def main() -> None:
    """Prints the table and keeps the raw numbers."""
    deploy = partial(seconds, "-m", "deploy")
    contenders: dict[str, Callable[[], float]] = {
        "deploy submit --dry_run": partial(deploy, *DRY_RUN),
        "deploy render": partial(deploy, "render", "l4x4", *DRY_RUN[3:]),
        "deploy machines": partial(deploy, "machines"),
        "deploy --help": partial(deploy, "--help"),
        "python -c pass": partial(seconds, "-c", "pass"),
    }
    raw = alternate(contenders, make_parser().parse_args().repeats)
    print("\n".join(["\nCommands of the desk", "", *table(raw, "deploy submit --dry_run", "seconds")]))
    keep("desk", {"command": "python -m benchmarks.desk", "seconds": raw})


if __name__ == "__main__":
    run_main(main)
