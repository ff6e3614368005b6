"""Measures two workers of one core each against two independent processes that do the same work,
one worker alone and
PyTorch's DistributedDataParallel: `python -m benchmarks.workers [--scaling=weak]`.

torch.nn.DataParallel has no counterpart: it splits a batch over GPUs only, on CPUs it runs the
module unchanged.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks import runner
from benchmarks.processes import Candidate, digits_file, images_per_step, started
from benchmarks.runner import (
    alternate,
    counts,
    make_parser,
    possible,
    print_table,
    program,
    ratios,
    save,
    table,
)

CASES = {"wgan_gp": ["--recipe=wgan_gp_mnist"], "dcgan": ["--recipe=dcgan_mnist"]}
OURS = "2 workers"
INDEPENDENT = "2 independent processes"
ALONE = "1 worker"
OWN_ROWS = "2 workers, each normalises its own rows"

PARSER = make_parser(__doc__, repeats=5, seconds=3.0)
PARSER.add_argument(
    "--models", type=runner.some_of(CASES), default=",".join(CASES), help="default: %(default)s"
)
PARSER.add_argument(
    "--batches",
    type=counts,
    default="64,256,1024",
    help="global batch sizes; with weak scaling, of one worker",
)
PARSER.add_argument(
    "--scaling",
    choices=("strong", "weak"),
    default="strong",
    help="one worker alone has the global batch (strong) or half of it (weak)",
)


def makers(
    flags: Sequence[str], batch: int, scaling: str, images_per_row: int
) -> dict[str, Callable[[], Candidate]]:
    """Returns the makers of the candidates at the global batch size `batch`."""

    def make(
        name: str, rows: int, workers: int, *own: str, joined: bool = False, copies: int = 1
    ) -> Candidate:
        images = rows * copies * images_per_row
        return Candidate(
            name, [*flags, f"--global_batch_size={rows}", *own], images, workers, joined=joined
        )

    alone = batch if scaling == "strong" else batch // 2
    ours = "trainer_loop"
    pytorch = "pytorch:channels_last"
    return {
        OURS: partial(make, ours, batch, 2, joined=True),
        OWN_ROWS: partial(make, ours, batch, 2, "--sync_batch_norm=false", joined=True),
        INDEPENDENT: partial(make, ours, batch // 2, 2, copies=2),
        ALONE: partial(make, ours, alone, 1),
        "PyTorch DDP (gloo)": partial(make, pytorch, batch, 2, joined=True),
        "2 independent PyTorch processes": partial(make, pytorch, batch // 2, 2, copies=2),
        "1 PyTorch worker": partial(make, pytorch, alone, 1),
    }


@program
def main() -> None:
    """Prints the tables and saves the raw numbers."""
    options = PARSER.parse_args()
    raw = {}
    weak = options.scaling == "weak"
    for model in options.models:
        for batch in (size * (1 + weak) for size in options.batches):
            title = f"{model} 32x32, global batch {batch}, {options.scaling} scaling"
            with digits_file(CASES[model]) as (config, flags):
                images_per_row = images_per_step(config) // config.global_batch_size
                contest = possible(makers(flags, batch, options.scaling, images_per_row))
                with started(contest, options.seconds) as candidates:
                    raw[title] = found = alternate(candidates, options.repeats)
            print_table(title, table(found, "images/s"))
            for name in (OURS, OWN_ROWS):
                limit, alone = (
                    statistics.median(ratios(found, name, peer)) for peer in (INDEPENDENT, ALONE)
                )
                print(f"{name}: {limit:.2f} of the limit; {alone:.2f} times one worker", flush=True)
            save("workers_weak" if weak else "workers", images_per_second=raw)
