"""Holds wrong specs, flags and packages, each with the line that refuses it before anything is
sent."""

import re
from collections.abc import Sequence
from typing import Any

_DIGITS = "--recipe=wgan_gp_digits"
GOOD = """
workerPoolSpecs:
  - machineSpec: {machineType: g2-standard-48, acceleratorType: NVIDIA_L4, acceleratorCount: 4}
    replicaCount: 1
    diskSpec: {bootDiskType: pd-ssd, bootDiskSizeGb: 100}
    pythonPackageSpec: {pythonModule: trainer.task}
scheduling: {timeout: 3600s}
"""
TWO = GOOD.replace(
    "scheduling:", GOOD[GOOD.index("  - machineSpec") : GOOD.index("scheduling")] + "scheduling:"
)
SERVER = (
    "  - machineSpec: {machineType: n1-highcpu-16}\n    containerSpec: {imageUri:"
    " gcr.io/x/server}\n"
)
_L4 = "g2-standard-48, acceleratorType: NVIDIA_L4, acceleratorCount: 4"
_CPU = GOOD.replace(f"{{machineType: {_L4}}}", "{machineType: n1-standard-8}")
_FLEX = GOOD.replace(
    "{timeout: 3600s}", "{timeout: 3600s, strategy: FLEX_START, maxWaitDuration: 600s}"
)
_TASK = "pythonPackageSpec: {pythonModule: trainer.task}"

# (what of a good spec is replaced, by what, the line), and the spec if it is another than GOOD
SPECS: list[tuple[str, ...]] = [
    ("replicaCount", "replicaCounts", "unknown key 'replicaCounts'; did you mean 'replicaCount'?"),
    ("scheduling:", "region: europe-west4\nscheduling:", "wrong.yaml: unknown key 'region'"),
    ("NVIDIA_L4", "NVIDIA_TESLA_L4", "acceleratorType=NVIDIA_TESLA_L4: unknown name; did you mean"),
    (
        "g2-standard-48, acceleratorType: NVIDIA_L4",
        "a2-ultragpu-4g, acceleratorType: NVIDIA_TESLA_A100",
        "takes NVIDIA_A100_80GB x 4, not NVIDIA_TESLA_A100 x 4; NVIDIA_TESLA_A100 x 4 comes",
    ),
    (
        "Count: 4",
        "Count: 2",
        "takes NVIDIA_L4 x 4, not NVIDIA_L4 x 2; NVIDIA_L4 x 2 comes with g2-standard-24",
    ),
    (
        _L4,
        "n1-standard-8, acceleratorType: NVIDIA_TESLA_T4, acceleratorCount: 3",
        "NVIDIA_TESLA_T4 x 1/2/4",
    ),
    (", acceleratorType: NVIDIA_L4, acceleratorCount: 4", "", "takes NVIDIA_L4 x 4, not none"),
    ("machineType: g2-standard-48, ", "", "machineType is missing"),
    ("acceleratorType: NVIDIA_L4, ", "", "give both, or neither"),
    ("NVIDIA_L4", "TPU_V3", "acceleratorType=TPU_V3: not supported by this trainer: use one of"),
    ("replicaCount: 1", "replicaCount: 4", "move others to workerPoolSpecs[1]"),
    (
        "{pythonModule",
        "{args: [--steps, 5], pythonModule",
        "args[1]=5: must be text: put it in quotes",
    ),
    ("{pythonModule", "{args: --steps=5, pythonModule", "must be a list"),
    ("timeout: 3600s", "timeout: 3600", 'timeout=3600: must be text in seconds, as "3600s"'),
    ("{timeout", "{strategy: FLEX_START, timeout", "FLEX_START without maxWaitDuration"),
    ("{timeout", "{strategy: LOW_COST, timeout", "SPOT instead of LOW_COST"),
    ("{timeout", "{strategy: CHEAP, timeout", "strategy=CHEAP: unknown name"),
    ("{timeout", "{disableRetries: 'yes', timeout", "must be true or false, without quotes"),
    (
        "    pythonPackageSpec",
        "    containerSpec: {imageUri: p/x}\n    pythonPackageSpec",
        "give one of containerSpec",
    ),
    ("    pythonPackageSpec: {pythonModule: trainer.task}\n", "", "give one of containerSpec"),
    ("SizeGb: 100", "SizeGb: 50", "bootDiskSizeGb=50: a boot disk has 100 to 64000 GB"),
    ("pd-ssd", "pd-sdd", "bootDiskType=pd-sdd: no such disk: use pd-ssd, "),
    (GOOD[: GOOD.index("scheduling")], "", "workerPoolSpecs is missing: pool 0 holds the chief"),
    ("scheduling:", SERVER + "scheduling:", "without parameter servers", TWO),
    (
        "{pythonModule",
        "{env: [{name: AIP_MODEL_DIR, value: x}], pythonModule",
        "env[0].name=AIP_MODEL_DIR: use another name",
    ),
    ("scheduling:", "scheduling: {}\nscheduling:", "scheduling is listed twice"),
    ("scheduling: {timeout: 3600s}", "scheduling: soon", "must be 'key: value' lines"),
    (
        TWO[TWO.rindex("  - machineSpec") : TWO.rindex("    replicaCount")],
        "  - machineSpec: {machineType: g2-standard-24, acceleratorType: NVIDIA_L4,"
        " acceleratorCount: 2}\n",
        "other machines than workerPoolSpecs[0]",
        TWO,
    ),
    (_L4, "n1-standard-8", "not for machines without GPUs, only for L4, A100, H100", _FLEX),
    (
        _L4,
        "a3-highgpu-1g, acceleratorType: NVIDIA_H100_80GB, acceleratorCount: 1",
        "a3-highgpu-1g may be had only as SPOT or FLEX_START",
    ),
    (
        f"{_TASK}\nscheduling",
        "containerSpec: {imageUri: p/x}\nscheduling",
        "one pool names an image and the other does not",
        TWO,
    ),
    ("{pythonModule", "{executorImageUri: p/x, pythonModule", "Google's prebuilt images"),
    (
        "{pythonModule",
        "{packageUris: [gs://b/x.whl], pythonModule",
        "packageUris is for Google's prebuilt images",
    ),
    (
        "pythonModule: trainer.task",
        "args: [x]",
        "pythonModule is missing: write pythonModule: trai",
    ),
    (_TASK, "containerSpec: {args: [x]}", "imageUri is missing"),
    (
        _TASK,
        "containerSpec: {imageUri: 'https://gcr.io/p/x'}",
        "NAME:TAG, in small letters, without https://",
    ),
    ("trainer.task", "mine.task", "the module mine is not in the job"),
    ("trainer.task", "trainer.tsk", "the module trainer.tsk is not in the pack"),
    (
        "\nworker",
        "\nserviceAccount: me@example.com\nworker",
        "serviceAccount=me@example.com: write NAME@PROJECT.iam.gserviceaccount.com",
    ),
    ("\nworker", "\nnetwork: default\nworker", "network=default: write projects/NUMBER/"),
    ("\nworker", "\nnetwork: projects/p/global/networks/n\nworker", "with the project's number"),
    ("n1-standard-8", "n2-standard-7", "no such machine; did you mean 'n2-standard-", _CPU),
    ("3600s", "999999999999s", 'must be text in seconds, as "3600s", of up to 11 digits'),
    (
        "{pythonModule",
        "{env: [{name: A-B, value: x}], pythonModule",
        "env[0].name=A-B: use another name, of letters, digits and _",
    ),
    ("NVIDIA_L4", "NVIDIA_A100", "did you mean 'NVIDIA_TESLA_A100' or 'NVIDIA_A100_80GB'?"),
    ("replicaCount: 1", "replicaCount: 0", "replicaCount=0: pool 0 is the chief alone"),
    (
        _L4,
        "g4-standard-192, acceleratorType: NVIDIA_RTX_PRO_6000, acceleratorCount: 4",
        "TensorFlow's wheels do not run on NVIDIA_RTX_PRO_6000 (Blackwell): use --image=URI",
    ),
    (
        "acceleratorCount: 4",
        "acceleratorCount: 4, reservationAffinity: {reservationAffinityType: ANY_RESERVATION}",
        "strategy=SPOT with a reservation: the one asks for new machines",
        GOOD.replace("{timeout", "{strategy: SPOT, timeout"),
    ),
    (
        "\nworker",
        "\npersistentResourceId: mine\nworker",
        "strategy=FLEX_START with persistentResourceId",
        _FLEX,
    ),
    (
        "acceleratorCount: 4",
        "acceleratorCount: 4, reservationAffinity: {reservationAffinityType: ANY_RESERVATION}",
        "persistentResourceId with a reservation: a persistent resource has its machines",
        f"persistentResourceId: mine{GOOD}",
    ),
    (
        "scheduling: {",
        "scheduling: [",
        "wrong.yaml, line 7: not valid YAML: expected ',' or ']', but got '}': mend",
    ),
]


# (tier, flags, the line); a recipe is added where none, and no model, is named
FLAGS: list[tuple[str, ...]] = [
    ("l4x4", "--recipe=wgan_gp_digit", "no such recipe; did you mean 'wgan_gp_digits'?"),
    ("l4x4", "--stepz=3", "unknown flag --stepz; did you mean 'steps'?"),
    ("l4x4", "--global_batch_size=70", "l4x4: global_batch_size=70 does not divide over 4"),
    ("l4x1-2workers", "--strategy=mirrored", "would each train alone"),
    ("l4x4", "--strategy=one_device", "strategy=one_device and expect_devices=4 contradict"),
    ("l4x4", "--strategy=multi_worker", "l4x4 has one worker"),
    ("l4x4", "--replicas=2", "devices that are paid for would not be used"),
    ("l4x4", "--replicas=8", "a worker of l4x4 has 4 accelerators: drop the flag"),
    ("l4x4", "--expect_devices=2", "have 4 accelerators: drop the flag"),
    ("l4x4", "--image_size=30", "a multiple of 8 from 16 to 256"),
    (
        "l4x4",
        "--recipe=efficientnet_photos",
        "--data=gs://my-bucket/x",
        "--channels=1",
        "takes colour images",
    ),
    (
        "l4x4",
        "--recipe=wgan_gp_photos",
        "--data=gs:/my-bucket/photos",
        "did you mean gs://my-bucket/photos?",
    ),
    ("l4x4", "--recipe=wgan_gp_photos", "--data=shards:gs://My_Bucket/x", "lower-case letters"),
    ("l4x4", "--job_dir=runs/x", "job_dir=runs/x: the job's machines cannot read this disk"),
    (
        "l4x4",
        "--fid_every_steps=5",
        "--fid_features=model.keras",
        "fid_features=model.keras: the job's machines cannot",
    ),
    ("l4x4", "--patience=5", "patience=5 has no effect without early_stopping"),
    ("l4x4", "--initial_model=/home/me/m.keras", "use --initial_model=gs://BUCKET/m.keras"),
    (
        "l4x4",
        "--model=my_models.gan:build",
        "--data=digits",
        "in the job: use --package=FOLDER or my_models.py, or",
    ),
    ("l4x4", "--data=my_data:load", "the module my_data is not in the job"),
    ("l4x4", "--image=prebuilt", "image=prebuilt: it names no repository: write"),
    ("l4x4", "--image=", "image is empty: give a value, or leave it out"),
    ("l4x4", "--image=us-docker.pkg.dev/p/r/x;rm -rf", "not an image"),
    ("cpu", "--data=digits", "recipe is missing: a job is paid for: name what it trains"),
    ("cpu", "--name=a b", "name=a b: use letters, digits"),
    (
        "cpu",
        "--max_cost=5",
        "--max-cost",
        "50",
        "max_cost is given twice, as 5 and 50: give it once",
    ),
    ("cpu", "--labels=team", "labels='team' must be pairs of a name and a value"),
    ("cpu", "--labels=a=b c", "'a=b c' is no label: write"),
    ("cpu", "--labels=a=" + 64 * "b", "both of up to 63 small letters, digits, - and _"),
    ("cpu", "--labels=submission=x", "sets the label submission itself"),
    ("cpu", "--kms_key=mine", "kms_key=mine: write projects/PROJECT/locations/REGION/keyRings/"),
    (
        "cpu",
        "--kms_key=projects/p/locations/us-east1/keyRings/r/cryptoKeys/k",
        "cryptoKeys/k is in us-east1, and the job would run in us-central1: use one of that region",
    ),
    (
        "cpu",
        "--service_account=me@example.com",
        "cpu.yaml with --service_account: serviceAccount=me@",
    ),
    ("cpu", "--flex_start", "cpu.yaml with --flex_start: scheduling.strategy=FLEX_START: not for"),
    (
        "l4x1",
        "--flex_start",
        "--spot",
        "--spot and --flex_start contradict each other: a job has machines",
    ),
    ("l4x1", "--spot", "--reservation=x", "--spot and --reservation contradict each other"),
    (
        "l4x1",
        "--reservation=x",
        "reservation=x: write projects/PROJECT/zones/ZONE/reservations/NAME",
    ),
    ("cpu", "--max_wait=2", "'2' must be a time of up to 30 days with its unit, as 30m, 2h or 1d"),
    (
        "cpu",
        "--max_wait=90m",
        "--detach",
        "--detach contradicts --max_wait: nobody would cancel the job",
    ),
    ("cpu", "t4x1", "--detach", "--detach is for one tier in one region"),
    ("cpu", "t4x9", "tier t4x9: no such tier"),
    ("cpu", "--machine_type=g2-standard-4", "tier cpu and --machine_type contradict each other"),
    (
        "--machine_type=g2-standard-5",
        "g2-standard-5: no such machine; did you mean 'g2-standard-4'?",
    ),
    (
        "--machine_type=g2-standard-4",
        "--accelerator=NVIDIA_L4",
        "accelerator=NVIDIA_L4: write NAME:COUNT",
    ),
    (
        "--machine_type=g2-standard-4",
        "--accelerator=NVIDIA_L4:2",
        "g2-standard-4 takes NVIDIA_L4 x 1, not",
    ),
    ("cpu", "--disk_gb=10", "disk_gb=10 must be at least 100"),
    (
        "cpu",
        "--timeout=10s",
        "cpu.yaml with --timeout: scheduling.timeout=10s ends the job at once",
    ),
    (
        "cpu",
        "--env=TF_CONFIG={}",
        "env=TF_CONFIG: Vertex AI or the start of the job sets this variable",
    ),
    ("cpu", "--env=A=x", "--env=A=y", "each name once, written as NAME=VALUE"),
    (
        "cpu",
        "--env=HF_TOKEN=x",
        "in Secret Manager, and use --secret=HF_TOKEN=projects/P/secrets/S",
    ),
    (
        "cpu",
        "--secret=HF_TOKEN=hf_x",
        "secret=HF_TOKEN: write --secret=HF_TOKEN=projects/P/secrets/S/ver",
    ),
    (
        "cpu",
        "--track=mlflow:http://127.0.0.1:5000#x",
        "is on this machine, which the job cannot reach",
    ),
    ("cpu", "--track=mine:tracker", "the module mine is not in the job"),
    ("cpu", "--track=mlfow:x", "track=mlfow:x: no such tracker"),
    ("cpu", "--tensorboard_instance=7", "add --service_account=EMAIL, with roles/aiplatform.user"),
    (
        "cpu",
        "--tensorboard_instance=projects/p/locations/europe-west4/tensorboards/7",
        "--service_account=trainer@my-proj.iam.gserviceaccount.com",
        "europe-west4",
    ),
    (
        "cpu",
        "--package=nothing",
        "such as my_models with an __init__.py, or one module, such as mine.py",
    ),
    ("cpu", "--package=.", "that Python can import: did you mean ./my_models?"),
    ("cpu", "--job_dir=gs://", "is not a valid bucket name"),
    (
        "cpu",
        "--model=my_models.gan:biuld",
        "--data=digits",
        "--package=my_models",
        "model=my_models.gan:biuld: my_models.gan has no function biuld; did you mean 'build'?",
    ),
    ("cpu", "--stop_if_idle=30m", "--stop_if_idle is for GPUs, and cpu has none: leave it out"),
    (
        "l4x1",
        "--stop_if_over=1.5",
        "stop_if_over=1.5: there is no plan of the time on l4x1: --plan makes",
    ),
    ("l4x4", "--spec", "--json", "--spec and --json contradict each other"),
    ("l4x4", "--spec", "--out=x", "--spec and --out contradict each other"),
    ("l4x4", "--dry_run", "--out=x", "--dry_run and --out contradict each other"),
    ("l4x4", "cpu", "--spec", "--spec is for one tier in one region: a spec has one job"),
    ("l4x4", "--out=gs://my-bucket/x", "out=gs://my-bucket/x: only local paths are supported here"),
    ("l4x4", "--out=/proc/x/y", "out=/proc/x: cannot write there"),
    ("l4x4", "--out=x", "--max_wait=2h", "--out contradicts --max_wait"),
    ("l4x4", "--spec", "--register=x", "--register needs a training that is followed to its end"),
    (
        "cpu",
        "--model=my_models.nothing:build",
        "--data=digits",
        "--package=my_models",
        "the module my_models.nothing is not in the package my_models",
    ),
]

_PLAN = ["plan", "l4x1", "--recipe=mlp_mnist"]
_VERTEX = ["compare", "l4x1", _DIGITS, "--on=vertex"]
# (a command of another verb, the line)
COMMANDS: list[tuple[list[str], str]] = [
    (["submitt"], "submitt: unknown verb; did you mean 'submit'?"),
    (["machines", "--prices=none.yaml"], "not found: write lines such as"),
    (["image"], "--image is missing: python -m deploy image --image="),
    (["image", "--image=trainer"], "use REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME:TAG"),
    (
        [*_PLAN, "--measure=l4x1"],
        "measure=l4x1: a job costs money: set a limit, such as --max_cost=1",
    ),
    ([*_PLAN, "--measure=l4x9", "--max_cost=1"], "tier l4x9: no such tier"),
    ([*_PLAN, "--measure=l4x1", "--max_cost=1"], "bucket is missing"),
    (
        [*_PLAN, "--max_cost=1"],
        "--max_cost, --bucket and --dry_run are for the job of --measure=TIER: add it, or drop",
    ),
    (
        [
            "predict",
            "digits",
            "gs://my-b/rows",
            "gs://my-b/out",
            "--region=us-central1",
            "--project=p",
            "--tier=l4x4",
        ],
        "tier=l4x4: one device answers rows, and it has 4",
    ),
    *(
        ([verb, "cpu", "--recipe=efficientnet_photos"], "error: data is missing: use --data=FOLDER")
        for verb in ("local", "compare", "plan")
    ),
    (
        ["compare", "l4x1", _DIGITS, "--bucket=gs://my-bucket"],
        "--bucket is for jobs of Vertex AI: add --on=vertex, or",
    ),
    ([*_VERTEX, "--bucket=gs://my-bucket"], "region is missing"),
    ([*_VERTEX, "--region=us-central1"], "bucket is missing"),
    ([*_VERTEX, "--region=us-central1", "--bucket=gs://my-bucket"], "project is missing"),
    (
        [
            *_VERTEX,
            "--region=us-central1",
            "--bucket=gs://my-bucket",
            "--project=p",
            "--initial_model=x/y",
        ],
        "initial_model=x/y: the job's machines cannot",
    ),
    *(
        (
            [*verb, "--region=us-west2", "--bucket=gs://my-bucket", "--project=p"],
            "region=us-west2 has no NVIDIA_L4 for training: use",
        )
        for verb in (_VERTEX, ["submit", "l4x1", _DIGITS])
    ),
    (["compare", "cpu", "cpu", _DIGITS], "cpu is given twice"),
    (["compare", "l4x", _DIGITS], "tier l4x: no such tier; did you mean 'l4x"),
    (
        ["compare", "cpu", "--price_per_hour=tow=1", _DIGITS],
        "price_per_hour=tow: no such tier. Here are: cpu",
    ),
    (["compare", "cpu", "--baseline=two", _DIGITS], "baseline=two: it must be one of cpu"),
    (["compare"], "TIER is missing: python -m deploy compare TIER … --recipe=NAME"),
    (["track", ".", "--track=wandb:x"], "no run in it"),
    (["track", "."], "--track is missing: python -m deploy track RUN … --track=TRACKER"),
]

GAN = {"gan.py": "def build(config, dataset): pass\n"}
# file: (content, the line), in a package my_models
PACKAGES: dict[str, tuple[str, str]] = {
    "gan.py": ("def build(:\n", "cannot import my_models.gan (my_models/gan.py:1: invalid syntax)"),
    "other.py": ("def build(:\n", "my_models/other.py, line 1"),
    "key.pem": ("x", "look like credentials: my_models/key.pem, a credential by its name"),
    "inner/id_rsa": ("x", "look like credentials: my_models/inner/id_rsa, a credential"),
    "a.json": (
        '{"private_key": "-----BEGIN PRIVATE KEY-----MIIEvQ"}',
        "look like credentials: my_models/a.json",
    ),
    "requirements.txt": (
        "tensorflow==2.15.0\n",
        "tensorflow==2.15.0: the trainer needs tensorflow>=2.20,<2.22",
    ),
    ".gitignore": ("__init__.py\n", "ignores its __init__.py: nothing would go along"),
}


def _spec(old: str, new: str, _: str, content: str = GOOD) -> str:
    """Returns a wrong spec; what is replaced must be there."""
    last = content.rindex(old)
    return content[:last] + new + content[last + len(old) :]


def words_of(row: Sequence[str]) -> list[str]:
    """Returns the words of a row of FLAGS."""
    named = re.search("--(recipe|model=|data=digits)", " ".join(row[:-1]))
    return [*row[:-1], *([] if named else [_DIGITS])]


def rows() -> list[Any]:
    """Returns (spec, words, files of a package, line) for each wrong input."""
    wrong: list[Any] = [(_spec(*row), ["wrong.yaml", _DIGITS], {}, row[2]) for row in SPECS]
    wrong += [("", words_of(row), GAN, row[-1]) for row in FLAGS]
    model = ["cpu", "--model=my_models.gan:build", "--data=digits", "--package=my_models"]
    return wrong + [
        ("", model, {**GAN, file: text}, line) for file, (text, line) in PACKAGES.items()
    ]
