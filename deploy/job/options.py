"""Declares the options of every job, and reads labels, variables and secrets from their texts."""

import re
from collections.abc import Mapping

from deploy.packaging.credentials import refuse_secret
from deploy.packaging.image_choice import AUTO, INSTALL, PLAIN_IMAGE
from deploy.packaging.sources import MOST_MB
from deploy.platform.gcloud_and_sdk import BACKENDS
from deploy.tiers.tier import LABEL, PRICE_LABEL
from trainer.base.errors import UserError
from trainer.base.settings.fields import Seconds, as_text, options_class, setting


def check_labels(labels: Mapping[str, str]) -> None:
    """Raises UserError for labels that Google does not take, or that `submit` sets itself."""
    for key, value in labels.items():
        label = f"{key}={value}"
        # https://docs.cloud.google.com/resource-manager/docs/labels-overview#requirements
        if not re.fullmatch(r"(?!\d|[-_])[\w-]{1,63}=[\w-]{0,63}", label) or label != label.lower():
            raise UserError(
                f"labels={as_text(labels)}: {label!r} is no label: write"
                " --labels=KEY=VALUE,KEY=VALUE, both of up to 63 small letters, digits, - and _,"
                " the key with a letter first"
            )
        if key in (LABEL, PRICE_LABEL):
            raise UserError(
                f"labels={as_text(labels)}: `submit` sets the label {key} itself: use another key"
            )


_SECRET_VERSION = re.compile(
    r"projects/[a-z0-9][a-z0-9.:-]*/secrets/[\w-]{1,255}/versions/(latest|[1-9]\d*|[A-Za-z][\w-]*)",
    re.ASCII,
)


def _check_variables(flag: str, variables: Mapping[str, str]) -> None:
    """Raises UserError for a malformed variable of --env or --secret, and for an open secret."""
    for name, value in variables.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise UserError(
                f"{flag}={name}: write --{flag}=NAME=VALUE, with a name of letters, digits and _"
            )
        if re.fullmatch(r"TF_CONFIG|CLUSTER_SPEC|(AIP|CLOUD_ML|TRAINER)_\w*", name):
            raise UserError(
                f"{flag}={name}: Vertex AI or the start of the job sets this variable: use another"
                " name"
            )
        if flag == "env":
            refuse_secret(f"env={name}", name, value)
        if flag == "secret" and not _SECRET_VERSION.fullmatch(value):
            # The value is not repeated: it may be the secret itself.
            raise UserError(
                f"secret={name}: write --secret={name}=projects/P/secrets/S/versions/V, as"
                " …/versions/latest"
            )


@options_class
class CodeOptions:
    """Holds the options that say which code of the user's runs, and what goes along with it."""

    package: str = setting(
        "", "a Python package of yours, or one .py file, to ship with the job", "PATH"
    )
    max_package_mb: int = setting(
        MOST_MB, "largest size of --package", "MB", minimum=1, maximum=100_000
    )
    include: tuple[str, ...] = setting(
        (),
        "more files that go along: of --package though git does not track them, or of a script's"
        " folder, as data/*.json",
        "GLOB",
        repeated=True,
    )
    script: str = setting(
        "",
        "a training script of yours, with its arguments after `--`: one that calls fit is trained"
        " by trainer.launch, another runs as it is; what it imports, names and opens goes along",
        "FILE",
    )
    module: str = setting(
        "",
        "the same for a module, as `python -m` takes it; its package goes along: --package, or "
        "the folder of that name here",
        "NAME",
    )
    as_is: bool = setting(False, "run --script as it is, whatever it calls")
    launch: bool = setting(
        False, "train --script by trainer.launch, even if no call of fit is seen in it"
    )
    no_check: bool = setting(
        False,
        "skip the checks on this machine: of a script up to its first fit, and the proof of a model"
        " for several GPUs",
    )
    force: bool = setting(
        False,
        "send a job that does not fit the memory by its plan, or code that needs what no package"
        " index has",
    )


@options_class
class JobOptions(CodeOptions):
    """Holds a job's options beside its tier and program, in USD and seconds.

    Its first ten, up to `secret`, change the tier's CustomJobSpec (`deploy.job.spec.machine_spec`),
    so that nobody copies its file to change a word. The last five are options of `submit`, which
    describes them; other verbs keep their defaults.
    """

    service_account: str = setting("", "the account that the jobs run as", "EMAIL")
    network: str = setting("", "projects/NUMBER/global/networks/NAME, peered", "NAME")
    spot: bool = setting(False, "on spot machines, which are cheaper and may be taken away")
    flex_start: bool = setting(
        False,
        "as FLEX_START, which waits for machines (--max_wait), and is cheaper",
    )
    timeout: Seconds | None = setting(
        None,
        "the longest time of a job, as 6h (default: the tier's)",
    )
    disk_gb: int | None = setting(
        None,
        "each machine's disk (default: the tier's)",
        "GB",
        minimum=100,
        maximum=64_000,
    )
    reservation: str = setting(
        "",
        "machines that you reserved: projects/P/zones/Z/reservations/R",
        "NAME",
    )
    web_access: bool = setting(False, "an interactive shell in each worker, whose link is printed")
    env: Mapping[str, str] = setting(
        {},
        "a variable of the job; it can be read in the job's spec",
        "NAME=VALUE",
        repeated=True,
    )
    secret: Mapping[str, str] = setting(
        {},
        "a variable that the job reads from Secret Manager at its start, as"
        " TOKEN=projects/P/secrets/S/versions/latest",
        "NAME=VERSION",
        repeated=True,
    )
    project: str = setting("", "Google Cloud project (default: gcloud's)", "ID")
    region: str = setting("", "as us-central1 (default: gcloud's ai/region)", "NAME")
    bucket: str = setting("", "where packages and job directories go", "gs://NAME[/PREFIX]")
    image: str = setting(
        "",
        f"the image that jobs run in: the URI of your own; {INSTALL}: a public Python image "
        f"({PLAIN_IMAGE}, or {INSTALL}:URI) in which TensorFlow and the packages are installed "
        f"at each start; {AUTO}: one that has what they require, which Cloud Build makes while the "
        "first such job runs (default: the tier's, else the one that `image` built in this folder, "
        f"else {INSTALL})",
        "IMAGE",
    )
    prices: str = setting("", "YAML of your own prices, in USD an hour", "FILE")
    max_cost: float | None = setting(
        None,
        "the most that a job, or each job of a comparison, may cost: it is stopped there",
        "USD",
        once=True,
        unit="USD",
        above=0,
        maximum=999_999,
    )
    max_wait: Seconds | None = setting(
        None,
        "the longest wait for machines, as 2h: then the job is cancelled, and the next tier or "
        "region tried; as FLEX_START the service ends the wait",
    )
    stop_if_idle: Seconds = setting(
        Seconds(0),
        "the job saves and ends itself when all its GPUs stay below 10 % for this time, as 30m",
    )
    stop_if_over: float = setting(
        0.0,
        "the job saves and ends itself at this multiple of its plan's upper end, in hours or"
        " USD, as 1.5",
        "FACTOR",
        minimum=1,
        maximum=999,
    )
    labels: Mapping[str, str] = setting(
        {}, "labels of the jobs, as team=vision,cost=42", "KEY=VALUE,…"
    )
    kms_key: str = setting(
        "",
        "your own key, which encrypts the jobs' disks:"
        " projects/P/locations/REGION/keyRings/…/cryptoKeys/…",
        "NAME",
    )
    backend: str = setting(
        "gcloud",
        "what creates jobs: gcloud (default), or Google's Python SDK",
        "gcloud|sdk",
        choices=tuple(BACKENDS),
    )
    plan: bool = setting(
        False,
        "first measure on this machine's CPU whether the run fits the memory, if nobody did yet",
    )
    name: str = ""
    tensorboard_instance: str = ""
    disable_retries: bool = False
    check: bool = False
    again: bool = False

    def __post_init__(self) -> None:
        """Raises UserError for flags that contradict each other, and for malformed values."""
        names = ("spot", "flex_start", "reservation")
        kinds = [f"--{name}" for name in names if getattr(self, name)]
        reserved = r"projects/[^/]+/zones/[a-z0-9-]+/reservations/[^/]+"
        if len(kinds) > 1:
            raise UserError(
                f"{' and '.join(kinds[:2])} contradict each other: a job has machines of one kind"
            )
        if self.reservation and not re.fullmatch(reserved, self.reservation):
            raise UserError(
                f"reservation={self.reservation}: write"
                " projects/PROJECT/zones/ZONE/reservations/NAME"
            )
        _check_variables("env", self.env)
        _check_variables("secret", self.secret)
        check_labels(self.labels)
