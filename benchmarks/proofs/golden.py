"""Tries golden files on planted changes and on changes that are none: `python -m benchmarks.proofs.golden`.

One small model with dropout, batch norm, augmentation and labels is recorded, with fresh weights and from a checkpoint;
then each case edits its file, its settings, its data or its checkpoint, and the verdict is compared with what it has
to be: 0 missed, 0 false alarms. With virtual replicas in float32 only equal bits will do. With --folder=FOLDER, what
was recorded there is checked: first with one version of TensorFlow, then, by the Python of another environment, with
another. benchmarks/proofs/forged_chains.py has the cases of an audit.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.runner import make_parser, program, some_of
from trainer.base.run_files.run_layout import step_name
from trainer.base.settings.resolution import resolve
from trainer.proofs.golden_check import described, record
from trainer.proofs.golden_file import read_golden
from trainer.proofs.processes import measured
from trainer.proofs.verdicts import CHANGED, EQUAL, ROUNDING, judge
from trainer.training.checkpoint import read_checkpoint, write_checkpoint
from trainer.training.state import WEIGHTS

SOURCE = """
import keras
import numpy as np


class Flipped(keras.layers.Layer):
    def build(self, shape):
        self.seed = keras.random.SeedGenerator(5)

    def call(self, x, training=False):
        drawn = keras.random.uniform((keras.ops.shape(x)[0], 1, 1, 1), seed=self.seed)
        return keras.ops.where(drawn < 0.5, keras.ops.flip(x, 2), x) if training else x


def data(config):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(96, 8, 8, 1)).astype("float32")
    return x, draw.integers(0, 3, 96)


def network():
    return keras.Sequential([
        Flipped(),
        keras.layers.Conv2D(4, 3, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.25, seed=1),
        keras.layers.Dense(8, activation="tanh"),
        keras.layers.Dense(3),
    ])


def model(config, dataset):
    built = network()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    built.compile(keras.optimizers.Adam(config.learning_rate), loss=loss, metrics=["accuracy"])
    return built
"""
FLAGS = ["--model=mine:model", "--data=mine:data", "--precision=float64", "--global_batch_size=16", "--steps=8",
         "--learning_rate=0.001"]  # fmt: skip
THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "OMP_NUM_THREADS": "1"}  # of two workers, each has half of the cores


@dataclass(frozen=True)
class Case:
    """Describes an edit of the file or of the flags, and how it is run."""

    edits: Mapping[str, str]
    flags: Mapping[str, str]
    replicas: int = 1
    workers: int = 1
    environment: Mapping[str, str] | None = None
    module: str = "mine"
    history: float = 1.0  # by which the recorded loss after step 4 is multiplied


def edit(*pairs: str, replicas: int = 1, workers: int = 1) -> Case:
    """Returns a case that replaces the text before by the text after, in turn."""
    return Case(dict(zip(pairs[::2], pairs[1::2], strict=True)), {}, replicas, workers)


ADAM, CONV, DENSE = "Adam(config.learning_rate)", 'Conv2D(4, 3, activation="relu")', 'Dense(8, activation="tanh")'
CHANGES = {
    "epsilon": edit(ADAM, "Adam(config.learning_rate, epsilon=2e-7)"),
    "beta_1": edit(ADAM, "Adam(config.learning_rate, beta_1=0.9001)"),
    "beta_2": edit(ADAM, "Adam(config.learning_rate, beta_2=0.9991)"),
    "amsgrad": edit(ADAM, "Adam(config.learning_rate, amsgrad=True)"),
    "weight decay": edit(ADAM, "AdamW(config.learning_rate, weight_decay=1e-6)"),
    "clipping": edit(ADAM, "Adam(config.learning_rate, clipnorm=0.1)"),
    "optimizer": edit(ADAM, "RMSprop(config.learning_rate)"),
    "learning rate": edit(ADAM, "Adam(config.learning_rate * 1.0001)"),
    "schedule": edit(ADAM, "Adam(keras.optimizers.schedules.ExponentialDecay(1e-3, 4, 0.999))"),
    "initializer": edit(DENSE, 'Dense(8, activation="tanh", kernel_initializer="he_normal")'),
    "bias initializer": edit(DENSE, 'Dense(8, activation="tanh", bias_initializer="ones")'),
    "activation": edit(DENSE, 'Dense(8, activation="selu")'),
    "an L2 penalty": edit(DENSE, 'Dense(8, activation="tanh", kernel_regularizer=keras.regularizers.L2(1e-6))'),
    "padding": edit(CONV, 'Conv2D(4, 3, activation="relu", padding="same")'),
    "stride": edit(CONV, 'Conv2D(4, 3, activation="relu", strides=2)'),
    "no bias": edit(CONV, 'Conv2D(4, 3, activation="relu", use_bias=False)'),
    "one filter more": edit("Conv2D(4,", "Conv2D(5,"),
    "batch norm's epsilon": edit("BatchNormalization()", "BatchNormalization(epsilon=1.1e-3)"),
    "batch norm's momentum": edit("BatchNormalization()", "BatchNormalization(momentum=0.98)"),
    "dropout's rate": edit("Dropout(0.25", "Dropout(0.26"),
    "dropout's seed": edit("seed=1", "seed=2"),
    "the loss's reduction": edit("from_logits=True", 'from_logits=True, reduction="sum"'),
    "a class that the loss ignores": edit("from_logits=True", "from_logits=True, ignore_class=2"),
    "a label": edit("return x, draw.integers(0, 3, 96)",
                    "y = draw.integers(0, 3, 96); y[5] = (y[5] + 1) % 3; return x, y"),
    "one row dropped": edit("return x, draw.integers(0, 3, 96)", "return x[:-1], draw.integers(0, 3, 96)[:-1]"),
    "one pixel": edit("return x,", "x[0, 0, 0, 0] += 1e-3; return x,"),
    "two rows swapped": edit("return x,", "x[[0, 1]] = x[[1, 0]]; return x,"),
    "the seed": Case({}, {"seed": "1"}),
    "the order of layers": edit(
        "keras.layers.BatchNormalization(),\n        keras.layers.Flatten(),",
        "keras.layers.Flatten(),\n        keras.layers.BatchNormalization(),",
    ),
    "an augmentation's probability": edit("< 0.5", "< 0.6"),
    "an edited history": Case({}, {}, history=1.001),
    "a default of Keras": edit("import keras\n", "import keras\nkeras.config.set_epsilon(1e-3)\n",
                               ADAM, "Adam(config.learning_rate, epsilon=keras.config.epsilon())"),
}  # fmt: skip
NO_CHANGES = {
    "nothing": edit(),
    "2 replicas": edit(replicas=2),
    "4 replicas": edit(replicas=4),
    "2 workers": edit(workers=2),
    "a comment": edit("import keras\n", "# a comment\nimport keras\n"),
    "a docstring": edit("def network():\n", 'def network():\n    """Returns the network."""\n'),
    "renamed functions": edit("network()", "layers_of_mine()"),
    "renamed variables": edit("built", "classifier"),
    "named layers": edit(DENSE, 'Dense(8, activation="tanh", name="hidden")'),
    "another named layer": edit("Flatten()", 'Flatten(name="flat")'),
    "refactored layers": edit("keras.Sequential([", "keras.Sequential(list([",
                              "Dense(3),\n    ])", "Dense(3),\n    ]))"),
    "dropout before flattening": edit(  # it draws by row and element, whatever the shape
        "keras.layers.Flatten(),\n        keras.layers.Dropout(0.25, seed=1),",
        "keras.layers.Dropout(0.25, seed=1),\n        keras.layers.Flatten(),",
    ),
    "an activation as a layer": edit(DENSE, 'Dense(8),\n        keras.layers.Activation("tanh")'),
    "an activation as a function": edit('activation="tanh"', "activation=keras.activations.tanh"),
    "the loss by another spelling": edit(
        "loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)",
        "loss = keras.losses.SparseCategoricalCrossentropy(from_logits=not False)",
    ),
    "the default epsilon, written": edit(ADAM, "Adam(config.learning_rate, epsilon=1e-7)"),
    "the default beta, written": edit(ADAM, "Adam(config.learning_rate, beta_1=0.9, beta_2=0.999)"),
    "the default momentum, written": edit("BatchNormalization()", "BatchNormalization(momentum=0.99, epsilon=1e-3)"),
    "the default initializer, written": edit(DENSE, 'Dense(8, activation="tanh", kernel_initializer="glorot_uniform")'),
    "imports in another order": edit("import keras\nimport numpy as np", "import numpy as np\nimport keras"),
    "an import more": edit("import keras\n", "import keras\nimport json\n"),
    "the data copied": edit("return x,", "x = x.copy(); return x,"),
    "labels of another type": edit("draw.integers(0, 3, 96)", "draw.integers(0, 3, 96).astype('int32')"),
    "one thread": Case({}, {}, environment={"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}),
    "no oneDNN": Case({}, {}, environment={"TF_ENABLE_ONEDNN_OPTS": "0"}),
    "steps by one call": Case({}, {"steps_per_loop": "1"}),
    "more reports": Case({}, {"report_every_steps": "1"}),
    "more checkpoints": Case({}, {"checkpoint_every_steps": "1"}),
    "no TensorBoard": Case({}, {"tensorboard": "false"}),
    "evaluation in other batches": Case({}, {"evaluation_batch_size": "8"}),
    "another job directory": Case({}, {"job_dir": "elsewhere"}),
    "moved files": Case({}, {}, module="moved.here"),
}  # fmt: skip
_FROM_CHECKPOINT = Case({}, {"initial_checkpoint": "before"})
CHANGED_CHECKPOINTS = {"a bit of the checkpoint": Case({}, {"initial_checkpoint": "flipped"})}
SAME_CHECKPOINTS = {"the checkpoint, copied": Case({}, {"initial_checkpoint": "copied"})}
_VIRTUAL = Case({}, {"precision": "float32", "virtual_replicas": "4"}, environment=THREADS)
VIRTUAL = {
    "virtual replicas again": _VIRTUAL,
    "virtual replicas on 2": replace(_VIRTUAL, replicas=2),
    "virtual replicas on 4": replace(_VIRTUAL, replicas=4),
    "virtual replicas on 2 workers": replace(_VIRTUAL, workers=2),
}
# Each with the name and the run of its golden file, and the verdicts that are right.
GROUPS = (
    ("fresh", edit(), CHANGES, {CHANGED}),
    ("fresh", edit(), NO_CHANGES, {EQUAL, ROUNDING}),
    ("checkpoint", _FROM_CHECKPOINT, CHANGED_CHECKPOINTS, {CHANGED}),
    ("checkpoint", _FROM_CHECKPOINT, SAME_CHECKPOINTS, {EQUAL, ROUNDING}),
    ("virtual", _VIRTUAL, VIRTUAL, {EQUAL}),
)
LABELS = [label for *_, cases, _ in GROUPS for label in cases]
PARSER = make_parser(__doc__)
PARSER.add_argument("--cases", type=some_of(LABELS), help="default: all")
PARSER.add_argument("--folder", default="", help="keeps what is recorded (default: a temporary one)")


@contextmanager
def written(folder: Path, case: Case) -> Iterator[list[str]]:
    """Writes the edited file; yields the flags of the run."""
    source = SOURCE
    for before, after in case.edits.items():
        assert before in source, before
        source = source.replace(before, after)
    file = (folder / case.module.replace(".", "/")).with_suffix(".py")
    file.parent.mkdir(exist_ok=True)
    file.write_text(source)
    names = {"model": f"{case.module}:model", "data": f"{case.module}:data"}
    given = {**{flag.partition("=")[0][2:]: flag.partition("=")[2] for flag in FLAGS}, **names, **case.flags}
    kept = {name: os.environ.get(name) for name in case.environment or {}}
    os.environ.update(case.environment or {})
    try:
        yield [f"--{name}={value}" for name, value in given.items()]
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def outcome(folder: Path, golden_file: Path, case: Case) -> tuple[str, str]:
    """Returns the kind of the verdict and its line."""
    golden = read_golden(golden_file)
    golden.moments["4"]["losses"]["loss"] *= case.history
    with written(folder, case) as flags:
        result = measured(flags, golden.steps, case.replicas, case.workers)
    verdict = judge(golden, result)
    return verdict.kind, described([((case.replicas, case.workers), verdict)], [])


def prepare(folder: Path) -> None:
    """Trains the run from whose checkpoint all others start; writes a copy of it, and one with a bit flipped."""
    with written(folder, Case({}, {"steps": "2", "job_dir": "before"})) as flags:
        subprocess.run([sys.executable, "-m", "trainer.task", *flags], check=True, stdout=subprocess.DEVNULL)
    for name in ("copied", "flipped"):
        shutil.copytree(folder / "before", folder / name)
    checkpoint = folder / "flipped" / "checkpoints" / step_name(2)
    manifest, values = read_checkpoint(checkpoint)
    kernel = next(value for name, value in values.items() if name.startswith(WEIGHTS) and value.ndim == 4)
    kernel.view(np.uint64)[0, 0, 0, 0] ^= 1 << 40  # 2 ** -12 of its value
    shutil.rmtree(checkpoint)
    write_checkpoint(checkpoint, values, {**manifest, "files": {}})


@program
def main() -> None:
    """Prints a line for each case, and how many were missed or were false alarms; exits with 1 if any was."""
    options, wrong, count = PARSER.parse_args(), 0, 0
    with TemporaryDirectory() as scratch:
        folder = Path(options.folder or scratch).resolve()
        folder.mkdir(exist_ok=True)
        os.environ["PYTHONPATH"] = f"{folder}:{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}"
        sys.path.insert(0, str(folder))
        os.chdir(folder)
        if not (folder / "before").exists():
            prepare(folder)
        for name, first, cases, right in GROUPS:
            file = folder / f"golden-{name}.json"
            if not file.exists():
                with written(folder, first) as flags:
                    record(file, flags, resolve(flags).config)
            for label, case in cases.items():
                if options.cases and label not in options.cases:
                    continue
                began, count = time.monotonic(), count + 1
                kind, line = outcome(folder, file, case)
                wrong += kind not in right
                mark = "" if kind in right else "   WRONG"
                equal = ", equal bits" if kind == EQUAL else ""
                print(f"{label} ({time.monotonic() - began:.0f} s{equal}): {line}{mark}", flush=True)
    changes = len(CHANGES) + len(CHANGED_CHECKPOINTS)
    print(f"{wrong} of {count} verdicts are wrong ({changes} changes and {len(LABELS) - changes} others are known)")
    sys.exit(bool(wrong))
