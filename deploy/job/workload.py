"""Describes what runs on a tier, a training or a script, and refuses what would fail there."""

import dataclasses
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deploy.job.options import JobOptions
from deploy.job.script import Script
from deploy.packaging.distributions import requirements
from deploy.packaging.images import STARTER, Image, about_installing
from deploy.packaging.packages import TRAINER, CodeArchive, Package, write_copy
from deploy.platform.local import LocalProgram
from deploy.tiers.gcp_config import GcpConfig, checked_address
from deploy.tiers.machine_table import load_machines
from deploy.tiers.spec_rules import Spec, machine_of
from deploy.tiers.tier import ROOT, Tier
from trainer.base.errors import UserError
from trainer.base.run_files.job_directory import open_job_dir
from trainer.base.run_files.job_files import mapping, read_run_info
from trainer.base.run_files.tracking.sender import TAGS
from trainer.base.run_files.tracking.vertex_runs import TENSORBOARD
from trainer.base.settings.own_settings import functions_taking, is_dotted
from trainer.base.settings.request import Overrides
from trainer.base.settings.train_config import DATA_SOURCES, TrainConfig, split_kind
from trainer.base.storage import make_writable
from trainer.base.tracker import read_addresses

TASK = "trainer.task"
LAUNCH = "trainer.launch"
CHECK = "trainer.check"  # the module that checks a tier's GPUs
# the module that runs a script here; a job has it in its archive
WORKER = "deploy.in_job.script_worker"
# the variable in which a job's starter finds JSON: a secret's version for each variable
SECRETS = "TRAINER_SECRETS"

# What the user wants to run, before its settings are resolved for a tier.
Program = Overrides | Script


class WorkerProgram(NamedTuple):
    """Holds what each worker of a job runs.

    `module`: that of the job, "" for that of the tier's file; `preparation`: what in_job/starter.py
        does first, if anything; `packages`: what is shipped; `about`: a line on the image;
        `warnings`: what may be a mistake.
    """

    arguments: Sequence[str]
    module: str = ""
    variables: Mapping[str, str] = {}
    preparation: Mapping[str, Any] = {}
    packages: tuple[Package, ...] = ()
    about: str = ""
    warnings: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class _OnTier:
    """Holds what every workload has."""

    tier: Tier
    _: dataclasses.KW_ONLY
    job_dir: str = ""  # as the user gave it
    subject: str = ""  # begins the names of its jobs
    about: str = ""  # one line that states what runs
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)  # what it reads, by flag

    def local_program(self, job_dir: Path) -> LocalProgram:
        """Returns what runs on this machine: by default the module of the tier's file."""
        return LocalProgram()

    def check_tensorflow(self, image: Image) -> None:
        """Raises UserError if the TensorFlow that is installed in the image does not run on the
        tier's GPUs."""
        accelerator = load_machines().accelerators.get(self.tier.accelerator_type)
        # https://github.com/tensorflow/tensorflow/issues/97387 and 112272: sm_100 and sm_120, also
        # with 2.21.
        if image.plain and accelerator and not accelerator.tensorflow:
            raise UserError(
                f"{self.tier.name}: TensorFlow's wheels do not run on {self.tier.accelerator_type}"
                " (Blackwell): use --image=URI with an image of yours whose TensorFlow does, as"
                " NVIDIA's, or a tier of L4, A100, H100 or H200"
            )

    def tracker_variables(self, spec: Spec, gcp: GcpConfig, image: Image) -> dict[str, str]:
        """Returns what trackers read in a job: tags, the project and the region, and the
        TensorBoard instance."""
        tier = self.tier
        uri = image.uri or spec["workerPoolSpecs"][0]["containerSpec"]["imageUri"]
        tags = {
            "tier": tier.name,
            "image": uri,
            "strategy": tier.strategy,
            "usd_per_hour": tier.price_per_hour,
            "project": gcp.project,
            "region": gcp.region,
        }
        return {
            TAGS: json.dumps(tags),
            "CLOUDSDK_CORE_PROJECT": gcp.project,
            "CLOUDSDK_AI_REGION": gcp.region,
            TENSORBOARD: spec.get("tensorboard", ""),
        }


@dataclasses.dataclass(frozen=True)
class Training(_OnTier):
    """Holds what is to be trained on a tier: the flags that were given, and the settings they
    resolve to there."""

    overrides: Overrides
    config: TrainConfig

    def arguments(self) -> list[str]:
        """Returns the arguments of the trainer, without those in the tier's file."""
        place = [f"--job_dir={self.job_dir}"] if self.job_dir else []
        flags = self.overrides.without("expect_devices", "job_dir").arguments()
        return [*flags, *place, f"--expect_devices={self.tier.accelerators}"]

    def check_folder(self, job_dir: Path) -> None:
        """Raises UserError if a job directory of this machine cannot be written or holds another
        run."""
        open_job_dir(dataclasses.replace(self.config, job_dir=str(job_dir)), lock=False)

    def in_job(
        self,
        spec: Spec,
        options: JobOptions,
        gcp: GcpConfig,
        image: Image,
        packages: Sequence[Package],
    ) -> WorkerProgram:
        """Returns what the workers of a job with this spec run. Raises UserError for what would
        fail in the image."""
        tier = self.tier
        self._check_image(image, packages)
        # Its flags: a recipe's file does not exist there, so its settings go as flags.
        overrides = self.overrides
        if overrides.names_recipe_file:
            overrides = Overrides.read(
                {**overrides.of_recipe, **overrides.without("recipe").values}, overrides.folder
            )
        arguments = dataclasses.replace(self, overrides=overrides, job_dir="").arguments()
        module = ""
        if options.check:
            module = CHECK
            arguments.append("--on_gpus")
        # What is installed first: nothing in an image of one's own, which then only may read
        # secrets.
        archives = tuple(package for package in packages if isinstance(package, CodeArchive))
        wheels = tuple(
            package for package in packages if image.plain and not isinstance(package, CodeArchive)
        )
        shipped = (*wheels, *archives)
        preparation: dict[str, Any] = {}
        if image.plain or archives or SECRETS in json.dumps(spec):
            of_trackers = tracker_packages(self.config.track)
            installed = [*requirements(tier.accelerators), *of_trackers] if image.plain else []
            sources = [[package.uri(gcp.bucket), package.sha256] for package in wheels]
            preparation = {"requirements": installed, "packages": sources}
            for archive in archives:
                preparation["code"] = [archive.uri(gcp.bucket), archive.sha256]
            shipped = (*shipped, STARTER)
        variables = self.tracker_variables(spec, gcp, image) if self.config.track else {}
        about = about_installing(tier, image.uri, "network" in spec) if image.plain else ""
        warned = [*warnings(tier, self.config, json.dumps(spec))]
        return WorkerProgram(arguments, module, variables, preparation, shipped, about, warned)

    def _check_image(self, image: Image, packages: Sequence[Package]) -> None:
        """Raises UserError for what the image, or what is installed in it, cannot run."""
        tier = self.tier
        self.check_tensorflow(image)
        if image.plain or image.built:
            check_inputs(self.config, packages)
        check_trackers(self.config.track, image, packages)
        for index, pool in enumerate(tier.spec["workerPoolSpecs"] if image.plain else ()):
            module = pool.get("pythonPackageSpec", {}).get("pythonModule", TASK)
            check_module(
                f"{tier.name}: workerPoolSpecs[{index}].pythonModule",
                module,
                module,
                packages,
                runs=True,
            )


@dataclasses.dataclass(frozen=True)
class ScriptRun(_OnTier):
    """Holds a script that is to run on a tier."""

    script: Script

    def arguments(self) -> list[str]:
        """Returns the arguments of the script, or of `trainer.launch` with it."""
        expected = f"--expect_devices={self.tier.accelerators}"
        return (
            [expected, *self.script.launch_arguments()]
            if self.script.launched
            else list(self.script.words)
        )

    def local_program(self, job_dir: Path) -> LocalProgram:
        """Copies what goes along to JOB_DIR/code, and returns what runs it there."""
        code = job_dir / "code"
        write_copy(Package(self.script.subject, "0", self.script.files), code)
        if self.script.launched:
            return LocalProgram(LAUNCH, {"PYTHONPATH": str(ROOT)}, code)
        instructions = {**self._instructions(str(job_dir)), "folder": str(code)}
        return LocalProgram(WORKER, {"TRAINER_SCRIPT": json.dumps(instructions)})

    def check_folder(self, job_dir: Path) -> None:
        """Raises UserError if a job directory of this machine cannot be written or holds another
        run."""
        if self.script.launched:
            open_job_dir(dataclasses.replace(self.script.config, job_dir=str(job_dir)), lock=False)
            return
        make_writable(job_dir, "job_dir")
        info, _ = read_run_info(job_dir)
        held = mapping(info, "config").get("script", "a recipe" if info else self.script.name)
        if held != self.script.name:
            raise UserError(f"job_dir={job_dir}: it holds a run of {held}: use another --job_dir")

    def in_job(
        self,
        spec: Spec,
        options: JobOptions,
        gcp: GcpConfig,
        image: Image,
        packages: Sequence[Package],
    ) -> WorkerProgram:
        """Returns what the workers of a job run. Raises UserError for what would fail in the
        image."""
        script = self.script
        tier = self.tier
        archive, *ours = packages
        needed = script.requirements(tier.accelerators, plain=image.plain)
        has_options = any(line.startswith("-") for line in needed)
        installed = ["-r", "requirements.txt"] if has_options else needed
        preparation: dict[str, Any] = {
            "code": [archive.uri(gcp.bucket), archive.sha256],
            "packages": [],
        }
        if not script.launched:
            instructions = self._instructions(spec["baseOutputDirectory"]["outputUriPrefix"])
            preparation |= {"requirements": installed, "script": instructions}
            contents = f"with {' '.join(needed)}" if needed else "with the standard library alone"
            about = (
                f"runs in {image.uri}, {contents}: --image=URI names another" if image.plain else ""
            )
            on_spot = (
                "SPOT: the script is ended by SIGTERM and started again: only what it saved itself,"
                " as in AIP_CHECKPOINT_DIR, is left"
            )
            warned = [on_spot] if tier.strategy == "SPOT" else []
            return WorkerProgram(
                script.words,
                preparation=preparation,
                packages=(archive, STARTER),
                about=about,
                warnings=warned,
            )
        self.check_tensorflow(image)
        config = script.config
        check_trackers(config.track, image, packages)
        about = ""
        if image.plain:
            # A version of TensorFlow or Keras that the user lists wins.
            named = {re.split(r"[^\w.-]", line)[0].lower() for line in needed}
            base = [
                line.partition("==")[0] if re.split(r"\W", line)[0] in named else line
                for line in requirements(tier.accelerators)
            ]
            installed = [*base, *tracker_packages(config.track), *installed]
            preparation["packages"] = [
                [package.uri(gcp.bucket), package.sha256] for package in ours
            ]
            about = about_installing(tier, image.uri, "network" in spec, needed)
        preparation["requirements"] = installed
        variables = self.tracker_variables(spec, gcp, image) if config.track else {}
        warned = [*warnings(tier, config, json.dumps(spec))]
        return WorkerProgram(
            self.arguments(),
            LAUNCH,
            variables,
            preparation,
            (archive, *ours, STARTER),
            about,
            warned,
        )

    def _instructions(self, job_dir: str) -> dict[str, Any]:
        """Returns what `script_worker` needs to know, except the folder of the code."""
        about = {
            "config": {"script": self.script.name, "arguments": list(self.script.words)},
            "cluster": {"workers": self.tier.workers, "replicas": self.tier.devices},
            "accelerators": self.tier.accelerators,
        }
        return {"command": list(self.script.command), "job_dir": job_dir, "about": about}


@dataclasses.dataclass(frozen=True)
class Prediction(_OnTier):
    """Holds a prediction for a file of rows, which runs in the image of a registered model."""

    def arguments(self) -> list[str]:
        """Returns the arguments of trainer.predict."""
        return [self.inputs["model"], f"--rows_file={self.inputs['rows']}", f"--out={self.job_dir}"]

    def in_job(
        self,
        spec: Spec,
        options: JobOptions,
        gcp: GcpConfig,
        image: Image,
        packages: Sequence[Package],
    ) -> WorkerProgram:
        """Returns what the worker of a job runs."""
        pool = spec["workerPoolSpecs"][0]
        # those of the tier's file train
        (pool.get("pythonPackageSpec") or pool["containerSpec"]).pop("args", None)
        about = f"runs in {image.uri}, the image of the version"
        return WorkerProgram(self.arguments(), "trainer.predict", about=about)


Workload = Training | ScriptRun | Prediction


def workload_on(tier: Tier, program: Program) -> Training | ScriptRun:
    """Returns what runs on `tier`, its settings resolved. Raises UserError for what the trainer
    would refuse there."""
    if isinstance(program, Script):
        if program.launched:
            config = program.config
            rows = tier.workers * (config.replicas or tier.accelerators or 1) * config.micro_batches
            rows = config.virtual_replicas or rows
            # that of `fit` is not known
            check_devices(tier, dataclasses.replace(config, global_batch_size=rows))
        return ScriptRun(
            tier, program, job_dir=program.job_dir, subject=program.subject, about=program.about
        )
    expected = tier.accelerators
    count = program.values.get("expect_devices", expected)
    if count != expected:
        raise UserError(
            f"--expect_devices={count}: the workers of {tier.name} have {expected} accelerators:"
            " drop the flag"
        )
    # The settings: those of the tier's file, over which the user's win.
    pool = tier.spec["workerPoolSpecs"][0]
    arguments = (pool.get("pythonPackageSpec") or pool.get("containerSpec") or {}).get("args", [])
    of_file = Overrides.parse(arguments, program.folder)
    config = of_file.replace(**{**program.values, "expect_devices": expected}).resolve()
    check_devices(tier, config)
    # What runs, in words.
    subject = str(program.values.get("recipe") or program.values.get("model") or "job")
    subject = subject.rsplit("/", 1)[-1].removesuffix(".yaml").replace("_", "-").replace(":", "-")
    by_default = not config.recipe and config.model == TrainConfig.model
    trains = (
        f"no recipe: trains {config.model} (the default)"
        if by_default
        else f"trains {config.model}"
    )
    length = f"{config.steps:,} step" if config.steps else f"{config.epochs or 1:,} epoch"
    plural = "" if (config.steps or config.epochs or 1) == 1 else "s"
    about = f"{trains} on {config.data}, global batch {config.global_batch_size}, {length}{plural}"
    return Training(
        tier,
        program,
        config,
        job_dir=config.job_dir,
        subject=subject,
        about=about,
        inputs=config.inputs,
    )


SPOT_INTERVAL_S = 15 * 60  # the most work that a preemption should cost


def check_devices(tier: Tier, config: TrainConfig) -> None:
    """Raises UserError unless a chief and identical workers can train on the tier, and the batch
    divides over them."""
    pools = tier.spec["workerPoolSpecs"]
    if len(pools) > 2:
        raise UserError(
            f"{tier.name}: workerPoolSpecs[2]: a chief and its workers train, without parameter"
            " servers or evaluators: remove the pool, or run a script of yours"
        )
    if len(set(map(machine_of, pools))) > 1:
        raise UserError(
            f"{tier.name}: workerPoolSpecs[1] has other machines than workerPoolSpecs[0]: every"
            " worker gets the same share of a batch: give both the same machineSpec, or run a"
            " script of yours"
        )
    if tier.accelerators and config.replicas > tier.accelerators:
        raise UserError(
            f"replicas={config.replicas}: a worker of {tier.name} has {tier.accelerators}"
            " accelerators: drop the flag, or take a larger tier"
        )
    if tier.workers > 1 and config.strategy in ("one_device", "mirrored"):
        raise UserError(
            f"strategy={config.strategy}: the {tier.workers} workers of {tier.name} would each"
            " train alone: drop it"
        )
    if tier.workers == 1 and config.strategy == "multi_worker":
        raise UserError(
            f"strategy=multi_worker: {tier.name} has one worker: drop the flag, or take a tier of"
            " several"
        )
    devices = tier.workers * (config.replicas or tier.accelerators or 1)
    try:
        config.rows_per_replica(devices)
    except UserError as error:
        raise UserError(f"{tier.name}: {error}") from None


# Values of inputs that are no paths, as the image has or can fetch what they name; other inputs may
# be empty.
_NAMED = {"data": DATA_SOURCES, "weights": ("imagenet", "none"), "fid_features": ("inception",)}


def check_inputs(config: TrainConfig, packages: Sequence[Package]) -> None:
    """Raises UserError if a setting names something that the job cannot reach, such as this
    machine's disk."""
    for field in (*config.inputs, "model", "callbacks"):
        value = getattr(config, field)
        address = value[value.find("gs:/") :]
        if value in _NAMED.get(field, ("",)):
            continue
        if address.startswith("gs:/"):
            checked_address(field, address)
        elif is_dotted(value):
            check_module(field, value, value.split(":")[0], packages)
        elif field in config.inputs and not value.split(":")[-1].startswith("/gcs/"):
            kind, path = split_kind(value)
            remote = f"{kind}{':' if kind else ''}gs://BUCKET/{Path(path).name}"
            copy = f"gcloud storage cp -r {shlex.quote(path)} gs://BUCKET/"
            raise UserError(
                f"{field}={value}: {UNREACHABLE}: copy it with `{copy}` and use --{field}={remote}"
            )


UNREACHABLE = "the job's machines cannot read this disk, only gs://BUCKET/… and /gcs/BUCKET/…"


def check_module(
    field: str, value: str, module: str, packages: Sequence[Package], *, runs: bool = False
) -> None:
    """Raises UserError unless the packages of the job contain the module. `runs`: as a program, not
    as an import."""
    top = module.split(".")[0]
    path = module.replace(".", "/")
    package = next(
        (package for package in packages if package.name == (TRAINER if top == "trainer" else top)),
        None,
    )
    files = {f"{path}.py", f"{path}/__main__.py" if runs else f"{path}/__init__.py"}
    if package is None and (top != "trainer" or packages):
        raise UserError(
            f"{field}={value}: the module {top} is not in the job: use --package=FOLDER or"
            f" {top}.py, or an --image= with it"
        )
    if package and package.files and not files & package.files.keys():
        raise UserError(
            f"{field}={value}: the module {module} is not in the package {top}: check its name, and"
            " .gitignore"
        )


def warnings(tier: Tier, config: TrainConfig, spec: str) -> Iterator[str]:
    """Yields warnings about what is allowed but may be a mistake. `spec`: that of the job, as
    JSON."""
    for address in read_addresses(config.track):
        names = _TOKENS.get(address.kind, ())
        if names and not any(name in spec for name in names):
            yield (
                f"track={address.text}: the job gets no login: add"
                f" --secret={names[0]}=projects/P/secrets/S/versions/V"
            )
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        # A setting of the user's own functions, of which we do not know whether it names a file.
        own = functions_taking(field) and field.name not in config.inputs and isinstance(value, str)
        if own and (Path(value).is_file() or ("/" in value and Path(value).exists())):
            yield f"{field.name}={value}: this path exists here, but {UNREACHABLE}"
    # 0: off
    steps = config.checkpoint_every_steps
    minutes = config.checkpoint_every_minutes
    # A step is taken to last a second at most.
    if tier.strategy == "SPOT" and not (
        0 < steps <= SPOT_INTERVAL_S or 0 < minutes <= SPOT_INTERVAL_S / 60
    ):
        yield (
            f"SPOT with checkpoint_every_steps={steps} and checkpoint_every_minutes={minutes:g}: a"
            f" preemption may lose more than {SPOT_INTERVAL_S // 60} minutes: use"
            f" --checkpoint_every_minutes={SPOT_INTERVAL_S // 60}"
        )


def tracker_packages(track: Sequence[str]) -> list[str]:
    """Returns what pip installs for the trackers of a run."""
    return [
        REQUIREMENTS[address.kind]
        for address in read_addresses(track)
        if address.kind in REQUIREMENTS
    ]


REQUIREMENTS = {"mlflow": "mlflow-skinny", "wandb": "wandb"}  # as the extras of setup.py
_TOKENS = {
    "mlflow": ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD"),
    "wandb": ("WANDB_API_KEY",),
}
_ON_THIS_MACHINE = re.compile(r"sqlite:|https?://(localhost|127\.|0\.0\.0\.0|\[::1\])")


def check_trackers(track: Sequence[str], image: Image, packages: Sequence[Package]) -> None:
    """Raises UserError for a tracker that the job's machines cannot reach, or whose package its
    image lacks."""
    for address in read_addresses(track):
        if ":" in address.kind and image.plain:
            check_module("track", address.text, address.kind.partition(":")[0], packages)
        if _ON_THIS_MACHINE.match(address.server):
            raise UserError(
                f"track={address.text} is on this machine, which the job cannot reach: name a"
                " server, or send the run when it has ended: `python -m deploy track gs://…"
                f" --track={address.text}`"
            )
        if image.built and address.kind in REQUIREMENTS:
            raise UserError(
                f"track={address.text}: the job's image has no {REQUIREMENTS.get(address.kind)}:"
                " use --image=install, or an image of yours that has it"
            )
