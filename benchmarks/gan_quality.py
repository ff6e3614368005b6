"""Compares GANs by FID and coverage after equal processor time: `python -m benchmarks.gan_quality
[--fashion=FOLDER]`.

Each model trains on each data, once a seed, for --minutes of processor time of its own steps, over
all cores: what else runs on the machine changes that little. At --points moments, equally far
apart, as many generated images as real ones are compared with all of the training data.
fashion_tenth trains on a tenth of the examples and is compared with all of them. Features are those
of classifiers that are trained first. Run again, it repeats no run that is done: each has a file in
--out, and a grid of its images. Cases without their data are left out.
"""

import multiprocessing
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.runner import count, make_parser, positive, print_table, program, save, some_of
from benchmarks.trainer_loop import TrainingLoop, setup_of
from trainer.base.errors import PlatformFault
from trainer.base.run_files.job_files import read_json, write_json
from trainer.base.settings.model_settings import DIFF_AUGMENTATIONS
from trainer.base.settings.request import Overrides
from trainer.base.storage import write_whole
from trainer.data.dataset import Examples
from trainer.data.order import shuffled
from trainer.data.sample_grids import encode_png, grid, noise
from trainer.data.sources import load_dataset
from trainer.measures.fid import Fid

SIZES = {
    "digits": ["--image_size=16", "--channels=1"],
    "fashion": ["--image_size=32", "--channels=1"],
    "photos": ["--image_size=32", "--channels=3"],
}
CLASSIFIERS = {
    "digits": ["--recipe=cnn_mnist", "--width=32", "--epochs=20"],
    "fashion": ["--recipe=cnn_fashion", "--width=32"],
    "photos": [
        "--recipe=cnn_fashion",
        "--width=32",
        "--epochs=40",
        "--augment=flip,crop",
        *SIZES["photos"],
    ],
}
MODELS = {
    "wgan_gp": ["--model=wgan_gp", "--critic_steps=5"],
    "dcgan": ["--model=dcgan"],
    "r3gan": ["--model=r3gan", "--gradient_penalty_weight=1"],
}
COMMON = [
    "--width=16",
    "--global_batch_size=64",
    "--learning_rate=2e-4",
    "--replicas=1",
    "--jit_compile=false",
]
AUGMENTED = "+diff_augment"
TENTH = "fashion_tenth"
# Data and model, as fashion_tenth/wgan_gp+diff_augment.
CASES = [
    f"{data}/{model}{more}"
    for data in (*SIZES, TENTH)
    for model in MODELS
    for more in ("", AUGMENTED)
]
DEFAULT = [case for case in CASES if case.startswith(TENTH) or AUGMENTED not in case]
Curve = list[dict[str, float]]  # of one run: processor seconds, steps and metrics at each point

PARSER = make_parser(__doc__)
PARSER.add_argument(
    "--cases", type=some_of(CASES), default=DEFAULT, help=f"default: {','.join(DEFAULT)}"
)
PARSER.add_argument(
    "--seeds", type=lambda text: [int(one) for one in text.split(",")], default=[1, 2, 3]
)
PARSER.add_argument(
    "--minutes",
    type=positive,
    default=10.0,
    help="of processor time of each run, default %(default)s",
)
PARSER.add_argument(
    "--points", type=count, default=5, help="comparisons in a run, default %(default)s"
)
PARSER.add_argument(
    "--samples", type=count, default=5000, help="images to compare, default %(default)s"
)
PARSER.add_argument("--fashion", default="", help="folder with the four idx files of Fashion-MNIST")
PARSER.add_argument("--photos", default="", help="folder of colour photos, in class folders")
PARSER.add_argument(
    "--out", type=Path, default=Path("runs/gan_quality"), help="default %(default)s"
)


def flags_of(case: str, seed: int, options: Namespace) -> list[str]:
    """Returns the settings of a run."""
    data, _, name = case.partition("/")
    model, augmented, _ = name.partition(AUGMENTED)
    more = [f"--diff_augment={','.join(DIFF_AUGMENTATIONS)}"] if augmented else []
    whole = whole_of(data)
    return [
        *COMMON,
        *SIZES[whole],
        *MODELS[model],
        *more,
        f"--data={source_of(data, options)}",
        f"--seed={seed}",
    ]


def whole_of(data: str) -> str:
    """Returns the name of the data with whose examples the images are compared."""
    return "fashion" if data == TENTH else data


def source_of(data: str, options: Namespace) -> str:
    """Returns the path or name of the data; "" if it was not given."""
    tenth = options.out / f"{TENTH}.npz" if options.fashion else ""
    return str(
        {"digits": "digits", "fashion": options.fashion, "photos": options.photos, TENTH: tenth}[
            data
        ]
    )


def write_tenth(options: Namespace) -> None:
    """Writes a tenth of the training images of Fashion-MNIST."""
    images = examples_of("fashion", options)
    rows = np.sort(shuffled(np.arange(images.count // 10), images.count, 0, TENTH))
    np.savez(source_of(TENTH, options), images=images.gather(tf.constant(rows))[0].numpy())


def classifier(data: str, options: Namespace) -> Path:
    """Returns the saved classifier whose features measure these data; trains it if it is not
    there."""
    job_dir = options.out / "features" / data
    file: Path = job_dir / "model" / "model.keras"
    if not file.exists():
        flags = [*CLASSIFIERS[data], f"--data={source_of(data, options)}", f"--job_dir={job_dir}"]
        subprocess.run([sys.executable, "-m", "trainer.task", *flags], check=True)
    return file


def measure(case: str, seed: int, options: Namespace) -> None:
    """Trains one run and measures it at each point; writes its curve and a grid of its images."""
    whole = whole_of(case.partition("/")[0])
    flags = flags_of(case, seed, options)
    setup = setup_of(
        *flags, f"--fid_features={classifier(whole, options)}", f"--fid_samples={options.samples}"
    )
    fid = Fid(setup.config, setup.model, examples_of(whole, options), setup.replicas)
    loop = TrainingLoop(setup)
    spent = 0.0
    curve = Curve()
    loop(1)  # traces
    step_seconds = processor_seconds(loop, 1)
    for point in range(1, options.points + 1):
        while (left := 60 * options.minutes * point / options.points - spent) > 0:
            steps = max(1, round(min(left, 10.0) / step_seconds))
            taken = processor_seconds(loop, steps)
            spent = spent + taken
            step_seconds = taken / steps
        curve.append({"seconds": spent, "steps": loop.step, **fid()})
        print(
            case,
            f"seed {seed}",
            *(f"{name} {value:.4g}" for name, value in curve[-1].items()),
            flush=True,
        )
    pictures = setup.model.sample(noise(0, 64, setup.model.latent_dim))
    name = result_file(case, seed, options)
    write_whole(name.with_suffix(".png"), encode_png(grid(pictures)))
    write_json(name, {"settings": flags, "measured_by": fid.about, "curve": curve})


def processor_seconds(loop: TrainingLoop, steps: int) -> float:
    """Runs the steps and returns the processor time that they take."""
    began = time.process_time()
    loop(steps)
    return time.process_time() - began


def examples_of(data: str, options: Namespace) -> Examples:
    """Returns the real images with which generated ones are compared."""
    return load_dataset(
        Overrides.parse([*SIZES[data], f"--data={source_of(data, options)}"]).config
    ).images("train")


def result_file(case: str, seed: int, options: Namespace) -> Path:
    """Returns the file of a run, with the lengths of the run in its name."""
    lengths = f"{options.minutes:g}min-{options.points}x{options.samples}"
    return Path(options.out, f"{case.replace('/', '-')}-{lengths}-{seed}.json")


def done(case: str, seed: int, options: Namespace) -> dict[str, Any]:
    """Returns what a run with these settings wrote; {} if there was none."""
    content, _ = read_json(result_file(case, seed, options))
    return content if content.get("settings") == flags_of(case, seed, options) else {}


def run(case: str, seed: int, options: Namespace) -> dict[str, Any]:
    """Returns what a run wrote; makes it, in a process of its own, if there was none."""
    if not done(case, seed, options):
        process = multiprocessing.get_context("spawn").Process(
            target=measure, args=(case, seed, options)
        )
        process.start()
        process.join()
        if process.exitcode:
            raise PlatformFault(
                f"{case}, seed {seed}: ended with exit code {process.exitcode}: run the command"
                " again"
            )
    return done(case, seed, options)


def table(curves: Mapping[str, Sequence[Curve]], metric: str) -> list[str]:
    """Returns Markdown: the median of each case over its seeds at each point, with the lowest and
    the highest."""
    first = next(iter(curves.values()))[0]
    lines = [
        "| | " + " | ".join(f"{point['seconds'] / 60:.3g} min" for point in first) + " | steps |",
        "|---|" + "--:|" * (len(first) + 1),
    ]
    for case, runs in curves.items():
        cells = []
        for points in zip(*runs, strict=True):
            values = [point[metric] for point in points]
            cells.append(f"{statistics.median(values):.3g} ({min(values):.3g} - {max(values):.3g})")
        cells.append(f"{statistics.median(run[-1]['steps'] for run in runs):,.0f}")
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return lines


@program
def main() -> None:
    """Makes the runs that are missing, seed by seed; then prints two tables and saves all
    curves."""
    options = PARSER.parse_args()
    cases = [case for case in options.cases if source_of(case.partition("/")[0], options)]
    if not cases:
        PARSER.error(
            f"no data for {','.join(options.cases)}: add --fashion=FOLDER or --photos=FOLDER"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    if any(case.startswith(TENTH) for case in cases):
        write_tenth(options)
    runs: dict[str, list[dict[str, Any]]] = {case: [] for case in cases}
    for seed in options.seeds:
        for case in cases:
            runs[case].append(run(case, seed, options))
    curves = {case: [each["curve"] for each in made] for case, made in runs.items()}
    measured_by = {case: made[0]["measured_by"] for case, made in runs.items()}
    name = f"gan_quality_{options.minutes:g}min"
    save(name, minutes=options.minutes, seeds=options.seeds, measured_by=measured_by, curves=curves)
    for metric in ("fid", "coverage"):
        print_table(
            f"{metric}, median (lowest - highest) of {len(options.seeds)} seeds",
            table(curves, metric),
        )
