"""Changes a tier by flags, so that nobody copies its file for a word, and checks a job's labels, variables and key."""

import copy
import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from deploy.tiers.spec_rules import check_shape
from trainer.base.errors import UserError

# Labels that `submit` sets: the value of the first is unique to an attempt.
LABEL, PRICE_LABEL = "submission", "usd-per-hour"
FLEX_START = {"maxWaitDuration": "14400s"}  # of --flex_start without --max_wait, in a tier that says nothing
SECRETS = "TRAINER_SECRETS"  # a job's variable: JSON of the names of secrets, by variable, which its starter reads


@dataclasses.dataclass(frozen=True)
class SpecChanges:
    """Holds what flags change in a CustomJobSpec; each field has the name of its flag. `timeout`: in seconds.

    `env`: variables of the workers; `secret`: names of versions of secrets, by the variable that gets the value.
    """

    service_account: str = ""
    network: str = ""
    spot: bool = False
    flex_start: bool = False
    timeout: float | None = None
    disk_gb: int | None = None
    reservation: str = ""
    web_access: bool = False
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    secret: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def applied(self, spec: Mapping[str, Any], name: str) -> tuple[dict[str, Any], str]:
        """Returns a changed copy of `spec`, and `name` with the flags that changed it, for messages."""
        flags = [f"--{field.name}" for field in dataclasses.fields(self) if getattr(self, field.name)]
        if not flags:
            return dict(spec), name
        check_shape(spec, name)
        changed = copy.deepcopy(dict(spec))
        values = {"serviceAccount": self.service_account, "network": self.network, "enableWebAccess": self.web_access}
        changed |= {key: value for key, value in values.items() if value}
        scheduling = dict(changed.get("scheduling", {}))
        if self.spot:
            scheduling.pop("maxWaitDuration", None)
        scheduling |= {"strategy": "SPOT"} if self.spot else {}
        scheduling = {**FLEX_START, **scheduling, "strategy": "FLEX_START"} if self.flex_start else scheduling
        scheduling |= {"timeout": f"{math.ceil(self.timeout)}s"} if self.timeout else {}
        changed |= {"scheduling": scheduling} if scheduling else {}
        variables = {**self.env, **({SECRETS: json.dumps(self.secret)} if self.secret else {})}
        for pool in changed.get("workerPoolSpecs", []):
            if self.disk_gb:
                pool["diskSpec"] = {**pool.get("diskSpec", {}), "bootDiskSizeGb": self.disk_gb}
            if self.reservation:
                pool["machineSpec"]["reservationAffinity"] = {
                    "reservationAffinityType": "SPECIFIC_RESERVATION",
                    "key": "compute.googleapis.com/reservation-name", "values": [self.reservation],
                }  # fmt: skip
            for task in (pool.get("pythonPackageSpec"), pool.get("containerSpec")):
                if task is not None and variables:
                    unchanged = [variable for variable in task.get("env", []) if variable["name"] not in variables]
                    task["env"] = [*unchanged, *({"name": key, "value": value} for key, value in variables.items())]
        return changed, f"{name} with {' '.join(flags)}"


NO_CHANGES = SpecChanges()
# https://docs.cloud.google.com/resource-manager/docs/labels-overview#requirements
_LABEL = re.compile(r"(?!\d|[-_])[\w-]{1,63}=[\w-]{0,63}")


def read_labels(text: str) -> dict[str, str]:
    """Returns "team=vision,cost=42" as a dictionary. Raises UserError for what Vertex AI does not take as labels."""
    labels: dict[str, str] = {}
    for label in text.split(",") if text else ():
        if not _LABEL.fullmatch(label) or label != label.lower():
            raise UserError(
                f"labels={text}: {label!r} is no label: write --labels=KEY=VALUE,KEY=VALUE, both of up to 63 small "
                "letters, digits, - and _, the key with a letter first"
            )
        key, _, value = label.partition("=")
        if key in (LABEL, PRICE_LABEL):
            raise UserError(f"labels={text}: `submit` sets the label {key} itself, to find the job: use another key")
        if labels.setdefault(key, value) != value:
            raise UserError(f"labels={text}: {key} has two values: keep one of them")
    return labels


# Names that Vertex AI or the start of a job sets, and names of what nobody wants to read in a job's spec.
_SET = re.compile(r"TF_CONFIG|CLUSTER_SPEC|(AIP|CLOUD_ML|TRAINER)_\w*")
_CONFIDENTIAL = re.compile(
    r"(^|_)(SECRET|PASSWORD|PASSWD|PASSPHRASE|TOKEN|CREDENTIALS?|(API|PRIVATE|ACCESS|SECRET)_?KEY)(_|$)", re.IGNORECASE
)
_VERSION = re.compile(
    r"projects/[a-z0-9][a-z0-9.:-]*/secrets/[\w-]{1,255}/versions/(latest|[1-9]\d*|[A-Za-z][\w-]*)", re.ASCII
)


def read_variables(texts: Sequence[str]) -> dict[str, str]:
    """Returns ["MODE=fast"] as a dictionary. Raises UserError for what is no variable, and for a secret by its name."""
    variables = _read_pairs("env", texts)
    for name in variables:
        if _CONFIDENTIAL.search(name):
            raise UserError(
                f"env={name}: this would stand in the job's spec, which all who see the job can read: store it "
                f"in Secret Manager, and use --secret={name}=projects/P/secrets/S/versions/latest"
            )
    return variables


def read_secrets(texts: Sequence[str]) -> dict[str, str]:
    """Returns ["TOKEN=projects/P/secrets/S/versions/V"] as a dictionary. Raises UserError for anything else."""
    secrets = _read_pairs("secret", texts)
    for name, version in secrets.items():
        if not _VERSION.fullmatch(version):  # the text is not repeated: it may be the secret itself
            raise UserError(
                f"secret={name}: write --secret={name}=projects/P/secrets/S/versions/V, as …/versions/latest"
            )
    return secrets


def _read_pairs(flag: str, texts: Sequence[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise UserError(f"{flag}={name}: write --{flag}=NAME=VALUE, with a name of letters, digits and _")
        if _SET.fullmatch(name):
            raise UserError(f"{flag}={name}: Vertex AI or the start of the job sets this variable: use another name")
        if pairs.setdefault(name, value) != value:
            raise UserError(f"{flag}={name}: it has two values: keep one of them")
    return pairs
