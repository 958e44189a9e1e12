"""Values that a Python file assigns to `config`, read from its syntax tree: nothing of the file is executed."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from facetrain.errors import ConfigError
from facetrain.files import error_reason, open_regular

_CONFIG = ("config", "cfg")
"""Names of the object that holds the settings."""
_UPDATES = tuple(f"{name}.update" for name in _CONFIG)
_FACTORIES = ("edict", "EasyDict", "dict", "SimpleNamespace")
_MAX_FILES = 16
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_LONGEST_TEXT = 60
_NOT_PLAIN = "is not a plain value"


class _Unsupported(Exception):
    """Part of a statement that has no plain value."""


class PythonValues:
    """Settings that a file assigns to `config`, and notes on values that depend on the machine."""

    def __init__(self, path: Path, seen: tuple[Path, ...] = ()) -> None:
        """Read a file, and the files from which it imports `config`.

        Supported are `config.name = value`, `config["name"] = value`, `config = edict(name=value)`,
        `config.update(name=value)` and variables; values are numbers, text, lists, dicts, sums of them, and the default
        of an environment variable. Of `if`, `elif` and `else` that compare such values by == or !=, the branch that
        holds is read. Functions are left out: `functions` has the settings that are one.

        Raises:
            ConfigError: the file cannot be read, or has other statements; the message has all of them.
        """
        self.values: dict[str, Any] = {}
        self.lines: dict[str, int] = {}
        """Line of each setting; for those of another file, the line of its import."""
        self.functions: dict[str, str] = {}
        """Settings that are functions, with the text of the first list of numbers in each, "" without one."""
        self.notes: list[str] = []
        self._path, self._seen = path, (*seen, path)
        self._variables: dict[str, Any] = {}
        self._functions: dict[str, ast.FunctionDef] = {}
        self._faults: list[str] = []
        self._run_all(_statements(path))
        if self._faults:
            faults = "; ".join(self._faults)
            advice = "; write the value itself in these lines" if _NOT_PLAIN in faults else ""
            raise ConfigError(f"{path}, {faults}{advice}")

    def _run_all(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            try:
                self._run(statement)
            except _Unsupported as fault:
                self._faults.append(f"line {statement.lineno}: {fault}")
            except RecursionError:
                self._faults.append(f"line {statement.lineno}: nested too deeply")

    def _run(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Import | ast.Pass):
            return
        if isinstance(statement, ast.If):
            self._run_all(statement.body if self._holds(statement.test) else statement.orelse)
            return
        if isinstance(statement, ast.FunctionDef) and not statement.decorator_list:
            # Not in silence: a call of it, and a setting that is this function, are found below.
            self._functions[statement.name] = statement
            return
        if isinstance(statement, ast.ImportFrom):
            if any(alias.name in _CONFIG or alias.name == "*" for alias in statement.names):
                self._import(statement)
            return
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            self._assign(statement.targets[0], statement.value)
            return
        call = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(call, ast.Call) and ast.unparse(call.func) in _UPDATES:
            self._set_all(call, call.lineno)
            return
        # A line that is left out in silence could be the one that matters.
        raise _Unsupported(
            f"`{_text(statement)}`: only assignments of plain values are supported, such as `config.name = value`"
        )

    def _holds(self, test: ast.expr) -> bool:
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in _COMPARISONS:
            compare = _COMPARISONS[type(test.ops[0])]
            return compare(self._plain(test.left), self._plain(test.comparators[0]))
        raise _Unsupported(
            f"`if {_text(test)}`: only settings that are compared by == or != are supported; keep the branch that "
            "counts"
        )

    def _import(self, statement: ast.ImportFrom) -> None:
        """Take the values of another config: of the folder of this one, or the one above."""
        parts = (statement.module or "").split(".")
        if statement.level:
            folders = [self._path.parents[min(statement.level, len(self._path.parents)) - 1]]
        else:
            folders = [self._path.parent, *list(self._path.resolve().parents)[1:3]]
        files = [folder.joinpath(*parts).with_suffix(".py") for folder in folders]
        found = next((file for file in files if file.is_file()), None)
        if found is None or found in self._seen or len(self._seen) >= _MAX_FILES:
            raise _Unsupported(f"`{_text(statement)}`: this file is not beside it, and may set anything")
        inherited = PythonValues(found, self._seen)
        self.notes += inherited.notes
        self.functions |= inherited.functions
        self._take(inherited.values, statement.lineno)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name) and target.id in _CONFIG:
            if not isinstance(value, ast.Call):
                raise _Unsupported(f"`{_text(value)}` is not plain settings")
            self.values.clear()
            self._set_all(value, target.lineno)
        elif isinstance(target, ast.Name):
            self._variables[target.id] = self._plain(value)
        elif isinstance(target, ast.Attribute) and _is_config(target.value) and self._is_function(value):
            self.functions[target.attr] = _first_list(self._functions[ast.unparse(value)])
        elif isinstance(target, ast.Attribute) and _is_config(target.value):
            self._take({target.attr: self._plain(value)}, target.lineno)
        elif isinstance(target, ast.Subscript) and _is_config(target.value):
            name = self._plain(target.slice)
            if not isinstance(name, str):
                raise _Unsupported(f"`{_text(target)}` is not the name of a setting")
            self._take({name: self._plain(value)}, target.lineno)
        else:
            raise _Unsupported(f"`{_text(target)}` is not a setting of `config`")

    def _is_function(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in self._functions

    def _set_all(self, call: ast.Call, line: int) -> None:
        """Take the arguments of `edict(…)` and `config.update(…)`."""
        for argument in call.args:
            values = self._plain(argument)
            if not isinstance(values, dict):
                raise _Unsupported(f"`{_text(argument)}` is not plain settings")
            self._take(values, line)
        for keyword in call.keywords:
            value = self._plain(keyword.value)
            if keyword.arg is None and not isinstance(value, dict):
                raise _Unsupported(f"`{_text(keyword.value)}` is not plain settings")
            self._take(value if keyword.arg is None else {keyword.arg: value}, line)

    def _take(self, values: dict[Any, Any], line: int) -> None:
        for name in values:
            # Unknown names are listed in a comment of the converted config, which a line break would end.
            if not (isinstance(name, str) and name.isidentifier()):
                raise _Unsupported(f"{name!r:.60} is not the name of a setting")
        self.values |= values
        self.lines |= dict.fromkeys(values, line)

    def _plain(self, node: ast.expr) -> Any:
        """Return the value of an expression."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
            return node.value
        if isinstance(node, ast.List | ast.Tuple):
            return [self._plain(item) for item in node.elts]
        if isinstance(node, ast.Dict):
            return {self._plain(key): self._plain(value) for key, value in self._items(node)}
        if isinstance(node, ast.Name) and node.id in self._variables:
            return self._variables[node.id]
        if isinstance(node, ast.Attribute) and _is_config(node.value) and node.attr in self.values:
            return self.values[node.attr]
        if isinstance(node, ast.UnaryOp | ast.BinOp):
            return self._computed(node)
        if isinstance(node, ast.Call):
            return self._called(node)
        raise _not_plain(node)

    def _items(self, node: ast.Dict) -> Iterator[tuple[ast.expr, ast.expr]]:
        for key, value in zip(node.keys, node.values, strict=True):
            if not isinstance(key, ast.Constant):
                raise _not_plain(node)
            yield key, value

    def _computed(self, node: ast.UnaryOp | ast.BinOp) -> Any:
        parts = (node.operand,) if isinstance(node, ast.UnaryOp) else (node.left, node.right)
        numbers = [self._plain(part) for part in parts]
        # Numbers only: "a" * 10**9 would need a gigabyte.
        if all(isinstance(number, int | float) for number in numbers):
            if isinstance(node.op, ast.USub):
                return -numbers[0]
            if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
                try:
                    return _OPERATORS[type(node.op)](*numbers)
                except (ArithmeticError, ValueError) as error:
                    raise _Unsupported(f"`{_text(node)}`: {error}") from error
        raise _not_plain(node)

    def _called(self, node: ast.Call) -> Any:
        """Return the settings of `dict(…)`, or the default of a variable of the environment."""
        name = ast.unparse(node.func)
        if name in _FACTORIES and not node.args and all(keyword.arg for keyword in node.keywords):
            return {str(keyword.arg): self._plain(keyword.value) for keyword in node.keywords}
        if name.split(".")[-2:] == ["environ", "get"]:
            if len(node.args) != 2:
                raise _Unsupported(f"`{_text(node)}` has no default; write the value in its place")
            self.notes.append(f"# {_text(node)}: has its default here, not the value of the variable")
            return self._plain(node.args[1])
        raise _not_plain(node)


def _statements(path: Path) -> list[ast.stmt]:
    try:
        # A byte order mark, as editors on Windows write it, is no part of the text.
        with open(path, encoding="utf-8-sig", opener=open_regular) as file:  # reading a pipe would not end
            return ast.parse(file.read()).body
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error_reason(error)}") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(
            f"{path}, line {getattr(error, 'lineno', '?')}: is not valid Python ({error_reason(error)})"
        ) from error


def _is_config(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in _CONFIG


def _first_list(function: ast.FunctionDef) -> str:
    """Return the text of the first list of whole numbers in a function, "" without one."""
    for node in ast.walk(function):
        if isinstance(node, ast.List) and all(
            isinstance(item, ast.Constant) and isinstance(item.value, int) for item in node.elts
        ):
            return _text(node)
    return ""


def _text(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "…"


def _not_plain(node: ast.AST) -> _Unsupported:
    return _Unsupported(f"`{_text(node)}` {_NOT_PLAIN}")
