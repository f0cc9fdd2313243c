"""Translate plain Python functions of numbers, as in `formulas.py`, to JavaScript.

The subset: functions with positional parameters, a docstring, assignments to local names and one `return`; numbers,
strings and flags; + - * / //, comparisons of two sides, `and`, `or`, `not`, conditional expressions; `min`, `max`, and
calls of each other; attributes of parameters; constants of the module. Anything else raises UntranslatableError with
its file and line. Numbers in JavaScript are Python's floats.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Container
from types import ModuleType
from typing import Any


class UntranslatableError(ValueError):
    """The source uses something outside the subset. The message says where."""


_BINARY = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_COMPARED = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "===", ast.NotEq: "!=="}
_JOINED = {ast.And: "&&", ast.Or: "||"}
_CALLED = {"min": "Math.min", "max": "Math.max"}
# Names that are reserved in JavaScript, but not in Python.
_RESERVED = (
    *("arguments", "case", "catch", "class", "const", "default", "delete", "do", "else", "enum", "eval", "export"),
    *("extends", "false", "finally", "function", "if", "import", "in", "instanceof", "interface", "let", "new", "null"),
    *("package", "private", "protected", "public", "return", "static", "super", "switch", "this", "throw", "true"),
    *("try", "typeof", "undefined", "var", "void", "while", "with", "yield", "Math"),
)


def translate_module(module: ModuleType) -> str:
    """Translate all functions of a module, with the current values of its constants."""
    constants = {
        name: value
        for name, value in vars(module).items()
        if name.isupper() and not name.startswith("_") and isinstance(value, int | float | str)
    }
    return translate(inspect.getsource(module), constants, module.__name__)


def translate(source: str, constants: dict[str, Any], origin: str = "source") -> str:
    """Return an expression for an object with the functions of a source. Classes and imports are ignored."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    names = [function.name for function in functions]
    lines = [f"const {_name(name)} = {json.dumps(value, allow_nan=False)};" for name, value in constants.items()]
    lines += [_Function(function, names, constants, origin).text() for function in functions]
    given = ", ".join(name if name == _name(name) else f"{name}: {_name(name)}" for name in names)
    return "(() => {\n" + "\n".join(lines) + f"\nreturn {{ {given} }};\n}})()"


def _name(name: str) -> str:
    """Append an underscore to names that are reserved in JavaScript."""
    return f"{name}_" if name in _RESERVED else name


class _Function:
    def __init__(
        self, function: ast.FunctionDef, functions: Container[str], constants: Container[str], origin: str
    ) -> None:
        self._function, self._functions, self._constants, self._origin = function, functions, constants, origin
        self._locals: set[str] = set()

    def text(self) -> str:
        function, given = self._function, self._function.args
        if function.decorator_list:
            raise self._refuse(function, "a decorator")
        if given.vararg or given.kwarg or given.kwonlyargs or given.posonlyargs or given.defaults:
            raise self._refuse(function, "parameters other than plain positional ones")
        parameters = [each.arg for each in given.args]
        self._locals.update(parameters)
        body = function.body[1:] if ast.get_docstring(function) is not None else function.body
        lines = [self._statement(statement, is_last=statement is body[-1]) for statement in body]
        if not lines or not lines[-1].startswith("return "):
            raise self._refuse(function, "a function without a return at its end")
        inside = "\n".join(f"  {line}" for line in lines)
        return f"function {_name(function.name)}({', '.join(map(_name, parameters))}) {{\n{inside}\n}}"

    def _statement(self, node: ast.stmt, *, is_last: bool) -> str:
        if isinstance(node, ast.Return) and node.value is not None and is_last:
            return f"return {self._expression(node.value)};"
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, self._expression(node.value)
            if name in self._locals:
                raise self._refuse(node, f"a second value for {name}")
            self._locals.add(name)
            return f"const {_name(name)} = {value};"
        raise self._refuse(node, f"the statement {type(node).__name__}")

    def _expression(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=bool() | int() | float() | str() as value):
                return json.dumps(value, allow_nan=False)
            case ast.Name(id=name) if name in self._locals or name in self._constants:
                return _name(name)
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in self._locals:
                return f"{_name(name)}.{attribute}"
            case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
                return f"Math.floor({self._expression(left)} / {self._expression(right)})"
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return f"({self._expression(left)} {_BINARY[type(op)]} {self._expression(right)})"
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return f"(-{self._expression(operand)})"
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return f"(!{self._expression(operand)})"
            case ast.BoolOp(op=joined, values=values):
                return f"({f' {_JOINED[type(joined)]} '.join(map(self._expression, values))})"
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARED:
                return f"({self._expression(left)} {_COMPARED[type(op)]} {self._expression(right)})"
            case ast.IfExp(test=test, body=then, orelse=otherwise):
                parts = (self._expression(part) for part in (test, then, otherwise))
                return "({} ? {} : {})".format(*parts)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if self._may_call(name):
                # In Python, min and max of one argument take a list.
                if name in _CALLED and len(args) < 2:
                    raise self._refuse(node, f"{name} of one argument")
                return f"{_CALLED.get(name) or _name(name)}({', '.join(map(self._expression, args))})"
        raise self._refuse(node, f"`{ast.unparse(node)}`")

    def _may_call(self, name: str) -> bool:
        return name not in self._locals and (name in _CALLED or name in self._functions)

    def _refuse(self, node: ast.AST, what: str) -> UntranslatableError:
        line = getattr(node, "lineno", self._function.lineno)
        return UntranslatableError(f"{self._origin}, line {line}, {self._function.name}: {what} has no translation")
