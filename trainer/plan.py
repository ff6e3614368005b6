"""Measures on this CPU what a step of a run needs: `python -m trainer.plan --recipe=NAME
--out=plan.json [any flag]`.

It runs a few steps with 8, 16 and 32 rows of the data, reads TensorFlow's own trace of its
allocations, and counts FLOPs and bytes in the graph. plan.json then says for any batch what a GPU
would have to hold and to compute; `python -m deploy plan` turns it into hours and USD of each tier.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.base.errors import DONE
from trainer.base.log import log, set_verbose
from trainer.base.run_files.plan_file import kept_plan, write_plan
from trainer.base.settings.fields import VERBOSE, Usage, options_class, setting
from trainer.base.settings.own_settings import refuse_missing_modules
from trainer.base.settings.request import parse_request
from trainer.base.settings.train_config import USUAL
from trainer.base.storage import local_path
from trainer.user_code.command import command, quiet_start

_EPILOG = """\
All settings but the first group are those of python -m trainer.task.

Exit codes: 0 the plan is made; 2 you must change something; 1 a fault of this package or of the
platform."""
USAGE = Usage(
    "python -m trainer.plan",
    "--recipe=NAME [--out=FILE] [--setting=value …]",
    __doc__,
    _EPILOG,
    ("out", *USUAL),
)
# TensorFlow on the CPU then uses the GPU's allocator, and runs one operation at a time, so that two
# runs agree.
ENVIRONMENT = {
    "TF_CPU_ALLOCATOR_USE_BFC": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "-1",
}


@options_class
class PlanFlags:
    """Holds the flags of `trainer.plan` that are not settings of a run."""

    out: str = setting(
        "",
        "the plan (default: a file in the cache, which `deploy` then finds)",
        group="plan",
        metavar="FILE",
    )
    verbose: bool = VERBOSE


@command("starts from scratch")
def main(arguments: Sequence[str]) -> int:
    """Measures the run, writes its plan, and returns the exit code."""
    options, overrides = parse_request(PlanFlags, arguments, USAGE)
    set_verbose(options.verbose)
    config = overrides.config
    refuse_missing_modules(config)
    out = local_path(options.out, "out") if options.out else kept_plan(config)
    os.environ.update(ENVIRONMENT)
    with quiet_start():
        from trainer.planning.planner import make_plan
    # what was measured before an interruption, and is not measured again
    parts = kept_plan(config).with_suffix("")
    plan = make_plan(config, parts)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    write_plan(out, plan)
    shutil.rmtree(parts, ignore_errors=True)
    log.info(f"the plan is in {out}")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
