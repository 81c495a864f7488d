"""Calls in Python: ``[weather(city="Paris", days=2), time()]``."""

import ast
import json
import re
import warnings
from typing import Any

from cog_triton.api.openai.tool_calls.argument_values import properties_of
from cog_triton.api.openai.tool_calls.written_call import Schemas, WrittenCall, dumps

_PYTHON_NAME = re.compile(r"[A-Za-z_][\w.]*")


def python_calls(
    text: str, schemas: Schemas, *, one_list: bool = False
) -> list[WrittenCall] | None:
    """Read Python's calls of functions: a list of them, or one behind another.

    Args:
        one_list: the text must be one list.
    """
    try:
        statements = _python_statements(text.strip())
        calls = []
        for statement in statements:
            if not isinstance(statement, ast.Expr):
                return None
            value = statement.value
            if one_list and (len(statements) > 1 or not isinstance(value, ast.List)):
                return None
            nodes = value.elts if isinstance(value, ast.List) else [value]
            calls += [_python_call(node, schemas) for node in nodes]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return calls or None


def _python_statements(text: str) -> list[ast.stmt]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes that Python does not know
        try:
            return ast.parse(text).body
        except SyntaxError:
            return ast.parse(_with_escaped_breaks(text)).body


# A string in one kind of quotes, in which a quote or a backslash may be escaped.
_PYTHON_STRING = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'", re.DOTALL)


def _with_escaped_breaks(text: str) -> str:
    """Return a Python text whose strings have escapes for line breaks, which models leave out."""
    return _PYTHON_STRING.sub(
        lambda string: string[0].replace("\r", "\\r").replace("\n", "\\n"), text
    )


def _python_call(node: ast.expr, schemas: Schemas) -> WrittenCall:
    """Return the call that an expression is, or raise ValueError or TypeError."""
    if not isinstance(node, ast.Call):
        raise ValueError("not a call")
    name = ast.unparse(node.func)
    if not _PYTHON_NAME.fullmatch(name):
        raise ValueError("not the call of a name")
    # Arguments without a name are those of the schema, in its order.
    keys = list(properties_of(name, schemas))
    if len(node.args) > len(keys):
        raise ValueError("arguments without a name")
    values = {key: _python_value(each) for key, each in zip(keys, node.args, strict=False)}
    for word in node.keywords:
        if word.arg is None:
            raise ValueError("keywords of a dictionary")
        values[word.arg] = _python_value(word.value)
    json.dumps(values, allow_nan=False)  # raises what JSON does not have
    return WrittenCall(name, dumps(values))


def _python_value(node: ast.expr) -> Any:
    return ast.literal_eval(_JsonNames().visit(node))


class _JsonNames(ast.NodeTransformer):
    """Takes JSON's names of values for Python's."""

    NAMES = {"true": True, "false": False, "null": None}  # noqa: RUF012

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self.NAMES[node.id]) if node.id in self.NAMES else node
