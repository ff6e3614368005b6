"""Records the golden files of this project: `python -m tests.golden [NAME …]`, or a new one by its
flags: `python -m tests.golden NAME FLAG …`.

A file that agrees with the run is kept, and gets the digests of this processor's bits.
"""

import sys
from collections.abc import Sequence

import keras
import tensorflow as tf

from tests.golden import FOLDER, RUNS
from tests.golden.comparison import CHANGED, compare, write_golden
from tests.golden.measuring import instructions, measure
from tests.support import resolved
from trainer.base.run_files.job_files import read_json

# after which a new file has numbers, and after the last; a known file keeps its own
STEPS = (1, 2, 4, 8, 16, 30)


def record(name: str, flags: Sequence[str]) -> str:
    """Measures a run and writes its golden file, or adds this processor's digests to it; returns
    what was done."""
    file = FOLDER / f"{name}.json"
    golden, _ = read_json(file)
    last = resolved(*flags).steps or 1
    steps = golden.get("steps") or sorted({*(step for step in STEPS if step < last), last})
    measured = measure(flags, steps, control=True)
    digests = {
        instructions(): {step: moment["digest"] for step, moment in measured["moments"].items()}
    }
    if (
        golden.get("flags") == [*flags]
        and compare({**golden, "digests": {}}, measured, "").kind != CHANGED
    ):
        write_golden(file, {**golden, "digests": golden["digests"] | digests})
        return f"{file} holds these numbers already: the bits of {instructions()} are added"
    write_golden(file, {**measured, "digests": digests})
    return f"{file} is recorded"


if __name__ == "__main__":
    tf.config.set_visible_devices([], "GPU")
    words = sys.argv[1:]
    if any(word.startswith("--") for word in words):
        RUNS[words[0]] = words[1:]
        words = words[:1]
    for run in words or RUNS:
        keras.utils.clear_session()
        print(record(run, RUNS[run]))
