"""Runs `vertex-trainer VERB …`, or `python -m deploy VERB …`: trains here, submits to Vertex AI,
compares tiers."""

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trainer

_PACKAGE_ROOT = Path(__file__).parents[1]
# some of Google's samples have such a package
if Path(next(iter(trainer.__path__))).parent != _PACKAGE_ROOT:
    print(
        f"error: the package trainer in {next(iter(trainer.__path__))} is not that of"
        " vertex-trainer: use the command vertex-trainer, or another folder, or remove it there",
        file=sys.stderr,
    )
    sys.exit(2)

from trainer.base.errors import (  # noqa: E402
    DONE,
    INTERRUPTED,
    USER_MUST_CHANGE,
    PlatformFault,
    UserError,
)

# Only the module of the requested verb is imported. Its `main` runs the verb, or the function of
# the verb's name if the module, named here, has several verbs; both return the exit code.
MODULES = {
    "jobs": "jobs",
    "watch": "jobs",
    "logs": "jobs",
    "cancel": "jobs",
    "report": "runs",
    "track": "runs",
    "register": "runs",
}
# verb -> its help
VERBS = {
    "local": "rehearse a job locally, in the environment of Vertex AI",
    "doctor": "see what a job would lack: login, project, APIs, roles, bucket, quota",
    "machines": "print the tiers or, with --all, the machines, with prices",
    "submit": (
        "check, package, upload and submit a job to Vertex AI, and follow it to its end; or show it"
    ),
    "image": "build your own image with Cloud Build",
    "watch": "print states and logs of a job until it ends",
    "logs": "print the log of a job so far",
    "jobs": "list the jobs that this package submitted",
    "cancel": "cancel a job, and wait until it has ended",
    "clean": "list, or remove, what ended jobs left in a bucket beside their results",
    "prices": "ask Google for the prices of a region, with its Cloud Billing Catalog",
    "bill": "print what was billed for jobs, beside what was estimated",
    "compare": "run one recipe on several tiers: time, price and quality of the same work",
    "plan": "say before you pay: does it fit each tier, how long, how much",
    "register": "make a run's model a version in Vertex AI's Model Registry",
    "predict": (
        "answer a file of rows with a registered model, as a job on a --tier; without one as"
        " trainer.predict"
    ),
    "track": "send finished runs to MLflow, Weights & Biases or Vertex AI Experiments",
    "report": "make a table, a verdict and one HTML file from job directories",
}
# verb -> the module of trainer that takes the place of this program, and its help
PROGRAMS = {
    "train": ("task", "train a model on this machine"),
    "check": ("check", "see whether a model gives the same numbers on one and on two replicas"),
    "evaluate": ("evaluate", "print loss and metrics of a run"),
    "generate": ("generate", "write images of a GAN's run"),
    "serve": ("serve", "answer requests with the model of a run"),
}
_HELP_END = r"""
To start, up to a first comparison:
  python -m deploy local cpu-2workers --recipe=wgan_gp_digits --steps=200 --job_dir=runs/two
  python -m deploy submit l4x4 --recipe=wgan_gp_photos --data=gs://BUCKET/photos \
      --bucket=gs://BUCKET --dry_run
  python -m deploy compare l4x1 l4x4 --on=vertex --recipe=wgan_gp_photos \
      --data=gs://BUCKET/photos --bucket=gs://BUCKET

TIER is the bare name of a file in job_configs/, or the path of your own file. Project and region
come from flags or from gcloud's configuration. Verbs that take a recipe also take any flag of
`python -m trainer.task`.
`python -m deploy VERB --help` lists the flags of a verb.

Exit codes:
  0   done
  2   you must change something
  75  interrupted: the same command resumes
  69  a job or a build may still be running unobserved: check before you send another
  1   a fault of this package or of the platform"""
# what other programs call these verbs
_SYNONYMS = {"status": "jobs", "list": "jobs", "stop": "cancel"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit code; an error is one line on stderr.

    Ends quietly if the program that reads its output, such as `head`, has ended.
    """
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_MUST_CHANGE
    except PlatformFault as error:
        print(f"error: {error}{error.advice}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        from trainer.base.log import forget  # imported late: it would slow down --help

        forget(sys.stdout)
        return INTERRUPTED
    except OSError as error:
        if error.filename is None:
            raise
        print(
            f"error: {error.filename}: {error.strerror}: free or repair the disk, or use another",
            file=sys.stderr,
        )
        return USER_MUST_CHANGE
    except KeyboardInterrupt as interrupt:
        if not interrupt.args:  # with arguments, the verb has already said what became of its job
            print("stopped: run the same command again to continue", file=sys.stderr)
        return INTERRUPTED
    return code


def program() -> int:
    """Runs the command line and returns its exit code.

    SIGTERM and a closed terminal interrupt it as Ctrl-C does. A Ctrl-C after the verb has finished
    is ignored, so that it does not change the exit code.
    """
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions: docs/vertex.md
        _complete()
    # Windows has no SIGHUP
    for number in {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:
        if signal.getsignal(number) is signal.SIG_DFL:  # what nohup ignores stays ignored
            signal.signal(number, signal.default_int_handler)
    if Path.cwd() != _PACKAGE_ROOT and (Path("trainer").is_dir() or Path("trainer.py").is_file()):
        print(
            "note: the package trainer of this folder is not that of vertex-trainer, and is not"
            " used",
            file=sys.stderr,
        )
        # The processes that this one starts must not import the trainer of this folder either.
        paths = [str(_PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")]), os.getcwd()]
        os.environ |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(paths)}
    code = main()
    # A Ctrl-C could interrupt Python while it ends its threads.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code


def _run(words: Sequence[str]) -> int:
    """Runs the verb in the first word and returns its exit code.

    A verb of PROGRAMS replaces this process.
    """
    if not words or words[0] in ("-h", "--help", "help"):
        verbs = [(verb, summary) for verb, (_, summary) in PROGRAMS.items()] + [*VERBS.items()]
        listed = "\n".join(f"  {verb:10} {summary}" for verb, summary in verbs)
        print(
            f"usage: vertex-trainer VERB …   (or python -m deploy VERB …)\n\n{listed}\n{_HELP_END}"
        )
        return DONE if words else USER_MUST_CHANGE
    if words == ["--version"]:
        print(f"vertex-trainer {trainer.__version__}")
        return DONE
    verb, *arguments = words
    program, _ = PROGRAMS.get(verb, ("", ""))
    if verb == "predict" and not any(
        argument.startswith(("--tier", "--help")) for argument in arguments
    ):
        program = "predict"
    if program:  # it imports TensorFlow, which this process never does
        os.execv(sys.executable, [sys.executable, "-m", f"trainer.{program}", *arguments])  # noqa: S606 (no shell)
    if verb not in VERBS:
        known = [*PROGRAMS, *VERBS]
        from trainer.base.settings.fields import nearest  # slow for a --help

        hint = f"; did you mean '{_SYNONYMS[verb]}'?" if verb in _SYNONYMS else nearest(verb, known)
        raise UserError(f"{verb}: unknown verb{hint} Known: {', '.join(known)}")
    module = importlib.import_module(f"deploy.cli.{MODULES.get(verb, verb)}")
    from deploy.api.request import split_words  # imported late: it would slow down --help
    from deploy.base.console import printed_on

    # alone on stdout: the text goes to stderr
    prints_document = {"--json", "--spec"} & {*split_words(arguments)[0]}
    with printed_on(sys.stderr if prints_document else None, command=True):
        code: int = getattr(module, f"run_{verb}" if verb in MODULES else "main")(arguments)
    return code


def _complete() -> None:
    """Prints the words that are possible at the cursor of a shell, and ends the process."""
    import argparse  # imported late: it would slow down --help

    from deploy.tiers.tier import tier_names
    from trainer.base.settings.request import recipe_names

    cli = argparse.ArgumentParser(add_help=False)
    cli.add_argument("verb", choices=[*PROGRAMS, *VERBS])
    tiers: Any = cli.add_argument("tiers", nargs="*")
    tiers.completer = lambda **_: tier_names()
    recipe: Any = cli.add_argument("--recipe")
    recipe.completer = lambda **_: recipe_names()
    importlib.import_module("argcomplete").autocomplete(cli)


if __name__ == "__main__":
    sys.exit(program())
