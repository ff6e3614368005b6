"""Measures the commands of `deploy` on the user's machine beyond starting Python: `python -m benchmarks.desk`.

Goals: at most 0.5 s beyond Python for a dry run, less than 0.3 s in all for the help. No network, no gcloud settings.
"""

import os
import statistics
import subprocess
import sys
import tempfile

from benchmarks.runner import compare, elapsed, make_parser, program, save

SUBMIT = "submit l4x4 --recipe=wgan_gp_photos --data=gs://bucket/photos --bucket=gs://bucket --project=p"
COMMANDS = {
    "deploy submit --dry_run": f"-m deploy {SUBMIT} --region=us-central1 --dry_run",
    "deploy --help": "-m deploy --help",
    "python -c pass": "-c pass",
}
PARSER = make_parser(__doc__, repeats=15)


def seconds(arguments: str, gcloud_config: str) -> float:
    """Measures a whole process of this interpreter."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CLOUDSDK_")}
    environment["CLOUDSDK_CONFIG"] = gcloud_config
    command, null = [sys.executable, *arguments.split()], subprocess.DEVNULL
    return elapsed(lambda: subprocess.run(command, env=environment, stdout=null, check=True))


@program
def main() -> None:
    """Prints the table and saves the raw numbers."""
    with tempfile.TemporaryDirectory() as empty:
        commands = {name: lambda given=given: seconds(given, empty) for name, given in COMMANDS.items()}
        raw = compare("Commands of deploy", commands, PARSER.parse_args().repeats)
    *others, python = raw
    for name in others:
        beyond = statistics.median(one - base for one, base in zip(raw[name], raw[python], strict=True))
        print(f"{name}: {beyond:.3f} s beyond {python}, {statistics.median(raw[name]):.3f} s in all")
    save("desk", seconds=raw)
