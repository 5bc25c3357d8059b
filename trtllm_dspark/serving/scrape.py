# SPDX-License-Identifier: Apache-2.0
"""Reads a server's Prometheus metrics back: for the demonstration, benchmarks and tests."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Mapping

from trtllm_dspark.errors import ServerError

_LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? ([^ ]+)$")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="([^"]*)"')


class Metrics:
    """One scrape."""

    def __init__(self, text: str) -> None:
        self._values: list[tuple[str, dict[str, str], float]] = []
        for line in text.splitlines():
            match = _LINE.match(line)
            if match and not line.startswith("#"):
                labels = dict(_LABEL.findall(match[2] or ""))
                self._values.append((match[1], labels, float(match[3])))

    @property
    def names(self) -> frozenset[str]:
        """Names of all series."""
        return frozenset(name for name, _, _ in self._values)

    def total(self, name: str, **labels: str) -> float:
        """Sum of the series with this name and these labels; 0 without one."""
        return sum(v for n, found, v in self._values if n == name and _matches(found, labels))

    def label_values(self, name: str, label: str) -> frozenset[str]:
        """Values of one label over the series with this name."""
        return frozenset(
            found[label] for n, found, _ in self._values if n == name and label in found
        )


def read_metrics(url: str) -> Metrics:
    """Scrape `url`; ServerError when the server does not answer."""
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return Metrics(response.read().decode("utf-8"))
    except (urllib.error.URLError, OSError) as error:
        raise ServerError(f"cannot read metrics from {url}: {error}") from error


def _matches(found: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(found.get(key) == value for key, value in wanted.items())
