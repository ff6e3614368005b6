"""Measures this machine's GPUs in one command: `python -m benchmarks.gpu --minutes=20`.

Parts run in the order of their value, each in a process of its own with a limit; each result is written at once, and a
part that fails, hangs or is killed does not stop the next. It ends in gpu_results.md and gpu_constants.json in --out;
on a GPU they also replace docs/gpu_results.md and the constants of the plan. `--rehearse` does the same on a CPU with
tiny sizes, parts that fail included, and replaces nothing.
"""

import argparse
import importlib.util
import json
import platform
import shlex
import shutil
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.gpu import page
from benchmarks.gpu.execution import DONE, run_parts
from benchmarks.gpu.nvidia import described
from benchmarks.gpu.parts import FAULTS, PARTS
from benchmarks.runner import PACKAGES, make_parser, positive, program, some_of
from deploy.planning.gpu_constants import FILE
from trainer.base.errors import UserError
from trainer.base.storage import write_whole

PAGE = Path(__file__).parents[2] / "docs" / "gpu_results.md"
EVERY = {part.name: part for part in (*PARTS, *FAULTS)}
PARSER = make_parser(__doc__)
PARSER.formatter_class = argparse.RawDescriptionHelpFormatter
PARSER.add_argument("--minutes", type=positive, default=20.0, help="for all parts (default: %(default)s)")
PARSER.add_argument("--parts", type=some_of(EVERY), help="default: all, in the order of their value")
PARSER.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the results (default: %(default)s)")
PARSER.add_argument("--together", action="store_true", help="build parts beside each other, and measure them in turn")
PARSER.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny sizes, and parts that fail")


def _about(gpus: list[str], *, rehearsed: bool) -> dict[str, Any]:
    packages = {}
    for name in (*PACKAGES, "nvidia-nccl-cu12"):
        if importlib.util.find_spec(name.partition("-")[0]):
            try:
                packages[name] = version(name)
            except PackageNotFoundError:
                continue
    return {
        "date": time.strftime("%Y-%m-%d"), "gpus": gpus, "processor": platform.processor() or platform.machine(),
        "packages": packages, "command": shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]]),
        "rehearsed": rehearsed,
    }  # fmt: skip


@program
def main() -> None:
    """Runs the parts and writes the page; exits with 1 if a part that was begun is not done."""
    options, gpus = PARSER.parse_args(), described()
    if not gpus and not options.rehearse:
        raise UserError("this machine has no NVIDIA driver: run it on one with a GPU, or try it with --rehearse")
    names = options.parts or [part.name for part in (*PARTS, *(FAULTS if options.rehearse else ()))]
    options.out.mkdir(parents=True, exist_ok=True)
    parts, gpu_count = [EVERY[name] for name in names], len(gpus)
    outcomes = run_parts(parts, options.out, options.minutes, gpu_count, rehearse=options.rehearse,
                         together=options.together)  # fmt: skip
    about = _about(gpus, rehearsed=options.rehearse)
    source = "rehearsed on a CPU" if options.rehearse else f"measured on {gpus[0].split(',')[0]}, {about['date']}"
    write_whole(options.out / "gpu_results.md", page.page(outcomes, about))
    content = page.constants(outcomes, source)
    write_whole(options.out / FILE.name, json.dumps(content, indent=1) + "\n")
    if not options.rehearse:
        shutil.copyfile(options.out / "gpu_results.md", PAGE)
        shutil.copyfile(options.out / FILE.name, FILE)
    print(f"{page.summary(outcomes)}; see {options.out / 'gpu_results.md'}")
    expected = [name for name in outcomes if not name.startswith("fault_")]
    sys.exit(any(outcomes[name].state != DONE and outcomes[name].seconds for name in expected))
