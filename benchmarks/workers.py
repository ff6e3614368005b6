"""Two workers of one core each, against two processes that do the same work without talking, one worker alone, two
replicas in one process, and PyTorch's DistributedDataParallel: `python -m benchmarks.workers [--scaling=weak]`.

torch.nn.DataParallel has no counterpart here: it splits a batch over GPUs only, on CPUs it runs the module as it is.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.digits import images_a_step, on_digits
from benchmarks.measure import alternate, base_parser, counts, keep, possible, ratios, run_main, some_of, table
from benchmarks.turns import Contender, started

CASES = {"wgan_gp": ["--recipe=wgan_gp_mnist"], "dcgan": ["--recipe=dcgan_mnist"]}
OURS, SILENT, ALONE = "2 workers", "2 silent processes", "1 worker"


def makers(flags: Sequence[str], batch: int, scaling: str, images_a_row: int) -> dict[str, Callable[[], Contender]]:
    """The contenders at the global batch `batch`.

    One worker alone has the same global batch where the scaling is strong, and the rows of one of two where it is weak.
    """

    def contender(what: str, rows: int, workers: int, *own: str, joined: bool = False, copies: int = 1) -> Contender:
        given = [*flags, f"--global_batch_size={rows}", *own]
        return Contender(what, given, rows * copies * images_a_row, workers, joined=joined)

    alone = batch if scaling == "strong" else batch // 2
    pytorch = "pytorch:channels_last"
    return {
        OURS: partial(contender, "ours", batch, 2, "--sync_batch_norm=false", joined=True),
        SILENT: partial(contender, "ours", batch // 2, 2, copies=2),
        ALONE: partial(contender, "ours", alone, 1),
        "2 workers, batch norm synchronised": partial(contender, "ours", batch, 2, joined=True),
        "2 replicas in one process": partial(contender, "ours", batch, 0, "--replicas=2", "--sync_batch_norm=false"),
        "PyTorch DDP (gloo)": partial(contender, pytorch, batch, 2, joined=True),
        "2 silent PyTorch processes": partial(contender, pytorch, batch // 2, 2, copies=2),
        "1 PyTorch worker": partial(contender, pytorch, alone, 1),
    }


def measure(model: str, batch: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """images/s of every contender, in turn."""
    with on_digits(CASES[model]) as (config, flags):
        images_a_row = images_a_step(config) // config.global_batch_size
        with started(possible(makers(flags, batch, options.scaling, images_a_row)), options.seconds) as contenders:
            assert all(contender.work == contenders[OURS].work for contender in contenders.values())
            return alternate(contenders, options.repeats)


def ratio(found: dict[str, list[float]], against: str) -> float:
    """Of two workers' images/s, within each round."""
    return statistics.median(ratios(found, OURS, against))


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = base_parser(__doc__, repeats=5, seconds=3.0)
    parser.add_argument("--models", type=some_of(CASES), default=",".join(CASES), help="default: %(default)s")
    parser.add_argument(
        "--batches", type=counts, default="64,256,1024", help="global batch sizes; of one worker where weak"
    )
    parser.add_argument("--scaling", choices=("strong", "weak"), default="strong", help="what one worker alone does")
    return parser


def main() -> None:
    """Prints the tables and keeps the raw numbers."""
    options = make_parser().parse_args()
    kept = "workers" if options.scaling == "strong" else "workers_weak"
    command = " ".join(["python -m benchmarks.workers", *sys.argv[1:]])
    raw, began = {}, time.monotonic()
    for model in options.models:
        for given in options.batches:
            batch = given * (2 if options.scaling == "weak" else 1)
            title = f"{model} 32x32, global batch {batch}, {options.scaling} scaling"
            raw[title] = found = measure(model, batch, options)
            print("\n".join([f"\n{title}", "", *table(found, OURS, "images/s")]))
            print(f"{ratio(found, SILENT):.2f} of the limit; {ratio(found, ALONE):.2f} times one worker", flush=True)
            took = round(time.monotonic() - began)
            keep(kept, {"command": command, "images_per_second": raw, "seconds": took})


if __name__ == "__main__":
    run_main(main)
