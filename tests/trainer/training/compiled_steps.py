"""Runs steps that XLA compiles, and prints how many programs it had compiled after the first and after the last.

`XLA_FLAGS=--xla_dump_to=FOLDER python -m tests.trainer.training.compiled_steps FOLDER RECIPE [FLAG…]`
"""

import sys
from pathlib import Path

from trainer.base.settings.request import resolve
from trainer.cluster.strategy import make_replicas
from trainer.run.training_setup import build_setup

folder, recipe, *flags = sys.argv[1:]
small = ["--global_batch_size=8", "--jit_compile=true", "--steps=3"]
config = resolve([f"--recipe={recipe}", *small, *flags]).config
setup = build_setup(config, make_replicas(config))
compiled = []
with setup.dataset.reading():
    runner, rows = setup.step_runner(compiled=True), setup.rows_from(0)
    for step in range(3):
        runner(rows, step, 1)
        compiled.append(len(list(Path(folder).glob("*before_optimizations.txt"))))
print("compiled", compiled[0], compiled[-1])
