"""One process of `benchmarks.workers`: reads a number of steps a line, and answers with the seconds that they took."""

import sys
import time
from collections.abc import Callable


def ours(batch: int, flags: list[str], *, silent: bool = False) -> Callable[[int], None]:
    """wgan_gp of this project: on the cluster of TF_CONFIG, or alone with half of the batch."""
    from trainer.assembly import assemble
    from trainer.cluster import Cluster, read_cluster
    from trainer.config import resolve
    from trainer.distribution.strategy import make_replicas

    rows = batch // 2 if silent else batch
    config = resolve(["--image_size=32", "--width=32", f"--global_batch_size={rows}", *flags]).config
    assembly = assemble(config, make_replicas(config, Cluster() if silent else read_cluster()))
    iterator, run_steps, position = assembly.rows_from(0), assembly.step_runner(), 0

    def run(steps: int) -> None:
        nonlocal position
        run_steps(iterator, position, steps)
        position += steps

    return run


def main() -> None:
    """`python -m benchmarks.worker CONTENDER BATCH [flags]`"""
    contender, batch, flags = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    if contender in ("ours", "silent"):
        run = ours(batch, flags, silent=contender == "silent")
    else:
        from benchmarks.ddp import wgan_gp

        run = wgan_gp(batch, silent=contender == "ddp-silent")
    for line in sys.stdin:
        began = time.perf_counter()
        run(int(line))
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main()
