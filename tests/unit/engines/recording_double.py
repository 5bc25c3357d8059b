# SPDX-License-Identifier: Apache-2.0
"""A recording double of TensorRT whose methods are parsed from the real bindings' docstrings.

A method or property the bindings do not have, or a call with too few, too many or wrongly typed
arguments, fails. Nothing is computed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

PLAIN = {"typing.SupportsInt": int, "str": str, "tuple": tuple, "list": list, "bool": bool}


@dataclass(frozen=True)
class Parameter:
    name: str
    type_name: str
    has_default: bool


def parse_signatures(doc: str, name: str) -> list[list[Parameter]]:
    """Parameter lists (without self) of every overload that a pybind docstring states."""
    found = []
    for match in re.finditer(rf"^(?:\d+\. )?{name}\((self: .*)\) -> ", doc, re.MULTILINE):
        parameters = []
        for text in re.split(r", (?=\w+: )", match.group(1))[1:]:
            parameter, rest = text.split(": ", 1)
            type_name, _, default = rest.partition(" = ")
            parameters.append(Parameter(parameter, type_name, bool(default)))
        found.append(parameters)
    return found


def accepts(parameters: list[Parameter], arguments: tuple[Any, ...]) -> bool:
    required = sum(not p.has_default for p in parameters)
    if not required <= len(arguments) <= len(parameters):
        return False
    for parameter, value in zip(parameters, arguments, strict=False):
        wanted = PLAIN.get(parameter.type_name)
        if wanted is not None and not isinstance(value, wanted):
            return False
        enum = parameter.type_name.split(".")[-1]
        if wanted is None and type(value).__name__ != enum and "Buffer" not in enum:
            return False
    return True


class Recorder:
    """Stands for an object of one real class."""

    def __init__(self, real: type, answers: dict[str, Any], calls: list[tuple[Any, ...]]) -> None:
        self._real, self._answers, self._calls = real, answers, calls

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self._real, name):
            raise AttributeError(f"{self._real.__name__} of the bindings has no {name!r}")
        attribute = getattr(self._real, name)
        if isinstance(attribute, property):
            return self._answers[name]
        overloads = parse_signatures(attribute.__doc__ or "", name)

        def call(*arguments: Any) -> Any:
            if not any(accepts(parameters, arguments) for parameters in overloads):
                raise TypeError(f"{self._real.__name__}.{name}{arguments} fits none of {overloads}")
            self._calls.append((self._real.__name__, name, *arguments))
            answer = self._answers.get(name, True)
            return answer(*arguments) if callable(answer) else answer

        return call
