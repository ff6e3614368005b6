"""Interrupts real submissions at random while their job is created, then runs the same command again.

python -m benchmarks.proofs.ctrl_c --cases=20

Each case is `python -m deploy submit` with gcloud or the SDK against the emulator of the tests, which needs two seconds
for a job. SIGINT arrives at a random moment from the reservation of the job directory to a second after the response.
Prints a line a case, and ends with status 1 unless each command pair made exactly one job.
"""

import argparse
import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.deploy.emulator import POSTS, Emulator, Fault

ROOT = Path(__file__).parents[2]
SLOW_S = 2.0  # of a create request
RESERVES = "POST .*upload.*/o$"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Holds the exit codes of the interrupted command and of the same command after it, and how many jobs there are."""

    first: int
    second: int
    jobs: int
    said: str


def start(google: Emulator, folder: Path, backend: str, *flags: str) -> "subprocess.Popen[str]":
    """Starts a submission in `folder`, which has its records, as a process."""
    folder.mkdir(exist_ok=True)
    (folder / "token").write_text("x")
    command = [sys.executable, "-m", "deploy", "submit", "cpu", "--region=us-central1", "--bucket=gs://my-bucket",
               "--model=mlp", "--data=digits", "--image=us-docker.pkg.dev/p/r/x:1", f"--backend={backend}"]  # fmt: skip
    key = {"GOOGLE_APPLICATION_CREDENTIALS": str(_credentials(google, folder))}
    environment = {**os.environ, **google.environment(folder / "token"), **key, "PYTHONPATH": str(ROOT),
                   "CLOUDSDK_CONFIG": str(folder / "gcloud")}  # fmt: skip
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, *flags], cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)


def _credentials(google: Emulator, folder: Path) -> Path:
    """Writes the key of an account, whose tokens come from the emulator, which takes any."""
    file = folder / "key.json"
    if not file.exists():
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        pem, plain = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        text = key.private_bytes(pem, plain, serialization.NoEncryption()).decode()
        about = {"type": "service_account", "project_id": "my-proj", "private_key_id": "x", "private_key": text,
                 "client_email": "me@my-proj.iam.gserviceaccount.com", "token_uri": f"{google.url}/token"}  # fmt: skip
        file.write_text(json.dumps(about))
    google.account = lambda request, authorization: "me"  # type: ignore[method-assign]
    return file


def interrupted_once(google: Emulator, folder: Path, backend: str, after_s: float, since: str = POSTS) -> Outcome:
    """Interrupts a submission `after_s` seconds after the first request that matches `since`, and runs it again."""
    google.faults, before = [Fault(POSTS, "slow", times=99, seconds=SLOW_S)], len(google.jobs)
    seen = len(google.requests)
    process = start(google, folder, backend, "--detach")
    deadline = time.monotonic() + 60
    while not any(re.search(since, request) for request in google.requests[seen:]):
        if time.monotonic() > deadline or process.poll() is not None:
            raise RuntimeError(process.communicate()[1])
        time.sleep(0.01)
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    again = start(google, folder, backend, "--detach")
    out, error = again.communicate(timeout=120)
    last = (said.strip().splitlines() or ["ended before"])[-1]
    return Outcome(
        process.returncode, again.returncode, len(google.jobs) - before, f"{last} | {(out + error)[-200:]!r}"
    )


def main() -> int:
    """Runs the campaign."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so would ours
    moments, failed = random.Random(args.seed), 0
    for case in range(args.cases):
        backend = ("gcloud", "sdk")[case % 2]
        since = POSTS if case % 4 > 1 else RESERVES  # half of them once the request is sent
        after_s = moments.uniform(0.0, SLOW_S + 2.0 * (since == RESERVES))
        with tempfile.TemporaryDirectory() as folder, Emulator() as google:
            outcome = interrupted_once(google, Path(folder), backend, after_s, since)
        good = outcome.first in (0, 69, 75) and (outcome.second, outcome.jobs) == (0, 1 + (outcome.first == 0))
        failed += not good
        print(f"{case:2} {backend:6} {after_s:4.2f} s: {outcome.first}, then {outcome.second}: {outcome.jobs} job: "
              f"{'' if good else 'WRONG '}{outcome.said.partition(' | ')[0][:150]}", flush=True)  # fmt: skip
    print(f"{args.cases - failed} of {args.cases} made one job, found by the same command")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
