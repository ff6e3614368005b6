"""Reads the keyword-only parameters of a function from its source, without importing it.

An import would run the function's package, which may need TensorFlow: too slow at the desk, and too early in a job,
where nothing may run before the strategy is made. So the syntax tree is read.
"""

import ast
import dataclasses
import gc
import importlib.util
import os
import pkgutil
import re
import sys
from contextlib import suppress
from functools import cached_property
from importlib.machinery import ModuleSpec, PathFinder
from types import UnionType
from typing import Annotated, Any, Literal, Optional, Union, get_args, get_origin

from trainer.base.errors import UserError, reason
from trainer.base.settings.fields import TYPE_NAMES, Setting, coerce, nearest, setting

REQUIRED = dataclasses.MISSING  # the default of a parameter without one
_PLAIN = (bool, int, float, str)
_NAMES: dict[str, Any] = {  # that a type is written with
    **{kind.__name__: kind for kind in _PLAIN},
    "Annotated": Annotated, "Literal": Literal, "Optional": Optional, "Union": Union,
}  # fmt: skip
_ALLOWED = "use bool, int, float, str, a Literal of values of one of them, or any of these with `| None`"
_MOST_STEPS = 20  # from one name to the next: imports may form a circle
_MEANINGS = {**TYPE_NAMES, str: "text"}  # in --help, of a parameter that is not described


@dataclasses.dataclass(frozen=True)
class Parameter:
    """Describes a keyword-only parameter; `about`: what its type says of it, as `Annotated[int, Setting(…)]`."""

    name: str
    kind: type  # bool, int, float or str
    optional: bool
    default: Any
    about: Setting

    @cached_property
    def field(self) -> "dataclasses.Field[Any]":
        """Returns the parameter as a field of a settings dataclass."""
        about = {**vars(self.about), "meaning": self.about.meaning or _MEANINGS[self.kind]}
        field: dataclasses.Field[Any] = setting(self.default, **about)
        field.name, field.type = self.name, self.kind | None if self.optional else self.kind
        return field

    def __str__(self) -> str:
        """Describes type and default for people: `int | None = 3`."""
        kind = f"Literal{[*self.about.choices]}" if self.about.choices else self.kind.__name__
        default = "" if self.default is REQUIRED else f" = {self.default!r}"
        return f"{kind}{' | None' if self.optional else ''}{default}"


@dataclasses.dataclass(frozen=True)
class Signature:
    """Holds what the source of a function shows: keyword-only parameters, and the names of others with a default."""

    parameters: tuple[Parameter, ...]
    positional: tuple[str, ...]


class Unreadable(Exception):
    """Reports that the parameters of a function do not stand in a source; the text says why."""


_NO_VALUE = (Unreadable, ValueError, TypeError, MemoryError, RecursionError)


def read_signature(path: str, origin: str, first: str = "") -> Signature:
    """Returns the signature of `package.module:function`, or of a class, as its source states it.

    `first`: a folder that is searched before those from which Python imports; `origin`: names the setting in errors.
    Parameters whose names begin with `_` are left out. Raises UserError if a parameter cannot be a setting or if the
    source cannot be imported, Unreadable if the source is not found or does not define the function by `def`.
    """
    module_name, _, name = path.partition(":")
    try:
        module, node = _Module.load(module_name, first, origin).find(name)
    except RecursionError:
        raise Unreadable(f"{module_name} is nested too deeply") from None
    if isinstance(node, ast.ClassDef):
        methods = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
        if not methods:
            raise Unreadable(f"{name} is a class without an __init__ of its own")
        node = methods[-1]
    if not isinstance(node, ast.FunctionDef):
        raise Unreadable(f"{module.place(node)}: {name} is assigned, not defined by `def`")
    arguments = node.args
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    parameters = [_parameter(module, word, default, origin) for word, default in pairs if word.arg[0] != "_"]
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    return Signature(tuple(parameters), tuple(positional[len(positional) - len(arguments.defaults) :]))


def refuse_missing_module(name: str, origin: str) -> None:
    """Raises UserError, with the nearest name, if Python does not find the package of a module. Imports nothing.

    `origin`: the setting that names it, and its value.
    """
    top = name.partition(".")[0]
    missing = f"{origin}: cannot import {name} (No module named {top!r})"
    if name.endswith(".py"):
        right = name.removesuffix(".py").replace("/", ".")
        raise UserError(f"{missing}: a module has no .py: use --{origin.replace(f'{name}:', f'{right}:')}")
    with suppress(ImportError, ValueError, AttributeError, TypeError, OSError):  # which its import will explain
        if top not in sys.modules and _spec(top, "") is None:
            beside = [module.name for module in pkgutil.iter_modules([os.getcwd()])]
            raise UserError(f"{missing}{nearest(top, beside)} Run the command in the folder that holds it")


def _spec(name: str, first: str) -> ModuleSpec | None:
    """Returns the spec of a module. importlib.util.find_spec alone would import the packages that contain it."""
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


def _parsed(source: str) -> ast.Module:
    """Parses source while neither the garbage collector nor, with it, another thread runs.

    Python 3.11 (3.11.7 too) fails if another thread parses in between: https://github.com/python/cpython/issues/106905
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if collects:
            gc.enable()


@dataclasses.dataclass(frozen=True)
class _Module:
    """Holds the syntax tree of a module; `first` and `origin`: see `read_signature`."""

    name: str
    first: str
    origin: str
    package: str
    file: str
    source: str
    tree: ast.Module

    @classmethod
    def load(cls, name: str, first: str, origin: str) -> "_Module":
        """Finds and parses a module as Python would import it, without running any.

        Raises UserError if it cannot be imported, Unreadable if it is not found.
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
        except SyntaxError as error:  # of an encoding that the file declares
            raise UserError(f"{origin}: cannot import {name} ({reason(error)})") from None
        except (ImportError, ValueError, AttributeError, TypeError, OSError) as error:
            raise Unreadable(f"{name} is not found: {reason(error)}") from None
        try:
            tree = _parsed(source)
        except (SyntaxError, ValueError, MemoryError) as error:
            place = f"{file}:{error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else reason(error)
            raise UserError(f"{origin}: cannot import {name} ({place})") from None
        package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
        return cls(name, first, origin, package, file, source, tree)

    def place(self, node: ast.AST) -> str:
        """Returns file and line of a node."""
        return f"{self.file}:{getattr(node, 'lineno', 1)}"

    @cached_property
    def bindings(self) -> dict[str, tuple[ast.AST, str]]:
        """Returns the last binding of each name of the module: a node and, of an import, the name in that module.

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
        """Returns the definition of a name, and the module where it stands, over imports by `from`.

        Raises Unreadable if there is none, UserError if the module cannot have such a name.
        """
        node, original = self.bindings.get(name, (None, ""))
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
            return _Module.load(module, self.first, self.origin).find(original, steps + 1)
        return self.find(node.id, steps + 1) if isinstance(node, ast.Name) else (self, node)


def _parameter(module: _Module, argument: ast.arg, default: ast.expr | None, origin: str) -> Parameter:
    """Returns one parameter. Raises UserError if its type or its default cannot be those of a setting."""
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
        kinds, about = _described(annotation)
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
    """Returns a literal, a type, or what a name of the module stands for, if it is one of these; runs no code.

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


def _described(annotation: Any) -> tuple[set[type], Setting]:
    """Returns the plain types that an annotation allows, and what Literal and Annotated say of the values."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return {*map(type, parts)}, Setting("", choices=tuple(part for part in parts if part is not None))
    if origin is Annotated:
        kinds, about = _described(parts[0])
        for part in parts[1:]:
            if isinstance(part, Setting):
                about = dataclasses.replace(part, choices=about.choices)
            elif isinstance(part, str):
                about = dataclasses.replace(about, meaning=part)
        return kinds, about
    if origin in (Union, UnionType):
        alternatives = [_described(part) for part in parts]
        about = max((about for _, about in alternatives), key=lambda about: about != Setting(""))
        return set().union(*(kinds for kinds, _ in alternatives)), about
    return {annotation}, Setting("")
