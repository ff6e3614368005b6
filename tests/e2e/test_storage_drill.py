"""Tests that a run in a bucket behind random faults of all kinds, killed several times, ends with
undisturbed numbers.

`TRAINER_DRILL_KILLS=50 TRAINER_DRILL_SEED=1 python -m pytest tests/e2e/test_storage_drill.py -m
slow -s` is longer.
"""

import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from numpy.random import default_rng
from numpy.testing import assert_array_equal

from tests.drill import last_state
from tests.fixtures import SLOW, Patch
from tests.trainer.base.storage.fault_proxy import fault_proxy
from tests.workers import ROOT, python, until
from trainer.base.errors import DONE
from trainer.base.storage import gcs

KILLS = int(os.environ.get("TRAINER_DRILL_KILLS", "2"))
FLAGS = [
    "--model=mlp",
    "--width=8",
    "--image_size=8",
    "--global_batch_size=16",
    "--steps_per_loop=5",
    "--tensorboard=false",
    "--checkpoint_every_steps=25",
    "--report_every_steps=5",
    "--keep_checkpoints=2",
    f"--steps={100 * (KILLS + 1)}",
    # auto could choose differently for the undisturbed run, which measures again
    "--jit_compile=false",
]
# The real limits would make the drill wait: a stalled answer takes 20 seconds to be given up.
IMPATIENT = """
import sys
from trainer.base.storage import gcs
from trainer.base.run_files import mirror
gcs.LIMITS = gcs.TransferLimits(retry=30, pause=0.3, connect=2, read=1.5, rate=2**30)
mirror._RETRY_SECONDS = 0.3
from trainer.task import main
sys.exit(main())
"""


def step_of(log: Path) -> int:
    """Returns the last step that the newest start has reported."""
    text = log.read_text(errors="replace").rpartition("--- start\n")[2]
    return max(
        (int(step.replace(",", "")) for step in re.findall(r"^step ([\d,]+)/", text, re.MULTILINE)),
        default=0,
    )


@SLOW
def test_kills_behind_random_faults_change_no_bit(
    gcs_server: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    chance = random.Random(int(os.environ.get("TRAINER_DRILL_SEED", "0")))
    log = tmp_path / "log"
    images = default_rng(0).integers(0, 255, (320, 8, 8), np.uint8)
    np.savez(tmp_path / "data.npz", images=images, labels=np.arange(320) % 4)
    with fault_proxy(gcs_server) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        client = gcs.connect().client
        bucket = client.create_bucket(f"drill-{os.getpid()}-{time.time_ns()}")
        bucket.blob("data.npz").upload_from_filename(str(tmp_path / "data.npz"))
        proxy.chaos = 0.2
        run = [*FLAGS, f"--data=gs://{bucket.name}/data.npz", f"--job_dir=gs://{bucket.name}/run"]
        for life in range(KILLS + 1):
            cache = tmp_path / f"cache{chance.randrange(2)}"
            with open(log, "a") as output:
                print("--- start", file=output, flush=True)
                process = subprocess.Popen(
                    [sys.executable, "-c", IMPATIENT, *run, f"--cache_dir={cache}"],
                    cwd=ROOT,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            with process:
                if life < KILLS:
                    kill_at_a_random_moment(process, log, chance, life)
            assert process.returncode in ((DONE, -9) if life < KILLS else (DONE,)), log.read_text()[
                -4000:
            ]
        proxy.chaos = 0.0
        names = [blob.name for blob in client.list_blobs(bucket.name)]
    gcs._connect.cache_clear()
    control = [*FLAGS, f"--data={tmp_path / 'data.npz'}", f"--job_dir={tmp_path / 'control'}"]
    python("-m", "trainer.task", *control)
    (folder,) = cache.glob("*/run")
    ours = last_state(folder)
    undisturbed = last_state(tmp_path / "control")
    assert ours.keys() == undisturbed.keys()
    for name, value in ours.items():
        assert_array_equal(value, undisturbed[name], err_msg=name)
    assert not [name for name in names if ".probe" in name or name.endswith(".part")]
    checkpoints = {name.split("/")[2] for name in names if name.startswith("run/checkpoints/")}
    assert all(f"run/checkpoints/{folder}/manifest.json" in names for folder in checkpoints)
    print(f"\n{KILLS} kills, {len(proxy.requests)} requests of which one in five met a fault")


def kill_at_a_random_moment(
    process: "subprocess.Popen[bytes]", log: Path, chance: random.Random, life: int
) -> None:
    """Kills during the start, or at a step after the one that it resumed from."""
    if chance.random() < 0.3:
        time.sleep(chance.uniform(1, 6))
    else:
        wanted = chance.randint(1, 100 * (life + 1))
        until(lambda: step_of(log) >= wanted or process.poll() is not None, 120)
        time.sleep(chance.uniform(0, 0.3))
    process.kill()
