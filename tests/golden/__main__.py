"""Records the golden files of this project: `python -m tests.golden [NAME …]`, or a new one by its
flags: `python -m tests.golden NAME FLAG …`.
"""

import sys
from collections.abc import Sequence

import keras
import tensorflow as tf

from tests.golden import FOLDER, RUNS
from tests.golden.comparison import compare, write_golden
from tests.golden.measuring import measure
from tests.support import resolved
from trainer.base.run_files.job_files import read_json

# after which a new file has numbers, and after the last; a known file keeps its own
STEPS = (1, 2, 4, 8, 16, 30)


def record(name: str, flags: Sequence[str]) -> str:
    """Measures a run and writes its golden file, unless it agrees; returns what was done."""
    file = FOLDER / f"{name}.json"
    golden, _ = read_json(file)
    last = resolved(*flags).steps or 1
    steps = golden.get("steps") or sorted({*(step for step in STEPS if step < last), last})
    measured = measure(flags, steps, control=True)
    if golden.get("flags") == [*flags] and not compare(golden, measured):
        return f"{file} holds these numbers already"
    write_golden(file, measured)
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
