# SPDX-License-Identifier: Apache-2.0
"""JSON into configurations: values of another type and missing or unknown keys are named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from trtllm_dspark.config import SystemConfig, from_json_dict
from trtllm_dspark.errors import ConfigError


@dataclass(frozen=True)
class Inner:
    size: int


@dataclass(frozen=True)
class Outer:
    name: str
    ratio: float = 0.5
    flag: bool = False
    sizes: tuple[int, ...] = ()
    table: tuple[tuple[float, ...], ...] = ()
    limit: int | None = None
    inner: Inner | None = None


def test_lists_become_tuples_and_nested_objects_dataclasses() -> None:
    data = {"name": "a", "ratio": 1, "sizes": [1, 2], "table": [[1.5], []], "inner": {"size": 3}}
    assert from_json_dict(Outer, data) == Outer("a", 1, False, (1, 2), ((1.5,), ()), None, Inner(3))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", 3),
        ("ratio", "0.5"),
        ("ratio", True),
        ("flag", 1),
        ("sizes", 4),
        ("sizes", "12"),
        ("limit", 1.5),
        ("limit", "all"),
        ("inner", 3),
    ],
)
def test_a_value_of_another_type_is_named_with_what_it_must_be(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"file\.{key} = .*wrong type: it must be"):
        from_json_dict(Outer, {"name": "a", key: value}, "file")


def test_an_element_and_a_nested_value_are_named_by_their_place() -> None:
    with pytest.raises(ConfigError, match=r"Outer\.sizes\[1\] = 'x'"):
        from_json_dict(Outer, {"name": "a", "sizes": [1, "x"]})
    with pytest.raises(ConfigError, match=r"Outer\.inner\.size = None"):
        from_json_dict(Outer, {"name": "a", "inner": {"size": None}})


def test_missing_and_unknown_keys_are_named() -> None:
    with pytest.raises(ConfigError, match=r"the keys \['name'\] are missing"):
        from_json_dict(Outer, {})
    with pytest.raises(ConfigError, match=r"unknown keys \['nmae'\]"):
        from_json_dict(Outer, {"nmae": "a"})
    with pytest.raises(ConfigError, match="expected a JSON object, found list"):
        from_json_dict(SystemConfig, [])  # type: ignore[arg-type]
