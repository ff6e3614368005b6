"""Tests that a secret reaches the program of a job, and nothing else."""

import json
from pathlib import Path

from tests.deploy.conftest import WHERE, Command
from tests.deploy.emulator import Emulator

SECRET = "projects/p/secrets/token/versions/latest"


def test_a_secret_is_read_by_the_job_and_stands_nowhere(vertex: Emulator, typed: Command) -> None:
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
    why = "the job's account must be able to read it (roles/secretmanager.secretAccessor)"
    assert f"error: {SECRET}: status 403: {why}" in typed("submit", *flags, code=2)
    vertex.secrets[SECRET] = b"hf_do_not_tell"
    shown = typed("submit", *flags)
    assert "  workerpool0-0  knows 14 fast mode False\n" in shown
    known = shown + json.dumps(vertex.bodies) + "".join(map(str, vertex.objects.values()))
    assert "hf_do_not_tell" not in known
    assert SECRET in known
