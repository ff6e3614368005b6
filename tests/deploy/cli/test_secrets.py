"""Tests that a secret reaches the program of a job, and nothing else."""

import json
from pathlib import Path

from deploy.cli import submit
from deploy.platform.gcloud_and_sdk import Session
from tests.deploy.conftest import WHERE, Capture
from tests.deploy.emulator import Emulator

SECRET = "projects/p/secrets/token/versions/latest"


def test_a_secret_is_read_by_the_job_and_stands_nowhere(
    vertex: Emulator, session: Session, capsys: Capture
) -> None:
    """The script, which gets it as a variable, prints its length alone."""
    words = "len(os.environ['HF_TOKEN']), os.environ['MODE'], 'TRAINER_SECRETS' in os.environ"
    Path("mine").mkdir()
    Path("mine/train.py").write_text(f"import os\nprint('knows', {words})")
    flags = [
        "cpu",
        *WHERE,
        "--backend=sdk",
        "--script=mine/train.py",
        "--env=MODE=fast mode",
        f"--secret=HF_TOKEN={SECRET}",
    ]
    assert submit.main(flags, session) == 2, "the account of the job may not read it"
    why = "the job's account must be able to read it (roles/secretmanager.secretAccessor)"
    assert f"error: {SECRET}: status 403: {why}" in capsys.readouterr().out
    vertex.secrets[SECRET] = b"hf_do_not_tell"
    assert submit.main(flags, session) == 0
    shown = capsys.readouterr()
    assert "  workerpool0-0  knows 14 fast mode False\n" in shown.out
    known = (
        shown.out
        + shown.err
        + json.dumps(vertex.bodies)
        + "".join(map(str, vertex.objects.values()))
    )
    assert "hf_do_not_tell" not in known
    assert SECRET in known
