"""`python -m deploy VERB …`: rehearse a job on this machine, submit it to Vertex AI, compare tiers."""

import importlib
import sys
from collections.abc import Sequence

from trainer.config.fields import nearest
from trainer.errors import DONE, FAULT, INTERRUPTED, USER_MUST_CHANGE, PlatformFault, UserError

# verb -> its module, whose `main(arguments)` returns the exit code, and what it does. Only the module asked for is
# imported. A verb is listed once it works.
VERBS: dict[str, tuple[str, str]] = {
    "local": ("deploy.cli.local", "rehearse a job on this machine, in the environment that Vertex AI gives"),
    "machines": ("deploy.cli.machines", "the table of machines, accelerators and prices"),
    "render": ("deploy.cli.render", "the full job spec of a tier and the trainer's flags, as gcloud takes it"),
    "submit": ("deploy.cli.submit", "check, package, upload, submit to Vertex AI, follow to the end"),
    "package": ("deploy.cli.package", "build the trainer's wheel and store it in a bucket"),
    "image": ("deploy.cli.image", "build your own image with Cloud Build"),
    "watch": ("deploy.cli.watch", "states and logs of a job until it ends"),
    "jobs": ("deploy.cli.jobs", "the jobs that this package submitted"),
    "cancel": ("deploy.cli.cancel", "cancel a job, and see that it is over"),
    "compare": ("deploy.cli.compare", "one recipe on several tiers: time, price and quality of the same work"),
    "estimate": ("deploy.cli.estimate", "hours and money of a full job on each tier, from a short run"),
    "report": ("deploy.cli.report", "table, verdict and one HTML file from job directories"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit code; what the user or the platform did wrong is one line on stderr."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help", "help"):
        print(_help())
        return DONE if given else USER_MUST_CHANGE
    try:
        return _run(given[0], given[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_MUST_CHANGE
    except PlatformFault as error:
        print(f"error: {error}: give the same command again later", file=sys.stderr)
        return FAULT
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}: free or mend the disk, or work elsewhere", file=sys.stderr)
        return USER_MUST_CHANGE
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED


def _run(verb: str, arguments: Sequence[str]) -> int:
    if verb not in VERBS:
        raise UserError(f"{verb}: no such verb{nearest(verb, VERBS)} Known: {', '.join(VERBS)}")
    module = importlib.import_module(VERBS[verb][0])
    from deploy.cli.arguments import refuse_empty  # not for --help, which it would slow down

    refuse_empty(arguments)
    code: int = module.main(arguments)
    return code


_REST = """
Start with, from nothing to a comparison:
  python -m deploy local cpu-2workers --recipe=wgan_gp_digits --steps=200 --job_dir=runs/two
  python -m deploy submit l4x4 --recipe=wgan_gp_photos --data=gs://BUCKET/photos --bucket=gs://BUCKET --dry_run
  python -m deploy compare l4x1 l4x4 --on=vertex --recipe=wgan_gp_photos --data=gs://BUCKET/photos --bucket=gs://BUCKET

A TIER is a file of job_configs/ by its bare name, or a file of yours. Project and region come from flags, or from
gcloud's configuration. A verb that takes a recipe takes any flag of `python -m trainer.task` too.
`python -m deploy VERB --help` lists the flags of a verb.

Exit codes:
  0   done
  2   you must change something
  75  interrupted: the same command again goes on
  69  a job may go on that cannot be seen now (submit, watch): look before you submit again
  1   a fault of ours or of the platform"""


def _help() -> str:
    verbs = "\n".join(f"  {verb:10} {summary}" for verb, (_, summary) in VERBS.items())
    return f"usage: python -m deploy VERB …\n\n{verbs}\n{_REST}"


if __name__ == "__main__":
    sys.exit(main())
