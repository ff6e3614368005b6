"""Changes a tier by flags, so that nobody copies its file for a word, and checks a job's labels and key."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

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
        changed, flags = dict(spec), []
        for flag, key, value in (
            ("service_account", "serviceAccount", self.service_account), ("network", "network", self.network),
        ):  # fmt: skip
            if value:
                changed[key] = value
                flags.append(f"--{flag}")
        if self.spot or self.flex_start_s is not None:
            changed["scheduling"] = self._scheduling(changed.get("scheduling", {}))
            flags.append("--spot" if self.spot else "--flex_start")
        return changed, f"{name} with {' '.join(flags)}" if flags else name

    def _scheduling(self, before: Mapping[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in before.items() if key not in ("strategy", "maxWaitDuration")}
        if self.spot:
            return {**kept, "strategy": "SPOT"}
        return {**kept, "strategy": "FLEX_START", "maxWaitDuration": f"{math.ceil(self.flex_start_s or 0)}s"}


NO_CHANGES = SpecChanges()
_KEY_RULE = "up to 63 small letters, digits, - and _, a letter first"


def read_labels(text: str) -> dict[str, str]:
    """Returns "team=vision,cost=42" as a dictionary. Raises UserError for what Vertex AI does not take as labels.

    https://docs.cloud.google.com/resource-manager/docs/labels-overview#requirements
    """
    found: dict[str, str] = {}
    for each in text.split(",") if text else ():
        key, equals, value = each.partition("=")
        if not equals:
            raise UserError(f"labels={text}: {each!r} is no label: write --labels=KEY=VALUE,KEY=VALUE")
        if not _is_label(key) or not key[0].isalpha():
            raise UserError(f"labels={text}: the key {key!r}: use {_KEY_RULE}")
        if value and not _is_label(value):
            raise UserError(f"labels={text}: the value {value!r}: use up to 63 small letters, digits, - and _, or none")
        if key in (LABEL, PRICE_LABEL):
            raise UserError(f"labels={text}: `submit` sets the label {key} itself, to find the job: use another key")
        if found.setdefault(key, value) != value:
            raise UserError(f"labels={text}: {key} has two values: keep one of them")
    if len(found) > MOST_LABELS:
        raise UserError(f"labels: {len(found)} of them, and a job has {MOST_LABELS} at most beside those of `submit`")
    return found


def _is_label(text: str) -> bool:
    return re.fullmatch(r"[\w-]{1,63}", text) is not None and text == text.lower()


def check_kms_key(key: str, region: str) -> None:
    """Raises UserError unless `key` names a key of Cloud KMS in the job's region; an empty one is none.

    https://docs.cloud.google.com/vertex-ai/docs/general/cmek
    """
    if not key:
        return
    form = "projects/PROJECT/locations/REGION/keyRings/RING/cryptoKeys/KEY"
    found = re.fullmatch(r"projects/[^/\s]+/locations/([a-z0-9-]+)/keyRings/[\w-]{1,63}/cryptoKeys/[\w-]{1,63}", key)
    if not found:
        raise UserError(
            f"kms_key={key}: write {form}: `gcloud kms keys list --location={region} --keyring=RING` shows it"
        )
    if found[1] != region:
        raise UserError(f"kms_key={key} is in {found[1]}, and the job would run in {region}: use a key of that region")
