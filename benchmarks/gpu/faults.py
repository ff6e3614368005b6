"""Fails as a part may on a real machine, for rehearsals: `python -m benchmarks.gpu.faults --kind=hangs`."""

import argparse
import os
import signal
import time

import numpy as np

from benchmarks.gpu.execution import Results


def main() -> None:
    """Keeps one number, then hangs, is killed or asks for more memory than there is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=("hangs", "killed", "memory"), required=True)
    kind = parser.parse_args().kind
    Results().keep(before=1)
    if kind == "hangs":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a process within an NCCL call
        time.sleep(600)
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    np.ones(2**50)


if __name__ == "__main__":
    main()
