# SPDX-License-Identifier: Apache-2.0
"""A recording double of TensorRT whose methods are parsed from the real bindings' docstrings.

A method or property the bindings do not have, or a call with too few, too many or wrongly typed
arguments, fails. Answers are the test's; nothing is computed here.
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
        class_name = parameter.type_name.split(".")[-1]
        if wanted is None and _class_name(value) != class_name and "Buffer" not in class_name:
            return False
    return True


def _class_name(value: Any) -> str:
    return value.real.__name__ if isinstance(value, Recorder) else type(value).__name__


class Recorder:
    """Stands for an object of one real class; `calls` gets (class, method, *arguments)."""

    def __init__(self, real: type, answers: dict[str, Any], calls: list[tuple[Any, ...]]) -> None:
        self.__dict__.update(real=real, _answers=answers, _calls=calls)

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self.real, name):
            raise AttributeError(f"{self.real.__name__} of the bindings has no {name!r}")
        attribute = getattr(self.real, name)
        if isinstance(attribute, property):
            return self._answers[name]
        overloads = parse_signatures(attribute.__doc__ or "", name)

        def call(*arguments: Any) -> Any:
            if not any(accepts(parameters, arguments) for parameters in overloads):
                raise TypeError(f"{self.real.__name__}.{name}{arguments} fits none of {overloads}")
            self._calls.append((self.real.__name__, name, *arguments))
            answer = self._answers.get(name, True)
            return answer(*arguments) if callable(answer) else answer

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        attribute = getattr(self.real, name, None)
        if not isinstance(attribute, property) or attribute.fset is None:
            raise AttributeError(f"{self.real.__name__} of the bindings has no settable {name!r}")
        self._calls.append((self.real.__name__, f"{name} =", value))
        self._answers[name] = value
