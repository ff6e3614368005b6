"""Every tier is one that Vertex AI has; every wrong spec is refused with a line of its own."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.cloud.aiplatform_v1.types import CustomJobSpec

from deploy.tiers.spec_rules import ENUMS, MESSAGES
from deploy.tiers.tier import JOB_CONFIGS, find_tier, load_tier
from tests.deploy.cli.wrong_inputs import GOOD, TWO
from tests.support import refused


def test_the_table_of_messages_is_the_sdks() -> None:
    scalars = {3: "int64", 5: "int32", 8: "bool", 9: "string"}
    messages = {}
    enums = {}
    left = [CustomJobSpec.pb(CustomJobSpec()).DESCRIPTOR]
    while left:
        message = left.pop()
        fields = messages[message.name] = {}
        for field in message.fields:
            inner = field.message_type or field.enum_type
            fields[field.json_name] = (inner.name if inner else scalars[field.type]) + (
                "[]" if field.is_repeated else ""
            )
            if field.message_type and field.message_type.file.package.startswith("google.cloud"):
                left.append(field.message_type)
            if field.enum_type:
                names = tuple(value.name for value in field.enum_type.values)
                enums[field.enum_type.name] = tuple(
                    name for name in names if not name.endswith("UNSPECIFIED")
                )
    assert messages == MESSAGES
    assert enums == ENUMS


@pytest.mark.parametrize("path", sorted(JOB_CONFIGS.glob("*.yaml")))
def test_every_tier_is_what_its_name_says_and_passes_the_sdk(path: Path) -> None:
    tier = load_tier(path.stem)
    CustomJobSpec.from_json(json.dumps(tier.spec))  # refuses unknown names
    named: Any = re.fullmatch(r"(?:cpu|(\w+|a100-80)x(\d))(?:-(\d)workers)?", tier.name)
    assert tier.accelerators == int(named[2] or 0)
    assert tier.workers == int(named[3] or 1)
    kinds = {
        "t4": "TESLA_T4",
        "v100": "TESLA_V100",
        "l4": "L4",
        "a100": "TESLA_A100",
        "a100-80": "A100_80GB",
        "h100": "H100_80GB",
        "h200": "H200_141GB",
    }
    assert tier.accelerator_type == (f"NVIDIA_{kinds[named[1]]}" if named[1] else "")
    if tier.workers > 1:
        assert tier.spec["scheduling"]["restartJobOnWorkerRestart"] is True


def test_a_tier_is_found_by_path_by_name_and_in_the_current_folder() -> None:
    assert find_tier("l4x4") == find_tier("l4x4.yaml") == JOB_CONFIGS / "l4x4.yaml"
    Path("job_configs").mkdir()
    Path("job_configs/l4x4.yaml").write_text(GOOD)
    assert find_tier("l4x4") == Path("job_configs/l4x4.yaml")
    with refused("no such tier; did you mean 'l4x"):
        load_tier("l4x5")


@pytest.mark.parametrize("content", [GOOD, TWO])
def test_the_good_specs_are_good(content: str) -> None:
    Path("good.yaml").write_text(content)
    assert load_tier("good.yaml").spec == yaml.safe_load(content)
