"""Measures the commands of `deploy` on the user's machine beyond starting Python: `python -m benchmarks.desk`.

Goals: at most 0.5 s beyond Python for a dry run, less than 0.3 s in all for the help. No network, no gcloud settings.
Also counts the requests of `submit --detach` to the services, emulated on loopback, with a package that is cached.
"""

import contextlib
import io
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from google.auth.credentials import AnonymousCredentials

from benchmarks.runner import compare, elapsed, make_parser, program, save
from deploy.cli import submit
from deploy.platform.gcloud_and_sdk import BACKENDS, Gcloud, Sdk, Session
from deploy.platform.rest import Platform
from deploy.platform.vertex_api import SYSTEM_CLOCK
from tests.deploy.emulator import Emulator

SUBMIT = "submit l4x4 --recipe=wgan_gp_photos --data=gs://bucket/photos --bucket=gs://bucket --project=p"
COMMANDS = {
    "deploy submit --dry_run": f"-m deploy {SUBMIT} --region=us-central1 --dry_run",
    "deploy --help": "-m deploy --help",
    "python -c pass": "-c pass",
}
ROOT = Path.cwd()
PARSER = make_parser(__doc__, repeats=15)


def seconds(arguments: str, gcloud_config: str) -> float:
    """Measures a whole process of this interpreter."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CLOUDSDK_")}
    environment["CLOUDSDK_CONFIG"] = gcloud_config
    command, null = [sys.executable, *arguments.split()], subprocess.DEVNULL
    return elapsed(lambda: subprocess.run(command, env=environment, stdout=null, check=True))


def requests_of_submit(backend: str) -> Counter[str]:
    """Returns the requests of a second `submit --detach` of the same sources, by method and path without IDs."""
    with Emulator() as google, tempfile.TemporaryDirectory() as folder:

        def opened(kind: str, project: str, region: str) -> Platform:
            return (Sdk if kind == "sdk" else Gcloud)(project, region, AnonymousCredentials())

        os.chdir(folder)
        Path("token").write_text("any")
        os.environ.update({**google.environment(Path(folder, "token")), "CLOUDSDK_CONFIG": f"{folder}/config"})
        given = ["cpu", "--recipe=wgan_gp_digits", "--region=us-central1", "--bucket=gs://bucket", "--detach"]
        for _ in range(2):
            google.requests.clear()
            with contextlib.redirect_stdout(io.StringIO()):
                submit.main([*given, f"--backend={backend}"], Session(SYSTEM_CLOCK, opened))
        os.chdir(ROOT)
        return Counter(google.requests)


@program
def main() -> None:
    """Prints the table and saves the raw numbers."""
    with tempfile.TemporaryDirectory() as empty:
        commands = {name: lambda given=given: seconds(given, empty) for name, given in COMMANDS.items()}
        raw = compare("Commands of deploy", commands, PARSER.parse_args().repeats)
    requests = {name: requests_of_submit(name) for name in BACKENDS if name == "sdk" or shutil.which("gcloud")}
    for name, counts in requests.items():
        print(f"submit --detach --backend={name}: {counts.total()} requests")
        print("".join(f"  {count} x {request}\n" for request, count in counts.items()), end="")
    *others, python = raw
    for name in others:
        beyond = statistics.median(one - base for one, base in zip(raw[name], raw[python], strict=True))
        print(f"{name}: {beyond:.3f} s beyond {python}, {statistics.median(raw[name]):.3f} s in all")
    save("desk", seconds=raw, requests=requests)
