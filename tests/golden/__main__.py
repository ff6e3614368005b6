"""Records the golden files of this project: `python -m tests.golden [NAME …]`."""

import sys

from tests.golden import FOLDER, RUNS
from trainer import golden

if __name__ == "__main__":
    for name in sys.argv[1:] or RUNS:
        code = golden.main(["record", *RUNS[name], f"--out={FOLDER / f'{name}.json'}"])
        if code:
            sys.exit(code)
