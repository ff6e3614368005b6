"""Measures on this CPU what a step of a run needs: `python -m trainer.plan --recipe=NAME --out=plan.json [any flag]`.

It runs a few steps with 8, 16 and 32 rows of the data, reads TensorFlow's own trace of its allocations, and counts
FLOPs and bytes in the graph. plan.json then says for any batch what a GPU would have to hold and to compute;
`python -m deploy plan` turns it into hours and USD of each tier.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.base.errors import DONE
from trainer.base.log import log, set_verbose
from trainer.base.run_files.plan_file import kept_plan, write_plan
from trainer.base.settings.fields import Parser
from trainer.base.settings.own_settings import refuse_missing_modules
from trainer.base.settings.resolution import Command, resolve
from trainer.base.storage import local_path
from trainer.user_code.command import command, quiet_start

_USAGE = "%(prog)s --recipe=NAME [--out=FILE] [--setting=value …]"
_EPILOG = """\
All settings but the first group are those of python -m trainer.task.

Exit codes: 0 the plan is made; 2 you must change something; 1 a fault of this package or of the platform."""
# TensorFlow on the CPU then uses the GPU's allocator, and runs one operation at a time, so that two runs agree.
ENVIRONMENT = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_NUM_INTEROP_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"}


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, Command]:
    """Returns the command's own flags, and the settings. Raises UserError for a mistake, SystemExit(0) for --help."""
    own = Parser(prog="python -m trainer.plan", add_help=False)
    flags = own.add_argument_group("plan")
    flags.add_argument("--out", default="", metavar="FILE", help="the plan (default: a file in the cache, which "
                       "`deploy` then finds)")  # fmt: skip
    options, settings = own.parse_known_args(arguments)
    return options, resolve(settings, prog=own.prog, usage=_USAGE, description=__doc__, epilog=_EPILOG, parents=[own])


@command("starts from scratch")
def main(arguments: Sequence[str]) -> int:
    """Measures the run, writes its plan, and returns the exit code."""
    own, request = parse(arguments)
    set_verbose(request.verbose)
    config = request.config
    refuse_missing_modules(config)
    out = local_path(own.out, "out") if own.out else kept_plan(config)
    os.environ.update(ENVIRONMENT)
    with quiet_start():
        from trainer.planning.planner import make_plan
    plan = make_plan(config)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    write_plan(out, plan)
    log.info(f"the plan is in {out}")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
