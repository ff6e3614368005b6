"""Turns keyword-only parameters of a user's functions into settings: fields of a subclass of the
run's config.

`def build(config, dataset, *, depth: int = 2)` gives the flag --depth, the key `depth` of a recipe
and of run.json, and `config.depth`. Whatever handles the fields of a settings class handles these
too.

The parameters are read from the syntax tree of the source, at the desk and in the job alike, so
that both know the same settings. An import would run the user's package, which may need TensorFlow:
too slow at the desk, and too early in a job, where nothing may run before the strategy is made. A
function that its module does not define by `def` has no settings, and `OwnSettings.hint` says why.
"""

import ast
import dataclasses
import gc
import importlib.util
import os
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, Optional, Union, cast, get_args, get_origin

from trainer.base.errors import UserError, reason
from trainer.base.settings.fields import Field, Setting, Values, coerce, fields_of, nearest, setting
from trainer.base.settings.model_settings import MODELS
from trainer.base.settings.train_config import DATA_KINDS, DATA_SOURCES, MAY_CHANGE, TrainConfig

REQUIRED = dataclasses.MISSING  # the default of a parameter without one
_PLAIN = (bool, int, float, str)
_NAMES: dict[str, Any] = {  # names that the type of a parameter may use
    **{kind.__name__: kind for kind in _PLAIN},
    "Annotated": Annotated,
    "Literal": Literal,
    "Optional": Optional,
    "Union": Union,
}
_ALLOWED = (
    "use bool, int, float, str, a Literal of values of one of them, or any of these with `| None`"
)
_MOST_IMPORTS = 20  # to follow for a name: they may form a circle
# in a field's metadata: the settings that name a function which takes it
_FUNCTIONS_KEY = "functions"


class Unreadable(Exception):
    """Reports that the parameters of a function cannot be read from a source; the text says why."""


def read_parameters(path: str, origin: str, first: str = "") -> dict[str, Field]:
    """Returns the keyword-only parameters of `package.module:function`, or of a class, from its
    source, as fields.

    first: a folder that is searched before Python's own path; origin: the setting that names the
        function, and its value. Parameters whose names begin with `_` are left out. Raises
        UserError if a parameter cannot be a setting or if the source cannot be imported, Unreadable
        if the module does not define the function by `def`.
    """
    module_name, _, name = path.partition(":")
    module = _Module.parse(module_name, first, origin)
    for _ in range(_MOST_IMPORTS):
        if name not in module.imports:
            break
        module_name, name = module.imports[name]
        module = _Module.parse(module_name, first, origin)
    node = module.definition_of(name)
    if isinstance(node, ast.ClassDef):
        methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
        methods = [method for method in methods if method.name == "__init__"]
        if not methods:
            raise Unreadable(f"{name} is a class without an __init__ of its own")
        node = methods[-1]
    assert isinstance(node, ast.FunctionDef)
    parameters = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    settings = {}
    for parameter, default in parameters:
        if parameter.arg[0] != "_":
            settings[parameter.arg] = _field(module, parameter, default)
    return settings


def refuse_missing_module(name: str, origin: str) -> None:
    """Raises UserError, with the nearest name, if Python does not find the package of a module.

    Imports nothing.

    origin: the setting that names the module, and its value.
    """
    top = name.partition(".")[0]
    missing = f"{origin}: cannot import {name} (No module named {top!r})"
    if name.endswith(".py"):
        right = name.removesuffix(".py").replace("/", ".")
        raise UserError(
            f"{missing}: a module has no .py: use --{origin.replace(f'{name}:', f'{right}:')}"
        )
    # the import itself will explain these
    with suppress(ImportError, ValueError, AttributeError, TypeError, OSError):
        if top not in sys.modules and _spec(top, "") is None:
            beside = [module.name for module in pkgutil.iter_modules([os.getcwd()])]
            raise UserError(
                f"{missing}{nearest(top, beside)} Run the command in the folder that holds it"
            )


def _spec(name: str, first: str) -> ModuleSpec | None:
    """Returns the import spec of a module, or None. importlib.util.find_spec would import the
    packages around it.

    first: a folder that is searched before the current one.
    """
    top, *rest = name.split(".")
    folders = [folder for folder in (first, os.getcwd()) if folder]
    spec = None
    if top != __name__.split(".")[0]:  # no folder of that name replaces this package
        spec = PathFinder.find_spec(top, folders)
    if spec is None or spec.origin is None:  # a folder without __init__.py comes after all others
        spec = importlib.util.find_spec(top) or spec
    dotted = top
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        dotted = f"{dotted}.{part}"
        spec = PathFinder.find_spec(dotted, [*spec.submodule_search_locations])
    return spec


@dataclass(frozen=True)
class _Module:
    """Holds the syntax tree of a module, which is parsed without running any code.

    origin: see `read_parameters`; constants: the nodes that names of the module are bound to by an
        assignment; imports: the module and the name there of what is imported by `from`.
    """

    name: str
    origin: str
    file: str
    source: str
    tree: ast.Module
    constants: Mapping[str, ast.expr]
    imports: Mapping[str, tuple[str, str]]

    @classmethod
    def parse(cls, name: str, first: str, origin: str) -> "_Module":
        """Finds a module as Python's import would, and parses it.

        Raises UserError if it cannot be imported, Unreadable if it is not found or nested too
        deeply.
        """
        file = name
        try:
            spec = _spec(name, first)
            if spec is None:
                raise Unreadable(f"{name} is not found here")
            source = getattr(spec.loader, "get_source", lambda _: None)(spec.name)
            if source is None:
                raise Unreadable(f"{name} has no source")
            file = (spec.origin or name).removeprefix(os.getcwd() + os.sep)
            # Python 3.11 fails if another thread parses at the same time, which a garbage
            # collection can let happen: https://github.com/python/cpython/issues/106905
            collects = gc.isenabled()
            gc.disable()
            try:
                tree = ast.parse(source)
            finally:
                if collects:
                    gc.enable()
        except (SyntaxError, MemoryError) as error:
            place = reason(error)
            # it has none for an unknown encoding
            if isinstance(error, SyntaxError) and error.lineno:
                place = f"{file}:{error.lineno}: {error.msg}"
            raise UserError(f"{origin}: cannot import {name} ({place})") from None
        except (
            RecursionError,
            ImportError,
            ValueError,
            AttributeError,
            TypeError,
            OSError,
        ) as error:
            raise Unreadable(f"{name} cannot be read: {reason(error)}") from None
        # The names that it binds by an assignment or an import.
        package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
        constants: dict[str, ast.expr] = {}
        imports: dict[str, tuple[str, str]] = {}
        for node in tree.body:
            if isinstance(node, ast.ImportFrom):
                # A relative import out of the package is explained by the import itself.
                with suppress(ImportError):
                    module = importlib.util.resolve_name(
                        "." * node.level + (node.module or ""), package
                    )
                    for alias in node.names:
                        imports[alias.asname or alias.name] = (module, alias.name)
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                imports.pop(node.name, None)
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
                constants |= dict.fromkeys(names, node.value)
        return cls(name, origin, file, source, tree, constants, imports)

    def definition_of(self, name: str) -> ast.FunctionDef | ast.ClassDef:
        """Returns the last definition of a function or class. Raises Unreadable if there is none.

        Raises UserError if the module cannot have such a name.
        """
        kinds = (ast.FunctionDef, ast.ClassDef)
        definitions = [node for node in self.tree.body if isinstance(node, kinds)]
        for node in reversed(definitions):
            if node.name == name:
                return node
        # Ways to bind a name other than a definition.
        if re.search(
            rf"\b({re.escape(name)}|__getattr__|globals|exec|setattr)\b|import \*", self.source
        ):
            raise Unreadable(
                f"{self.name} does not define {name} by `def`: name the module that does"
            )
        names = [node.name for node in definitions]
        raise UserError(f"{self.origin}: {self.name} has no function {name}{nearest(name, names)}")

    def value_of(self, node: ast.AST | None) -> Any:
        """Evaluates a literal, a type, or a constant of this module that is one; runs no code.

        Raises ValueError or TypeError for anything else.
        """
        match node:
            case ast.Constant(value=value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.value_of(operand)
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in _NAMES:
                return _NAMES[name]
            case ast.Name(id=name) if name in self.constants:
                constant = self.constants[name]
                return self.value_of(None if isinstance(constant, ast.Name) else constant)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self.value_of(left) | self.value_of(right)
            case ast.Subscript(value=value, slice=part):
                return self.value_of(value)[self.value_of(part)]
            case ast.Tuple(elts=parts):
                return tuple(map(self.value_of, parts))
            case ast.Call(
                func=ast.Name(id="Setting") | ast.Attribute(attr="Setting"),
                args=parts,
                keywords=words,
            ):
                keywords = {word.arg or "": self.value_of(word.value) for word in words}
                return Setting(*map(self.value_of, parts), **keywords)
        raise ValueError


def _field(module: _Module, parameter: ast.arg, default: ast.expr | None) -> Field:
    """Returns a parameter as a field.

    Raises UserError if its type or its default cannot be those of a setting.
    """
    subject = f"{module.origin}: {module.file}:{parameter.lineno}: its setting {parameter.arg}"
    # Its default and its type, from the source.
    try:
        value = REQUIRED if default is None else module.value_of(default)
    except (ValueError, TypeError, RecursionError):
        raise UserError(
            f"{subject} has a default that is not a literal: write the value itself, or the name of"
            " a constant of this module that is one"
        ) from None
    if parameter.annotation is None and type(value) not in _PLAIN:
        raise UserError(f"{subject} has no type: {_ALLOWED}")
    try:
        annotation: Any = type(value)
        if parameter.annotation is not None:
            annotation = module.value_of(parameter.annotation)
        kinds, about = _types_and_setting(annotation)
        (kind,) = kinds - {type(None)}
        # Only a number has limits, which are numbers.
        limits = {about.minimum, about.maximum, about.above} - {None}
        allowed = (int, float) if limits else _PLAIN
        if kind not in allowed or not {*map(type, limits)} <= {int, float}:
            raise ValueError
    except (ValueError, TypeError, RecursionError):
        text = ast.unparse(parameter.annotation or parameter)[:100]
        raise UserError(f"{subject} is of type {text}: {_ALLOWED}") from None
    # The field, whose default must be of its type and within its limits.
    optional = type(None) in kinds
    field: Field = setting(
        value,
        **{**vars(about), "meaning": about.meaning or kind.__name__, "may_be_empty": value == ""},
    )
    field.name = parameter.arg
    field.type = kind | None if optional else kind
    fits = value is REQUIRED or (value is None and optional) or type(value) is kind
    if not fits and not (kind is float and type(value) is int):
        raise UserError(f"{subject} is {type_and_default(field)}: the default must be of its type")
    try:
        field.default = value if value is REQUIRED else coerce(field, value)
    except UserError as error:
        raise UserError(f"{subject}: its default does not fit: {error}") from None
    return field


def type_and_default(field: Field) -> str:
    """Returns type and default of a field for people: `int | None = 3`."""
    choices = field.metadata["choices"]
    optional = isinstance(field.type, UnionType)
    kind = field.type if isinstance(field.type, type) else get_args(field.type)[0]
    name = f"Literal{[*choices]}" if choices else kind.__name__
    default = "" if field.default is REQUIRED else f" = {field.default!r}"
    return f"{name}{' | None' if optional else ''}{default}"


def _types_and_setting(annotation: Any) -> tuple[set[type], Setting]:
    """Returns the plain types that an annotation allows, and the Setting that Literal and Annotated
    add to them."""
    origin = get_origin(annotation)
    parts = get_args(annotation)
    if origin is Literal:
        choices = tuple(part for part in parts if part is not None)
        return {*map(type, parts)}, Setting("", choices=choices)
    if origin is Annotated:
        kinds, about = _types_and_setting(parts[0])
        for part in parts[1:]:
            if isinstance(part, Setting):
                about = replace(part, choices=about.choices)
            elif isinstance(part, str):
                about = replace(about, meaning=part)
        return kinds, about
    if origin in (Union, UnionType):
        alternatives = [_types_and_setting(part) for part in parts]
        about = max((about for _, about in alternatives), key=lambda about: about != Setting(""))
        return set().union(*(kinds for kinds, _ in alternatives)), about
    return {annotation}, Setting("")


FUNCTIONS = ("model", "data", "callbacks")  # settings that may name a function with settings


def is_dotted(value: str) -> bool:
    """Returns whether the value is a package.module:function, not a kind:path."""
    return (
        re.fullmatch(r"[^\W\d][\w.]*:[^\W\d]\w*", value) is not None
        and value.split(":")[0] not in DATA_KINDS
    )


def is_named(data: str) -> bool:
    """Returns whether `data` is a source's name or a user's function, not a path."""
    return data in DATA_SOURCES or (is_dotted(data) and not os.path.exists(data))


def has_own_code(config: TrainConfig) -> bool:
    """Returns whether the model or the data come from a function of the user."""
    return config.model not in MODELS or (is_named(config.data) and config.data not in DATA_SOURCES)


class OwnSettings:
    """Holds the settings that a run has: `settings` is the config of its model, with a field for
    each of its functions.

    values: those of the settings in FUNCTIONS; values that name no function are ignored; first:
        a folder that is searched before Python's own path. Raises UserError if a parameter cannot
        be a setting.
    """

    def __init__(self, values: Values, first: str = "") -> None:
        model = str(values.get("model", ""))
        self._model = model
        self._functions: list[str] = []  # the user's functions, as model=mine.nets:build
        self._unreadable: list[str] = []  # functions whose settings are not known, and why
        if model not in MODELS and ":" not in model:
            raise UserError(
                f"model={model}: no such model{nearest(model, MODELS)} Known: {', '.join(MODELS)},"
                " or your own package.module:function"
            )
        config = MODELS[model].settings if model in MODELS else TrainConfig
        of_trainer = fields_of(config)
        # The settings of each function, which no two functions may have in different forms.
        added: dict[str, Field] = {}
        for function in FUNCTIONS:
            path = values.get(function)
            if not isinstance(path, str) or not is_dotted(path):
                continue
            flag = f"{function}={path}"
            try:
                parameters = read_parameters(path, flag, first)
            except Unreadable as error:
                self._unreadable.append(f"{flag}: {error}")
                continue
            self._functions.append(flag)
            for name, field in parameters.items():
                base = name.removeprefix("no_")
                if (
                    base in of_trainer
                    or hasattr(TrainConfig, base)
                    or name in ("help", "print_config", "verbose")
                ):
                    raise UserError(
                        f"{flag}: its setting {name} has the name of a flag of the trainer: read"
                        f" config.{base}, or rename the parameter"
                    )
                earlier = added.get(name, field)
                functions = (*earlier.metadata.get(_FUNCTIONS_KEY, ()), flag)
                if type_and_default(earlier) != type_and_default(field):
                    raise UserError(
                        f"{functions[0]} and {flag} both have a setting {name}, as"
                        f" {type_and_default(earlier)} and as {type_and_default(field)}: give it"
                        " one type and default, or two names"
                    )
                group = f"settings of {' and '.join(functions)}"
                field.metadata = MappingProxyType(
                    {**field.metadata, "group": group, _FUNCTIONS_KEY: functions}
                )
                added[name] = field
        # The config of the model, with a field for each of them.
        self.settings = config
        if added:
            extended = dataclasses.make_dataclass(
                config.__name__,
                [(name, field.type, field) for name, field in added.items()],
                bases=(config,),
                namespace={"__module__": __name__},
                frozen=True,
                kw_only=True,
                eq=False,
                repr=False,
            )
            self.settings = cast(type[TrainConfig], extended)
        self.fields = fields_of(self.settings)

    def hint(self, name: str) -> str:
        """Returns a hint why `name` is not known as a setting, for the end of an error line; "" if
        there is none."""
        if self._unreadable:
            return f" (settings of your own functions are not known: {'; '.join(self._unreadable)})"
        if models := [model for model in MODELS if name in fields_of(MODELS[model].settings)]:
            return f" ({name} is a setting of {', '.join(models)}, not of model={self._model})"
        if self._functions:
            return f" (settings of {' and '.join(self._functions)} are the parameters after a `*`)"
        return ""

    def without_others(self, values: Values) -> dict[str, Any]:
        """Returns the values without settings of other built-in models: the recipe may be for
        another model."""
        of_models = set[str]()
        for model in MODELS.values():
            of_models |= fields_of(model.settings).keys()
        foreign = of_models - self.fields.keys()
        return {name: value for name, value in values.items() if name not in foreign}


def refuse_missing_modules(config: TrainConfig) -> None:
    """Raises UserError, before TensorFlow is loaded, if a module that the settings name is not
    found here."""
    for function in FUNCTIONS:
        path = getattr(config, function)
        if is_dotted(path) or (":" in path and function != "data"):
            refuse_missing_module(path.partition(":")[0], f"{function}={path}")


def functions_taking(field: "dataclasses.Field[Any]") -> tuple[str, ...]:
    """Returns which of FUNCTIONS take this field as a setting of their own; () for a setting of the
    trainer."""
    return tuple(flag.partition("=")[0] for flag in field.metadata.get(_FUNCTIONS_KEY, ()))


def changed_settings(stored: Values, config: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Returns the settings that a resumed run must not change and that differ from those of
    run.json: before and now.

    A setting of a function that may change, such as callbacks, may change too, unless a fixed
    function also takes it.
    """
    changed = {}
    for name, field in fields_of(type(config)).items():
        if name in stored and not {*(functions_taking(field) or (name,))} <= MAY_CHANGE:
            before = stored[name]
            with suppress(UserError):  # JSON has lists for tuples, and 0.3.0 wrote text for names
                before = coerce(field, before)
            if before != getattr(config, name):
                changed[name] = (before, getattr(config, name))
    return changed


def own_sources(dotted: str) -> Iterator[tuple[str, Path]]:
    """Yields name and path of the source files of the package with a user's function; nothing for
    built-in names."""
    top = dotted.partition(":")[0].partition(".")[0]
    spec = PathFinder.find_spec(top) if is_dotted(dotted) and top != "trainer" else None
    folders = [Path(folder) for folder in spec.submodule_search_locations or []] if spec else []
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            if path.is_file():  # not a broken link, such as an editor's lock
                yield f"{top}/{path.relative_to(folder).as_posix()}", path
    if spec and spec.origin and not folders:
        yield Path(spec.origin).name, Path(spec.origin)
