"""Changes a tier by flags, so that nobody copies its file for a word, and checks a job's labels and key."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from deploy.tiers.spec_rules import check_format, check_same_region
from trainer.base.errors import UserError

MOST_LABELS = 62  # of 64, because `submit` adds two
LABEL, PRICE_LABEL = "submission", "usd-per-hour"  # which `submit` sets; the value of the first is unique to an attempt


@dataclasses.dataclass(frozen=True)
class SpecChanges:
    """Holds what flags change in a CustomJobSpec. `flex_start_s`: FLEX_START, and its longest wait for machines."""

    service_account: str = ""
    network: str = ""
    spot: bool = False
    flex_start_s: float | None = None

    def applied(self, spec: Mapping[str, Any], name: str) -> tuple[dict[str, Any], str]:
        """Returns a changed copy of `spec`, and `name` with the flags that changed it, for messages."""
        changed: dict[str, dict[str, Any]] = {}
        if self.service_account:
            changed["--service_account"] = {"serviceAccount": self.service_account}
        if self.network:
            changed["--network"] = {"network": self.network}
        if self.spot:
            changed["--spot"] = _scheduling(spec, strategy="SPOT")
        elif self.flex_start_s is not None:
            wait = f"{math.ceil(self.flex_start_s)}s"
            changed["--flex_start"] = _scheduling(spec, strategy="FLEX_START", maxWaitDuration=wait)
        merged = dict(spec)
        for values in changed.values():
            merged |= values
        return merged, f"{name} with {' '.join(changed)}" if changed else name


def _scheduling(spec: Mapping[str, Any], **values: str) -> dict[str, Any]:
    """Returns the scheduling of a spec, which was not checked, with another strategy."""
    before = spec.get("scheduling", {})
    if not isinstance(before, Mapping):
        return {}
    kept = {key: value for key, value in before.items() if key not in ("strategy", "maxWaitDuration")}
    return {"scheduling": {**kept, **values}}


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
    if len(labels) > MOST_LABELS:
        raise UserError(f"labels: {len(labels)} of them, and a job has {MOST_LABELS} at most beside those of `submit`")
    return labels


def check_kms_key(key: str, region: str) -> None:
    """Raises UserError unless `key` names a key of Cloud KMS in the job's region; an empty one is none."""
    if key:
        check_format("EncryptionSpec.kmsKeyName", key, "kms_key")
        check_same_region("kms_key", key, region)
