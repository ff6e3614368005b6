"""Tries the comparison before training on many models: `python -m benchmarks.proofs.replica_dependence`.

Planted dependences, recipes and examples, each in a child process, as a run starts it. A planted dependence must be
found, and nothing else may be stopped.
"""

import sys
import time
from collections.abc import Iterator
from unittest.mock import patch

from benchmarks.runner import make_parser, program
from tests.own_runs import EXAMPLES, arguments_of, recipe_flags
from tests.planted_dependences import DEPENDENT, INDEPENDENT
from trainer.base.settings.resolution import recipe_names
from trainer.run import replica_proof

PARSER = make_parser(__doc__)
PARSER.add_argument("--only", default="", help="cases whose name contains this")
LONGEST_SECONDS = 600.0  # a busy machine is no reason to compare nothing


def cases() -> Iterator[tuple[str, list[str], bool]]:
    """Yields names, flags, and whether the numbers depend on the number of replicas."""
    planted = ["--data=tests.own_data:arrays", "--global_batch_size=16", "--steps=5"]
    for name in (*DEPENDENT, *INDEPENDENT):
        yield f"planted {name}", [f"--model=tests.planted_dependences:{name}", *planted], name in DEPENDENT
    for name in EXAMPLES:
        yield f"example {name}", [*arguments_of(name), "--global_batch_size=16"], False
    for name in recipe_names():
        yield f"recipe {name}", [*recipe_flags(name), "--global_batch_size=16"], False


@program
def main() -> None:
    """Prints a line for each case, and how many were missed or stopped wrongly; exits with 1 if any was."""
    options, missed, stopped, compared = PARSER.parse_args(), 0, 0, 0
    for name, flags, depends in cases():
        if options.only not in name:
            continue
        began = time.monotonic()
        with patch.object(replica_proof, "LONGEST_SECONDS", LONGEST_SECONDS):
            proof = replica_proof.ReplicaProof(flags)
            verdict = proof.verdict()
            proof.close()
        missed += depends and verdict.agrees is not False
        stopped += not depends and verdict.agrees is False
        compared += 1
        what = "; ".join(verdict.problems) or verdict.reason or "the same numbers"
        print(f"{name} ({time.monotonic() - began:.0f} s): {what}", flush=True)
    print(f"{missed} missed, {stopped} stopped wrongly, of {compared} cases")
    sys.exit(bool(missed or stopped))
