"""Makes a table, a verdict and one self-contained report.html from job directories."""

from collections.abc import Sequence

from deploy.api.compare import CompareOptions, read_comparison
from deploy.base.options import read_prices
from deploy.cli.parsing import parser, write_document
from deploy.report.html_page import write_report
from trainer.base.errors import DONE
from trainer.base.storage import is_remote, local_path


def main(arguments: Sequence[str]) -> int:
    """Writes the report on the given folders and returns the exit code."""
    flags = parser("report", __doc__, "DIR … [--baseline=TIER] [--price_per_hour=TIER=USD …] [--out=FOLDER]",
                   CompareOptions, "baseline", "price_per_hour")  # fmt: skip
    flags.add_argument(
        "folders", nargs="+", metavar="DIR", help="a job directory, a folder of them, or a comparison's; local or gs://"
    )
    flags.add_argument("--out", default="", metavar="FOLDER", help="folder of the report (default: the first DIR, or "
                     "runs/report if that is in a bucket)")  # fmt: skip
    args = flags.parse_args(arguments)
    beside = "runs/report" if is_remote(args.folders[0]) else args.folders[0]
    out = args.out or beside
    write_report(args.folders, out, args.baseline, read_prices(args.price_per_hour))
    report = read_comparison(local_path(out, "out"), DONE)
    write_document(args, "report", **vars(report) | {"folder": str(report.folder)})
    return DONE
