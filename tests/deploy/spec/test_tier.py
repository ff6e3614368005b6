"""Every tier is one that Vertex AI has; every wrong spec is refused with a line of its own."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.cloud.aiplatform_v1.types import CustomJobSpec

from deploy.spec.machine_table import load_machines
from deploy.spec.schema import ENUMS, MESSAGES
from deploy.spec.tier import JOB_CONFIGS, find_tier, load_tier
from trainer.errors import UserError

GOOD = """
workerPoolSpecs:
  - machineSpec: {machineType: g2-standard-48, acceleratorType: NVIDIA_L4, acceleratorCount: 4}
    replicaCount: 1
    diskSpec: {bootDiskType: pd-ssd, bootDiskSizeGb: 100}
    pythonPackageSpec: {executorImageUri: image, pythonModule: trainer.task}
scheduling: {timeout: 3600s}
"""
TWO = GOOD.replace("scheduling:", GOOD[GOOD.index("  - machineSpec") : GOOD.index("scheduling")] + "scheduling:")
REDUCER = "  - machineSpec: {machineType: n1-highcpu-16}\n    containerSpec: {imageUri: gcr.io/x/reductionserver}\n"


def repeated(field: Any) -> bool:
    """protobuf 4, which TensorFlow 2.17 asks for, says it by a label that newer ones deprecate."""
    return field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED


def test_the_table_of_messages_is_the_sdks() -> None:
    scalars = {3: "int64", 5: "int32", 8: "bool", 9: "string"}
    messages, enums, left = {}, {}, [CustomJobSpec.pb(CustomJobSpec()).DESCRIPTOR]
    while left:
        message = left.pop()
        fields = messages[message.name] = {}
        for field in message.fields:
            inner = field.message_type or field.enum_type
            fields[field.json_name] = (inner.name if inner else scalars[field.type]) + ("[]" if repeated(field) else "")
            if field.message_type and field.message_type.file.package.startswith("google.cloud"):
                left.append(field.message_type)
            if field.enum_type:
                names = tuple(value.name for value in field.enum_type.values)
                enums[field.enum_type.name] = tuple(name for name in names if not name.endswith("UNSPECIFIED"))
    assert messages == MESSAGES
    assert enums == ENUMS


@pytest.mark.parametrize("path", sorted(JOB_CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_tier_is_what_its_name_says_and_passes_the_sdk(path: Path) -> None:
    tier = load_tier(path.stem)
    CustomJobSpec.from_json(json.dumps(tier.spec))  # refuses unknown names
    named = re.fullmatch(r"(?:cpu|(\w+|a100-80)x(\d))(?:-(\d)workers)?", tier.name)
    assert named
    assert tier.accelerators == int(named[2] or 0)
    assert tier.workers == int(named[3] or 1)
    assert tier.price_per_hour is not None
    kinds = {"t4": "TESLA_T4", "v100": "TESLA_V100", "l4": "L4", "a100": "TESLA_A100", "a100-80": "A100_80GB",
             "h100": "H100_80GB"}  # fmt: skip
    assert tier.accelerator_type == (f"NVIDIA_{kinds[named[1]]}" if named[1] else "")
    if tier.workers > 1:
        assert tier.spec["scheduling"]["restartJobOnWorkerRestart"] is True


def test_the_tiers_that_were_promised_are_there() -> None:
    counts = {"t4": (1, 2, 4), "v100": (1, 2, 4, 8), "l4": (1, 2, 4, 8)}
    counts |= dict.fromkeys(("a100", "a100-80", "h100"), (1, 2, 4, 8))
    promised = {f"{kind}x{count}" for kind, each in counts.items() for count in each}
    assert {path.stem for path in JOB_CONFIGS.glob("*.yaml")} == promised | {"cpu", "cpu-2workers", "l4x1-2workers"}


def test_a_tier_is_found_by_path_by_name_and_in_the_current_folder() -> None:
    assert find_tier("l4x4") == find_tier("l4x4.yaml") == JOB_CONFIGS / "l4x4.yaml"
    Path("job_configs").mkdir()
    Path("job_configs/l4x4.yaml").write_text(GOOD)
    assert find_tier("l4x4") == Path("job_configs/l4x4.yaml")
    with pytest.raises(UserError, match="no such tier; did you mean 'l4x"):
        load_tier("l4x5")


def test_every_pool_is_paid_for_and_spot_is_cheaper(tmp_path: Path) -> None:
    def price(content: str) -> float:
        file = tmp_path / "tier.yaml"
        file.write_text(content)
        hourly = load_tier(str(file)).price_per_hour
        assert hourly is not None
        return hourly

    assert price(TWO) == pytest.approx(2 * price(GOOD))
    more = TWO.replace("scheduling:", REDUCER + "scheduling:")
    reducer = load_machines().price("n1-highcpu-16", None, 0).list
    assert reducer is not None
    assert price(more) == pytest.approx(2 * price(GOOD) + reducer)
    assert price(GOOD.replace("{timeout", "{strategy: SPOT, timeout")) < 0.6 * price(GOOD)


WRONG = {
    "a misspelt key": (GOOD, "replicaCount", "replicaCounts",
                       "unknown key 'replicaCounts'; did you mean 'replicaCount'?"),
    "snake_case": (GOOD, "machineSpec", "machine_spec",
                   "machine_spec is snake_case, which the API ignores: use machineSpec"),
    "a CustomJob": (GOOD, "\nworkerPoolSpecs", "\njobSpec: {}\nworkerPoolSpecs", "wrong.yaml: unknown key 'jobSpec'"),
    "an accelerator's name": (GOOD, "NVIDIA_L4", "NVIDIA_TESLA_L4",
                              "acceleratorType=NVIDIA_TESLA_L4: unknown name; did you mean"),
    "A100 of 80 GB by the name of 40": (
        GOOD, "g2-standard-48, acceleratorType: NVIDIA_L4", "a2-ultragpu-4g, acceleratorType: NVIDIA_TESLA_A100",
        "takes NVIDIA_A100_80GB x 4, not NVIDIA_TESLA_A100 x 4; NVIDIA_TESLA_A100 x 4 comes with a2-highgpu-4g"),
    "A100 of 40 GB by the name of 80": (
        GOOD, "g2-standard-48, acceleratorType: NVIDIA_L4", "a2-highgpu-4g, acceleratorType: NVIDIA_A100_80GB",
        "a2-highgpu-4g takes NVIDIA_TESLA_A100 x 4, not NVIDIA_A100_80GB x 4"),
    "a count that the machine has not": (
        GOOD, "Count: 4", "Count: 2",
        "takes NVIDIA_L4 x 4, not NVIDIA_L4 x 2; NVIDIA_L4 x 2 comes with g2-standard-24"),
    "3 T4": (GOOD, "g2-standard-48, acceleratorType: NVIDIA_L4, acceleratorCount: 4",
             "n1-standard-8, acceleratorType: NVIDIA_TESLA_T4, acceleratorCount: 3", "NVIDIA_TESLA_T4 x 1/2/4"),
    "a count that is only inferred": (
        GOOD, "g2-standard-48, acceleratorType: NVIDIA_L4", "n1-standard-96, acceleratorType: NVIDIA_TESLA_P100",
        "comes with n1-standard-4 or n1-standard-8 or n1-standard-16 (these counts come from"),
    "a GPU machine without its GPUs": (GOOD, ", acceleratorType: NVIDIA_L4, acceleratorCount: 4", "",
                                       "takes NVIDIA_L4 x 4, not none"),
    "a machine that is none": (GOOD, "g2-standard-48", "g2-standart-48",
                               "no such machine; did you mean 'g2-standard-48'?"),
    "a CPU family with GPUs": (GOOD, "g2-standard-48", "e2-standard-8", "machineType=e2-standard-8: no such machine"),
    "no machine": (GOOD, "machineType: g2-standard-48, ", "", "machineType is missing"),
    "a count without a kind": (GOOD, "acceleratorType: NVIDIA_L4, ", "", "give both, or neither"),
    "a TPU": (GOOD, "NVIDIA_L4", "TPU_V3", "acceleratorType=TPU_V3: not supported by this trainer"),
    "four chiefs": (GOOD, "replicaCount: 1", "replicaCount: 4", "move the other 3 to workerPoolSpecs[1]"),
    "no replica": (TWO, "replicaCount: 1", "replicaCount: 0", "replicaCount=0"),
    "args that are numbers": (GOOD, "{executorImageUri", "{args: [--steps, 5], executorImageUri",
                              "args[1]=5: must be text: put it in quotes"),
    "args as one text": (GOOD, "{executorImageUri", "{args: --steps=5, executorImageUri", "must be a list"),
    "a timeout without s": (GOOD, "timeout: 3600s", "timeout: 3600",
                            'timeout=3600: must be text in seconds, as "3600s"'),
    "a timeout in hours": (GOOD, "timeout: 3600s", "timeout: 1h", 'timeout="1h": must be text in seconds'),
    "a timeout of nothing": (GOOD, "timeout: 3600s", "timeout: 0s", "ends the job at once"),
    "FLEX_START that waits a day": (GOOD, "{timeout", "{strategy: FLEX_START, timeout",
                                    "FLEX_START without maxWaitDuration"),
    "a wait without FLEX_START": (GOOD, "{timeout", "{maxWaitDuration: 60s, timeout", "needs strategy: FLEX_START"),
    "an old strategy": (GOOD, "{timeout", "{strategy: LOW_COST, timeout", "deprecated: write SPOT"),
    "a strategy that is none": (GOOD, "{timeout", "{strategy: CHEAP, timeout", "strategy=CHEAP: unknown name"),
    "a boolean in quotes": (GOOD, "{timeout", "{disableRetries: 'yes', timeout",
                            "must be true or false, without quotes"),
    "two ways to run": (GOOD, "    pythonPackageSpec", "    containerSpec: {imageUri: x}\n    pythonPackageSpec",
                        "give one of containerSpec"),
    "no way to run": (GOOD, "    pythonPackageSpec: {executorImageUri: image, pythonModule: trainer.task}\n", "",
                      "give one of containerSpec"),
    "a small disk": (GOOD, "SizeGb: 100", "SizeGb: 50", "bootDiskSizeGb=50: a boot disk has 100 to 64000 GB"),
    "a disk that is none": (GOOD, "pd-ssd", "pd-sdd", "bootDiskType=pd-sdd: no such disk; did you mean 'pd-ssd'?"),
    "no pools": (GOOD, GOOD[: GOOD.index("scheduling")], "", "workerPoolSpecs is empty: pool 0 holds the chief"),
    "a parameter server": (TWO, "scheduling:", REDUCER.replace("reductionserver", "server") + "scheduling:",
                           "no parameter servers"),
    "an evaluator": (TWO, "scheduling:", REDUCER * 2 + "scheduling:", "the chief evaluates: remove the pool"),
    "a variable of Vertex AI's": (GOOD, "{executorImageUri",
                                  "{env: [{name: AIP_MODEL_DIR, value: x}], executorImageUri",
                                  "Vertex AI sets this itself"),
    "a key twice": (GOOD, "scheduling:", "scheduling: {}\nscheduling:", "scheduling is there twice"),
    "text for a mapping": (GOOD, "scheduling: {timeout: 3600s}", "scheduling: soon", "must be 'key: value' lines"),
    "unlike workers": (
        TWO, TWO[TWO.rindex("  - machineSpec") : TWO.rindex("    replicaCount")],
        "  - machineSpec: {machineType: g2-standard-24, acceleratorType: NVIDIA_L4, acceleratorCount: 2}\n",
        "other machines than workerPoolSpecs[0]"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_spec_is_refused_with_a_line_of_its_own(name: str, tmp_path: Path) -> None:
    content, old, new, line = WRONG[name]
    assert content.count(old), "the good spec holds what is made wrong"
    last = content.rindex(old)
    file = tmp_path / "wrong.yaml"
    file.write_text(content[:last] + new + content[last + len(old) :])
    with pytest.raises(UserError, match=re.escape(line)) as caught:
        load_tier(str(file))
    assert str(caught.value).startswith("wrong.yaml")
    assert "\n" not in str(caught.value)


def test_the_good_specs_are_good(tmp_path: Path) -> None:
    for number, content in enumerate((GOOD, TWO, TWO.replace("scheduling:", REDUCER + "scheduling:"))):
        file = tmp_path / f"good{number}.yaml"
        file.write_text(content)
        assert load_tier(str(file)).spec == yaml.safe_load(content)
