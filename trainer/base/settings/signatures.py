"""Reads the keyword-only parameters of a function from its source, without importing it.

An import would run the function's package, which may need TensorFlow: too slow at the desk, and too early in a job,
where nothing may run before the strategy is made. So the syntax tree is read, and compared with the function once that
is imported (`trainer.user_code.dotted_names`).
"""

import ast
import dataclasses
import gc
import importlib.util
import os
import pkgutil
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from trainer.base.errors import UserError, reason
from trainer.base.settings.fields import TYPE_NAMES, Setting, coerce, nearest, setting

REQUIRED = dataclasses.MISSING  # the default of a parameter without one
_TYPES = {"bool": bool, "int": int, "float": float, "str": str}
_ALLOWED = "use bool, int, float, str, a Literal of values of one of them, or any of these with `| None`"
_MOST_STEPS = 20  # from one name to the next: imports may form a circle
_MEANINGS = {**TYPE_NAMES, str: "text"}  # in --help, of a parameter that is not described
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


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


def read_signature(path: str, origin: str, first: str = "") -> Signature:
    """Returns the signature of `package.module:function`, or of a class, as its source states it.

    `first`: a folder that is searched before those from which Python imports; `origin`: names the setting in errors.
    Parameters whose names begin with `_` are left out. Raises UserError if a parameter cannot be a setting or if the
    source cannot be imported, Unreadable if the source is not found or does not define the function by `def`.
    """
    module_name, _, name = path.partition(":")
    try:
        module, node = _Sources(first, origin).module(module_name).find(name)
    except RecursionError:
        raise Unreadable(f"{module_name} is nested too deeply") from None
    if isinstance(node, ast.ClassDef):
        methods = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
        if not methods:
            raise Unreadable(f"{name} is a class without an __init__ of its own")
        node = methods[-1]
    if not isinstance(node, _Function):
        raise Unreadable(f"{module.place(node)}: {name} is assigned, not defined by `def`")
    arguments = node.args
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    parameters = [
        _parameter(module, argument, default, origin) for argument, default in pairs if argument.arg[0] != "_"
    ]
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    return Signature(tuple(parameters), tuple(positional[len(positional) - len(arguments.defaults) :]))


def refuse_missing_module(name: str, origin: str) -> None:
    """Raises UserError, with the nearest name, if Python does not find the module `name`. Imports nothing.

    `origin`: the setting that names it, and its value. A package that changes where its modules are found passes.
    """
    package, sources = name.rpartition(".")[0], _Sources("", origin)
    missing = f"{origin}: cannot import {name} (No module named {name!r})"
    with suppress(ImportError, ValueError, AttributeError, TypeError, OSError):  # which its import will explain
        if name in sys.modules or sources.spec(name) is not None:
            return
        if name.endswith(".py"):
            right = origin.replace(f"{name}:", f"{package.replace('/', '.')}:")
            raise UserError(f"{missing}: a module has no .py: use --{right}")
        folders: Sequence[str] = [os.getcwd()]
        if package:
            refuse_missing_module(package, origin)
            parent = sources.spec(package)
            if parent is None or re.search(r"__path__|sys\.modules", _source(parent) or ""):
                return
            folders = parent.submodule_search_locations or []
        beside = [f"{package}.{module.name}".lstrip(".") for module in pkgutil.iter_modules(folders)]
        raise UserError(f"{missing}{nearest(name, beside)}")


class _Sources:
    """Finds and parses modules as Python would import them, without running any."""

    def __init__(self, first: str, origin: str) -> None:
        self._first, self._origin = first, origin
        self._modules: dict[str, _Module] = {}

    def module(self, name: str) -> "_Module":
        if name not in self._modules:
            self._modules[name] = self._parsed(name)
        return self._modules[name]

    def _parsed(self, name: str) -> "_Module":
        try:
            spec = self.spec(name)
            source = _source(spec) if spec else None
        except SyntaxError as error:  # of an encoding that the file declares
            raise self.refused(f"cannot import {name} ({reason(error)})") from None
        except (ImportError, ValueError, AttributeError, TypeError, OSError) as error:
            raise Unreadable(f"{name} is not found: {reason(error)}") from None
        if spec is None or source is None:
            raise Unreadable(f"{name} {'is not found here' if spec is None else 'has no source'}")
        file = (spec.origin or name).removeprefix(os.getcwd() + os.sep)
        try:
            tree = _tree(source)
        except (SyntaxError, ValueError, MemoryError) as error:
            where = (
                f"{file}:{error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else f"{file}: {reason(error)}"
            )
            raise self.refused(f"cannot import {name} ({where})") from None
        package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
        return _Module(self, name, package, file, source, tree)

    def refused(self, text: str) -> UserError:
        """Returns the error with this text, which names the setting."""
        return UserError(f"{self._origin}: {text}")

    def spec(self, name: str) -> ModuleSpec | None:
        """Returns the spec of a module. importlib.util.find_spec alone would import the packages that contain it."""
        top, *rest = name.split(".")
        folders = [folder for folder in (self._first, os.getcwd()) if folder]
        spec = None if top == __name__.split(".")[0] else PathFinder.find_spec(top, folders)
        if spec is None or spec.origin is None:  # a folder without __init__.py comes after all others
            spec = importlib.util.find_spec(top) or spec
        for part in rest:
            if spec is None or spec.submodule_search_locations is None:
                return None
            top = f"{top}.{part}"
            spec = PathFinder.find_spec(top, [*spec.submodule_search_locations])
        return spec


def _source(spec: ModuleSpec) -> str | None:
    """Returns the source of a module; None if it has none."""
    get = getattr(spec.loader, "get_source", None)
    return get(spec.name) if get else None


def _tree(source: str) -> ast.Module:
    """Parses the source while neither the garbage collector nor, with it, another thread runs.

    Python 3.11 fails if another thread parses in between: https://github.com/python/cpython/issues/106905
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
    """Holds the syntax tree of a module."""

    sources: _Sources
    name: str
    package: str
    file: str
    source: str
    tree: ast.Module

    def place(self, node: ast.AST) -> str:
        """Returns file and line of a node."""
        return f"{self.file}:{getattr(node, 'lineno', 1)}"

    @cached_property
    def bindings(self) -> dict[str, tuple[ast.AST, str]]:
        """Returns what the names of the module are bound to at last: a node, and of an import the name there."""
        bound: dict[str, tuple[ast.AST, str]] = {}
        for node in _statements(self.tree.body):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                bound[node.name] = (node, "")
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                bound |= {(alias.asname or alias.name): (node, alias.name) for alias in node.names}
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                bound |= {target.id: (node.value, "") for target in targets if isinstance(target, ast.Name)}
        return bound

    def find(self, name: str, steps: int = 0) -> tuple["_Module", ast.AST]:
        """Returns the definition of a name, and the module where it stands.

        Raises Unreadable if there is none, UserError if the module cannot have such a name.
        """
        node, there = self.bindings.get(name) or self.bindings.get("*") or (None, "")
        if node is None and not re.search(rf"\b({re.escape(name)}|__getattr__|globals|exec|setattr)\b", self.source):
            raise self.sources.refused(f"{self.name} has no function {name}{nearest(name, [*self.bindings])}")
        if node is None or isinstance(node, ast.Import) or steps > _MOST_STEPS:
            raise Unreadable(f"{self.name} does not define {name} by `def`")
        if isinstance(node, ast.ImportFrom):
            try:
                other = importlib.util.resolve_name("." * node.level + (node.module or ""), self.package)
            except ImportError as error:
                raise Unreadable(f"{self.place(node)}: {reason(error)}") from None
            return self.sources.module(other).find(name if there == "*" else there, steps + 1)
        return self.find(node.id, steps + 1) if isinstance(node, ast.Name) else (self, node)

    def imported(self, node: ast.AST) -> str:
        """Returns the name that a Name or an Attribute has where it comes from: `t.Literal` is Literal."""
        if isinstance(node, ast.Attribute):
            return node.attr
        name = node.id if isinstance(node, ast.Name) else ""
        bound, there = self.bindings.get(name, (None, ""))
        return there if isinstance(bound, ast.ImportFrom) else name


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements of a module in their order, those within `if`, `try` and `with` too."""
    for node in body:
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for part in ("body", "handlers", "orelse", "finalbody", "cases"):
                yield from _statements(getattr(node, part, ()))


def _parameter(module: _Module, argument: ast.arg, default: ast.expr | None, origin: str) -> Parameter:
    """Returns one parameter. Raises UserError if its type or its default cannot be those of a setting."""
    where = f"{origin}: {module.place(argument)}: its setting {argument.arg}"
    value = REQUIRED if default is None else _literal(module, default, where)
    if argument.annotation is not None:
        read = _Type(module, argument.annotation, where)
        kind, optional, about = read.kind, read.optional, read.about
    elif type(value) in _TYPES.values():
        kind, optional, about = type(value), False, Setting("")
    else:
        raise UserError(f"{where} has no type: {_ALLOWED}")
    parameter = Parameter(argument.arg, kind, optional, value, about)
    fits = value is REQUIRED or (value is None and optional) or type(value) is kind
    if not fits and not (kind is float and type(value) is int):
        raise UserError(f"{where} is {parameter}: the default must be of its type")
    try:
        usual = value if value is REQUIRED else coerce(parameter.field, value)
    except UserError as error:
        raise UserError(f"{where}: its default does not fit: {error}") from None
    return dataclasses.replace(parameter, default=usual)


def _literal(module: _Module, node: ast.AST, where: str) -> Any:
    """Returns the value of a literal, or of a constant of a module that is one."""
    try:
        if isinstance(node, ast.Name):
            _, node = module.find(node.id)
        return ast.literal_eval(node)
    except (Unreadable, ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise UserError(
            f"{where} has a default that is not a literal: write the value itself, or the name of a module's constant "
            "that is one"
        ) from None


class _Type:
    """Reads an annotation: the plain type, whether None is allowed, what Literal and Annotated say of it."""

    def __init__(self, module: _Module, node: ast.AST, where: str) -> None:
        self.optional, self.about = False, Setting("")
        self._where = where
        self._kinds: set[type] = set()
        self._read(module, node, 0)
        limits = [limit for limit in (self.about.minimum, self.about.maximum, self.about.above) if limit is not None]
        allowed = {int, float} if limits else {*_TYPES.values()}
        if len(self._kinds) != 1 or not self._kinds | {*map(type, limits)} - {int, float} <= allowed:
            raise self._refused(node)
        self.kind = self._kinds.pop()

    def _refused(self, node: ast.AST) -> UserError:
        return UserError(f"{self._where} is of type {ast.unparse(node)[:100]}: {_ALLOWED}")

    def _read(self, module: _Module, node: ast.AST, steps: int) -> None:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):  # an annotation in quotes
            with suppress(SyntaxError, ValueError):  # then it is refused below
                node = ast.parse(node.value, mode="eval").body
        if isinstance(node, ast.Constant) and node.value is None:
            self.optional = True
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            self._read(module, node.left, steps)
            self._read(module, node.right, steps)
        elif isinstance(node, ast.Subscript):
            self._subscript(module, node, steps)
        elif isinstance(node, ast.Name) and node.id in _TYPES and node.id not in module.bindings:
            self._kinds.add(_TYPES[node.id])
        elif isinstance(node, ast.Name) and steps < _MOST_STEPS:
            try:
                there, alias = module.find(node.id)
            except Unreadable:
                raise self._refused(node) from None
            self._read(there, alias, steps + 1)
        else:
            raise self._refused(node)

    def _subscript(self, module: _Module, node: ast.Subscript, steps: int) -> None:
        kind, parts = module.imported(node.value), [node.slice]
        if isinstance(node.slice, ast.Tuple):
            parts = node.slice.elts
        if kind == "Literal":
            values = [_literal(module, part, self._where) for part in parts]
            choices = [value for value in values if value is not None]
            self.optional |= None in values
            self.about = dataclasses.replace(self.about, choices=(*self.about.choices, *choices))
            self._kinds |= {*map(type, choices)}
        elif kind in ("Optional", "Union"):
            self.optional |= kind == "Optional"
            for part in parts:
                self._read(module, part, steps)
        elif kind == "Annotated":
            self._read(module, parts[0], steps)
            for part in parts[1:]:
                self._describe(module, part)
        else:
            raise self._refused(node)

    def _describe(self, module: _Module, node: ast.expr) -> None:
        """Reads a text of Annotated, or its Setting, which holds literals."""
        if isinstance(node, ast.Call) and module.imported(node.func) == Setting.__name__:
            try:
                words: Any = {word.arg or "": ast.literal_eval(word.value) for word in node.keywords}
                self.about = Setting(*map(ast.literal_eval, node.args), **{**words, "choices": self.about.choices})
            except (ValueError, TypeError):
                raise self._refused(node) from None
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            self.about = dataclasses.replace(self.about, meaning=node.value)
