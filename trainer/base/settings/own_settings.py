"""Turns keyword-only parameters of the functions that a run names into settings: fields of a subclass of TrainConfig.

`def build(config, dataset, *, depth: int = 2)` gives the flag --depth, the key `depth` of a recipe and of run.json, and
`config.depth`, whether the function is the user's or that of a built-in model. Whatever handles the fields of a
settings class handles these too.

The parameters are read from the syntax tree of the source, without importing it. An import would run the user's
package, which may need TensorFlow: too slow at the desk, and too early in a job, where nothing may run before the
strategy is made. A function whose source cannot be read has no settings, and `OwnSettings.hint` says why.
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
from functools import cached_property, lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Optional, Union, cast, get_args, get_origin

from trainer.base.errors import UserError, reason
from trainer.base.settings.fields import TYPE_NAMES, Setting, coerce, nearest
from trainer.base.settings.train_config import DATA_KINDS, MAY_CHANGE, MODELS, TrainConfig

REQUIRED = dataclasses.MISSING  # the default of a parameter without one
_PLAIN = (bool, int, float, str)
_NAMES: dict[str, Any] = {  # names that the type of a parameter may use
    **{kind.__name__: kind for kind in _PLAIN},
    "Annotated": Annotated, "Literal": Literal, "Optional": Optional, "Union": Union,
}  # fmt: skip
_ALLOWED = "use bool, int, float, str, a Literal of values of one of them, or any of these with `| None`"
_FUNCTIONS_KEY = "functions"  # in a field's metadata: `Parameter.functions`
_MOST_STEPS = 20  # imports to follow for a name: they may form a circle


@dataclasses.dataclass(frozen=True)
class Parameter:
    """Describes a keyword-only parameter.

    about: the Setting in its annotation, as `Annotated[int, Setting(…)]`; functions: the settings that name a function
    with this parameter, as model=mine.nets:build.
    """

    name: str
    kind: type  # bool, int, float or str
    optional: bool
    default: Any
    about: Setting
    functions: tuple[str, ...] = ()

    @property
    def field(self) -> "dataclasses.Field[Any]":
        """Returns the parameter as a field of a settings dataclass."""
        meaning = self.about.meaning or {**TYPE_NAMES, str: "text"}[self.kind]
        group = f"settings of {' and '.join(self.functions)}"
        metadata = {**vars(self.about), "meaning": meaning, "group": group, _FUNCTIONS_KEY: self.functions}
        field: dataclasses.Field[Any] = dataclasses.field(default=self.default, metadata=metadata)
        field.name, field.type = self.name, self.kind | None if self.optional else self.kind
        return field

    def __str__(self) -> str:
        """Describes type and default for people: `int | None = 3`."""
        kind = f"Literal{[*self.about.choices]}" if self.about.choices else self.kind.__name__
        default = "" if self.default is REQUIRED else f" = {self.default!r}"
        return f"{kind}{' | None' if self.optional else ''}{default}"


class Unreadable(Exception):
    """Reports that the parameters of a function cannot be read from a source; the text says why."""


_NO_VALUE = (Unreadable, ValueError, TypeError, MemoryError, RecursionError)


def read_parameters(path: str, origin: str, first: str = "") -> list[Parameter]:
    """Returns the keyword-only parameters of `package.module:function`, or of a class, from its source.

    first: a folder that is searched before Python's own path; origin: the setting that errors name. Parameters whose
    names begin with `_` are left out. Raises UserError if a parameter cannot be a setting or if the source cannot be
    imported, Unreadable if the source is not found or does not define the function by `def`.
    """
    module_name, _, name = path.partition(":")
    try:
        module, node = _Module(module_name, first, origin).find(name)
    except RecursionError:
        raise Unreadable(f"{module_name} is nested too deeply") from None
    if isinstance(node, ast.ClassDef):
        methods = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
        if not methods:
            raise Unreadable(f"{name} is a class without an __init__ of its own")
        node = methods[-1]
    if not isinstance(node, ast.FunctionDef):
        raise Unreadable(f"{module.place(node)}: {name} is assigned, not defined by `def`")
    return [
        _parameter(module, word, default, origin)
        for word, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        if word.arg[0] != "_"
    ]


def refuse_missing_module(name: str, origin: str) -> None:
    """Raises UserError, with the nearest name, if Python does not find the package of a module. Imports nothing.

    origin: the setting that names the module, and its value.
    """
    top = name.partition(".")[0]
    missing = f"{origin}: cannot import {name} (No module named {top!r})"
    if name.endswith(".py"):
        right = name.removesuffix(".py").replace("/", ".")
        raise UserError(f"{missing}: a module has no .py: use --{origin.replace(f'{name}:', f'{right}:')}")
    with suppress(ImportError, ValueError, AttributeError, TypeError, OSError):  # the import itself will explain these
        if top not in sys.modules and _spec(top, "") is None:
            beside = [module.name for module in pkgutil.iter_modules([os.getcwd()])]
            raise UserError(f"{missing}{nearest(top, beside)} Run the command in the folder that holds it")


def _spec(name: str, first: str) -> ModuleSpec | None:
    """Returns the import spec of a module, or None. importlib.util.find_spec would import the packages around it."""
    top, *rest = name.split(".")
    folders = [folder for folder in (first, os.getcwd()) if folder]
    spec = None if top == __name__.split(".")[0] else PathFinder.find_spec(top, folders)
    if spec is None or spec.origin is None:  # a folder without __init__.py comes after all others
        spec = importlib.util.find_spec(top) or spec
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        top = f"{top}.{part}"
        spec = PathFinder.find_spec(top, [*spec.submodule_search_locations])
    return spec


class _Module:
    """Holds the syntax tree of a module, found as Python's import would, and parsed without running any code.

    first, origin: see `read_parameters`. Raises UserError if it cannot be imported, Unreadable if it is not found.
    """

    def __init__(self, name: str, first: str, origin: str) -> None:
        self.name = name
        self.first = first
        self.origin = origin
        self.file = name
        try:
            spec = _spec(name, first)
            if spec is None:
                raise Unreadable(f"{name} is not found here")
            self.source: Any = getattr(spec.loader, "get_source", lambda _: None)(spec.name)
            if self.source is None:
                raise Unreadable(f"{name} has no source")
            self.file = (spec.origin or name).removeprefix(os.getcwd() + os.sep)
            # Python 3.11 fails if another thread parses at the same time, which a garbage collection can let happen:
            # https://github.com/python/cpython/issues/106905
            collects = gc.isenabled()
            gc.disable()
            try:
                self.tree = ast.parse(self.source)
            finally:
                if collects:
                    gc.enable()
        except (SyntaxError, MemoryError) as error:
            place = reason(error)
            if isinstance(error, SyntaxError) and error.lineno:  # it has none for an unknown encoding
                place = f"{self.file}:{error.lineno}: {error.msg}"
            raise UserError(f"{origin}: cannot import {name} ({place})") from None
        except (ImportError, ValueError, AttributeError, TypeError, OSError) as error:
            raise Unreadable(f"{name} is not found: {reason(error)}") from None
        self.package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]

    def place(self, node: ast.AST) -> str:
        """Returns file and line of a node."""
        return f"{self.file}:{getattr(node, 'lineno', 1)}"

    @cached_property
    def bindings(self) -> dict[str, tuple[ast.AST, str]]:
        """Returns the last binding of each name in the module: its node and, for an import, its name in the other one.

        Statements within `if` and `try` are not read.
        """
        bound: dict[str, tuple[ast.AST, str]] = {}
        for node in self.tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                bound[node.name] = (node, "")
            elif isinstance(node, ast.ImportFrom):
                bound |= {(alias.asname or alias.name): (node, alias.name) for alias in node.names}
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                bound |= {target.id: (node.value, "") for target in targets if isinstance(target, ast.Name)}
        return bound

    def find(self, name: str, steps: int = 0) -> tuple["_Module", ast.AST]:
        """Follows imports by `from` to the definition of a name. Returns the module that has it, and its node.

        Raises Unreadable if there is none, UserError if the module cannot have such a name.
        """
        node, original = self.bindings.get(name, (None, ""))
        # Ways to define a name that `bindings` does not show.
        elsewhere = rf"\b({re.escape(name)}|__getattr__|globals|exec|setattr)\b|import \*"
        if node is None and not re.search(elsewhere, self.source):
            raise UserError(f"{self.origin}: {self.name} has no function {name}{nearest(name, [*self.bindings])}")
        if node is None or steps > _MOST_STEPS:
            raise Unreadable(f"{self.name} does not define {name} by `def`")
        if isinstance(node, ast.ImportFrom):
            try:
                module = importlib.util.resolve_name("." * node.level + (node.module or ""), self.package)
            except ImportError as error:
                raise Unreadable(f"{self.place(node)}: {reason(error)}") from None
            return _Module(module, self.first, self.origin).find(original, steps + 1)
        return self.find(node.id, steps + 1) if isinstance(node, ast.Name) else (self, node)


def _parameter(module: _Module, argument: ast.arg, default: ast.expr | None, origin: str) -> Parameter:
    """Returns a parameter. Raises UserError if its type or its default cannot be those of a setting."""
    where = f"{origin}: {module.place(argument)}: its setting {argument.arg}"
    try:
        value = REQUIRED if default is None else _evaluated(module, default)
    except _NO_VALUE:
        raise UserError(
            f"{where} has a default that is not a literal: write the value itself, or the name of a module's constant "
            "that is one"
        ) from None
    if argument.annotation is None and type(value) not in _PLAIN:
        raise UserError(f"{where} has no type: {_ALLOWED}")
    try:
        annotation = type(value) if argument.annotation is None else _evaluated(module, argument.annotation)
        kinds, about = _types_and_setting(annotation)
        (kind,) = kinds - {type(None)}
        limits = [limit for limit in (about.minimum, about.maximum, about.above) if limit is not None]
        if kind not in ((int, float) if limits else _PLAIN) or not {*map(type, limits)} <= {int, float}:
            raise ValueError
    except _NO_VALUE:
        text = ast.unparse(argument.annotation or argument)[:100]
        raise UserError(f"{where} is of type {text}: {_ALLOWED}") from None
    parameter = Parameter(argument.arg, kind, type(None) in kinds, value, about)
    fits = value is REQUIRED or (value is None and parameter.optional) or type(value) is kind
    if not fits and not (kind is float and type(value) is int):
        raise UserError(f"{where} is {parameter}: the default must be of its type")
    try:
        usual = value if value is REQUIRED else coerce(parameter.field, value)
    except UserError as error:
        raise UserError(f"{where}: its default does not fit: {error}") from None
    return dataclasses.replace(parameter, default=usual)


def _evaluated(module: _Module, node: ast.AST | None, steps: int = 0) -> Any:
    """Evaluates a literal, a type, or a name of the module that is bound to a literal or a type; runs no code.

    Raises one of _NO_VALUE for anything else.
    """
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluated(module, operand)
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in _NAMES:
            return _NAMES[name]
        case ast.Name(id=name) if steps < _MOST_STEPS:
            return _evaluated(*module.find(name), steps + 1)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _evaluated(module, left, steps) | _evaluated(module, right, steps)
        case ast.Subscript(value=value, slice=part):
            return _evaluated(module, value, steps)[_evaluated(module, part, steps)]
        case ast.Tuple(elts=parts):
            return tuple(_evaluated(module, part, steps) for part in parts)
        case ast.Call(func=ast.Name(id="Setting") | ast.Attribute(attr="Setting"), args=arguments, keywords=words):
            named: Any = {word.arg or "": _evaluated(module, word.value, steps) for word in words}
            return Setting(*(_evaluated(module, argument, steps) for argument in arguments), **named)
    raise ValueError


def _types_and_setting(annotation: Any) -> tuple[set[type], Setting]:
    """Returns the plain types that an annotation allows, and the Setting that Literal and Annotated add to them."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return {*map(type, parts)}, Setting("", choices=tuple(part for part in parts if part is not None))
    if origin is Annotated:
        kinds, about = _types_and_setting(parts[0])
        for part in parts[1:]:
            if isinstance(part, Setting):
                about = dataclasses.replace(part, choices=about.choices)
            elif isinstance(part, str):
                about = dataclasses.replace(about, meaning=part)
        return kinds, about
    if origin in (Union, UnionType):
        alternatives = [_types_and_setting(part) for part in parts]
        about = max((about for _, about in alternatives), key=lambda about: about != Setting(""))
        return set().union(*(kinds for kinds, _ in alternatives)), about
    return {annotation}, Setting("")


FUNCTIONS = ("model", "data", "callbacks")  # settings that may name a function with settings


def is_dotted(value: str) -> bool:
    """Returns whether the value is a package.module:function, not a kind:path."""
    return re.fullmatch(r"[^\W\d][\w.]*:[^\W\d]\w*", value) is not None and value.split(":")[0] not in DATA_KINDS


class OwnSettings:
    """Holds the settings of the functions that a run names: `settings` is TrainConfig with a field for each.

    named: the values of the settings in FUNCTIONS; values that name no function are ignored; first: a folder that is
    searched before Python's own path. Raises UserError if a parameter cannot be a setting.
    """

    def __init__(self, named: Mapping[str, str], first: str = "") -> None:
        self._model = named.get("model", "")
        self._own: list[str] = []  # functions of the user's, as model=mine.nets:build
        self._unreadable: list[str] = []  # functions whose settings are not known, and why
        parameters: dict[str, Parameter] = {}
        for function in FUNCTIONS:
            name = named.get(function)
            path = MODELS.get(str(name), name) if function == "model" else name
            if function == "model" and isinstance(path, str) and ":" not in path:
                raise UserError(
                    f"model={name}: no such model{nearest(path, MODELS)} Known: {', '.join(MODELS)}, or your own "
                    "package.module:function"
                )
            if not isinstance(path, str) or not is_dotted(path):
                continue
            flag = f"{function}={name}"
            try:
                of_function = read_parameters(path, flag, first)
            except Unreadable as error:
                self._unreadable.append(f"{flag}: {error}")
                continue
            if name not in MODELS:
                self._own.append(flag)
            for parameter in of_function:
                ours = parameter.name.removeprefix("no_")
                if hasattr(TrainConfig, ours) or parameter.name in ("help", "print_config", "verbose"):
                    raise UserError(
                        f"{flag}: its setting {parameter.name} has the name of a flag of the trainer: read "
                        f"config.{ours}, or rename the parameter"
                    )
                earlier = parameters.get(parameter.name, parameter)
                if str(earlier) != str(parameter):
                    raise UserError(
                        f"{earlier.functions[0]} and {flag} both have a setting {earlier.name}, as {earlier} and as "
                        f"{parameter}: give it one type and default, or two names"
                    )
                parameters[parameter.name] = dataclasses.replace(earlier, functions=(*earlier.functions, flag))
        self.settings = _subclass(tuple(parameters.values()))

    def hint(self, name: str) -> str:
        """Returns a hint why `name` is not known as a setting, for the end of an error line; "" if there is none."""
        if self._unreadable:
            return f" (settings of your own functions are not known: {'; '.join(self._unreadable)})"
        if models := [model for model, names in settings_of_models().items() if name in names]:
            return f" ({name} is a setting of {', '.join(models)}, not of model={self._model})"
        return f" (settings of {' and '.join(self._own)} are the parameters after a `*`)" if self._own else ""

    def without_others(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values without settings of other built-in models: the recipe may be for another model."""
        names = {field.name for field in dataclasses.fields(self.settings)}
        others = {*values} - names and {name for names in settings_of_models().values() for name in names} - names
        return {name: value for name, value in values.items() if name not in others}


@lru_cache(maxsize=1)
def settings_of_models() -> dict[str, dict[str, Parameter]]:
    """Returns the settings of each built-in model by name."""
    return {
        model: {parameter.name: parameter for parameter in read_parameters(path, f"model={model}")}
        for model, path in MODELS.items()
    }


@lru_cache(maxsize=64)
def _subclass(parameters: tuple[Parameter, ...]) -> type[TrainConfig]:
    """Returns TrainConfig with these fields added; cached, so that configs with equal fields can be compared."""
    if not parameters:
        return TrainConfig
    fields = [(field.name, field.type, field) for field in (parameter.field for parameter in parameters)]
    settings = dataclasses.make_dataclass(
        "TrainConfig", fields, bases=(TrainConfig,), frozen=True, kw_only=True, namespace={"__module__": __name__}
    )
    return cast(type[TrainConfig], settings)


def refuse_missing_modules(config: TrainConfig) -> None:
    """Raises UserError, before TensorFlow is loaded, if a module that the settings name is not found here."""
    for function in FUNCTIONS:
        path = getattr(config, function)
        if is_dotted(path) or (":" in path and function != "data"):
            refuse_missing_module(path.partition(":")[0], f"{function}={path}")


def functions_taking(field: "dataclasses.Field[Any]") -> tuple[str, ...]:
    """Returns which of FUNCTIONS take this field as a setting of their own; () for a setting of the trainer."""
    return tuple(flag.partition("=")[0] for flag in field.metadata.get(_FUNCTIONS_KEY, ()))


def fixed_settings(config: TrainConfig) -> dict[str, Any]:
    """Returns the settings that a resumed run must not change, by name.

    A setting of a function that may change, such as callbacks, may change too, unless a fixed function also takes it.
    """
    may_change = {
        field.name
        for field in dataclasses.fields(config)
        if {*(functions_taking(field) or (field.name,))} <= MAY_CHANGE
    }
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in may_change}


def own_sources(dotted: str) -> Iterator[tuple[str, Path]]:
    """Yields name and path of the source files of the package with a user's function; nothing for built-in names."""
    top = dotted.partition(":")[0].partition(".")[0]
    spec = PathFinder.find_spec(top) if is_dotted(dotted) and top != "trainer" else None
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            if path.is_file():  # not a broken link, such as an editor's lock
                yield f"{top}/{path.relative_to(folder).as_posix()}", path
    if spec and spec.origin and not folders:
        yield Path(spec.origin).name, Path(spec.origin)
