"""Says what pip installs in a job: for the trainer, and for what a user's code imports, by what is
installed here."""

import itertools
import re
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from deploy.packaging.sources import REQUIREMENT_FILES
from deploy.tiers.tier import beside
from trainer.base.errors import UserError, reason
from trainer.base.run_files.plan_file import versions
from trainer.base.script import Import

PYTHON = "3.12"  # of a plain image
# What pip installs for the trainer; and the versions of TensorFlow and Keras among it, up to the
# newest minor that was tried.
_SETUP = beside("setup.py").read_text(encoding="utf-8")
INSTALLED = re.findall(
    r'^ *"(.+?)",', _SETUP.partition("install_requires=[")[2].partition("]")[0], re.MULTILINE
)
ADMITTED = dict(re.findall(r'"(tensorflow|keras)(>=[\d.]+,<[\d.]+)"', _SETUP))
# The modules of a plain image: the standard library of Python 3.12, so without those that it
# removed, whichever Python runs here; pip; and, beside a script that runs as it is, our
# vertex_report.
IN_IMAGE = (sys.stdlib_module_names | {"pip", "vertex_report"}) - {
    "asynchat",
    "asyncore",
    "distutils",
    "imp",
    "smtpd",
}
OURS = ("trainer", "deploy", "vertex_trainer")
# The name by which pip installs a package, where it differs from the name that is imported.
_BY_PIP = {
    "PIL": "pillow",
    "cv2": "opencv-python-headless",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
    "skimage": "scikit-image",
    "bs4": "beautifulsoup4",
    "dateutil": "python-dateutil",
}


def requirements(gpus: int) -> list[str]:
    """Returns the requirements that pip installs beside the job's packages on a machine with this
    number of GPUs."""
    extras = {"tensorflow": "[and-cuda]"} if gpus else {}
    pins = versions_there()
    return [f"{name}{extras.get(name, '')}=={pins[name]}" for name in pins]


def versions_there() -> dict[str, str]:
    """Returns the versions of TensorFlow and Keras that a job installs, in pip's form: those of
    this machine.

    So a job runs what was tried here, and each restart installs the same. If this machine has a
    version that the trainer does not admit, or that is not a release, the job gets the newest minor
    version that was tried with the trainer. All admitted versions exist for Python 3.11 to 3.13.
    """
    from packaging.specifiers import SpecifierSet  # TensorFlow and Keras need it too

    chosen = {}
    for name, admitted in ADMITTED.items():
        installed = versions().get(name, "")
        major, minor = admitted.rpartition("<")[2].split(".")
        usable = re.fullmatch(r"[\d.]+", installed) and installed in SpecifierSet(admitted)
        chosen[name] = installed if usable else f"{major}.{int(minor) - 1}.*"
    return chosen


def about_versions() -> str:
    """Returns, as a part of a line, whence a job's versions of TensorFlow and Keras come."""
    replaced = [name for name, version in versions_there().items() if "*" in version]
    unusable = " and ".join(f"{name} {versions().get(name, '(missing)')}" for name in replaced)
    if not unusable:
        return ", as here,"
    return f", the newest tried, as a job cannot have the {unusable} of this machine,"


def _requirement(line: str) -> Any | None:
    """Returns a line as a packaging Requirement; None if it is an option, a file or nothing that
    pip knows."""
    # TensorFlow and Keras need it too
    from packaging.requirements import InvalidRequirement, Requirement

    with suppress(InvalidRequirement):
        return Requirement(line)
    return None


def check_requirement(line: str) -> None:
    """Raises UserError for a line of requirements.txt that excludes all versions of TensorFlow or
    Keras in ADMITTED.

    The job would replace the image's version by it, or pip would find no solution.
    """
    requirement = _requirement(line)
    if not requirement:
        return  # building the package says why
    name = re.sub("[-_.](cpu|gpu|intel)$", "", requirement.name.lower())
    allowed = requirement.specifier & ADMITTED.get(name, "")
    # Every release that there may be, from 2.12 on.
    numbers = itertools.product((2, 3), range(12, 99), range(20))
    releases = (f"{major}.{minor}.{patch}" for major, minor, patch in numbers)
    if name in ADMITTED and not any(allowed.filter(releases, prereleases=True)):
        raise UserError(
            f"requirements.txt: {line}: the trainer needs {name}{ADMITTED[name]}: drop the line, so"
            " that the image's own is used"
        )


def listed_requirements(folder: Path) -> list[str] | None:
    """Returns what the folder's requirements.txt lists, or the [project] of its pyproject.toml;
    None without them.

    Raises UserError for a pyproject.toml that is none.
    """
    listed, project = (folder / name for name in REQUIREMENT_FILES)
    if listed.is_file():
        lines = listed.read_text(encoding="utf-8", errors="replace").splitlines()
        return [*filter(None, (re.split(r"(?:^|\s)#", line)[0].strip() for line in lines))]
    try:
        content = tomllib.loads(project.read_text(encoding="utf-8")) if project.is_file() else {}
        dependencies = content.get("project", {}).get("dependencies")
        return None if dependencies is None else [*map(str, dependencies)]
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{project}: {reason(error)}: correct it, or write a {REQUIREMENT_FILES[0]}"
        ) from None


@cache
def _by_module() -> Mapping[str, Sequence[str]]:
    """Returns the distributions that are installed here, by the top-level names that they can be
    imported as."""
    return metadata.packages_distributions()


def canonical(name: str) -> str:
    """Returns a distribution's name as pip compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def with_dependencies(requirements: Iterable[str]) -> set[str]:
    """Returns the canonical names of the distributions that pip installs for requirements, as far
    as is known here."""
    extras = set[tuple[str, str]]()  # of each distribution; "": none
    waiting = [(line, "") for line in requirements]
    while waiting:
        line, extra = waiting.pop()
        requirement = _requirement(line)
        if not requirement:
            continue
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonical(requirement.name)
        for extra in {*requirement.extras, ""}:
            if (name, extra) not in extras:
                extras.add((name, extra))
                with suppress(metadata.PackageNotFoundError):
                    waiting += [(line, extra) for line in metadata.requires(name) or ()]
    return {name for name, _ in extras}


def requirements_of(
    imports: Iterable[Import],
    present: Collection[str],
    *,
    trains: bool,
    gpus: int = 0,
    force: bool = False,
) -> list[str]:
    """Returns the requirements for what code imports: the versions of this machine, or later ones
    for another Python.

    `present`: top-level names that go along; `trains`: whether this package, with TensorFlow, is
        installed as well; `gpus`: of the machine. Raises UserError, unless `force`, for what is not
        installed here, or comes from no package index.
    """
    installed = with_dependencies(INSTALLED) if trains else set[str]()
    available = {*present, *IN_IMAGE, *(OURS if trains else ())}
    same_python = f"{sys.version_info[0]}.{sys.version_info[1]}" == PYTHON
    # by distribution, and by module
    lines = dict[str, str]()
    problems = dict[str, str]()
    for statement in imports:
        top = statement.top
        if not top or top in available:
            continue
        place = f"{statement.file}, line {statement.line}, imports {top}"
        # The distributions that have the module; of a namespace, such as google, those alone that
        # have what is imported of it, if any has.
        names = {canonical(name): name for name in _by_module().get(top, ())}
        if len(names) > 1:
            path = statement.module.replace(".", "/")
            inner = [f"{path}/{name}" for name in statement.names]
            for modules in ([path], inner):
                starts = tuple(f"{module}{end}" for module in modules for end in "./")
                matching = {}
                for short, name in names.items():
                    if any(f"{file}".startswith(starts) for file in metadata.files(name) or ()):
                        matching[short] = name
                names = matching or names
        if not names and statement.certain:
            problems[top] = f"{place}, which is not installed here"
        # The line of each: its version here, unless that comes from no package index.
        for short in sorted(names.keys() - installed):
            distribution = metadata.distribution(short)
            name = names[short]
            version = distribution.version
            if short in versions_there():
                lines |= zip(versions_there(), requirements(gpus), strict=True)
            elif not (distribution.read_text("direct_url.json") or "+" in version):
                lines[short] = f"{name}{'==' if same_python else '>='}{version}"
            elif not statement.optional:
                problems[top] = f"{place}: {name} {version} comes from no package index"
    if problems and not force:
        needed = ", ".join([*lines.values(), *(_BY_PIP.get(top, top) for top in problems)])
        raise UserError(
            f"{'; '.join(problems.values())}: install it here, or write a {REQUIREMENT_FILES[0]}"
            f" beside it with all that it needs: {needed}; or use --force"
        )
    return [*lines.values()]


def hidden_modules(requirements: Sequence[str], present: Collection[str]) -> dict[str, str]:
    """Returns the modules that are installed here and that a job with these requirements lacks.

    Each with the line that would install it. `present`: top-level names that go along. Where a
    requirement is an option or a file, nothing is known and nothing returned.
    """
    if None in map(_requirement, requirements):
        return {}
    installed = with_dependencies(requirements)
    available = {*present, *IN_IMAGE, *OURS}
    hidden = {}
    for top, names in _by_module().items():
        if top not in available and not installed & {*map(canonical, names)}:
            hidden[top] = f"{names[0]}>={metadata.version(names[0])}"
    return hidden
