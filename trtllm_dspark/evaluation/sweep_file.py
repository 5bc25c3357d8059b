# SPDX-License-Identifier: Apache-2.0
"""The JSON file of a sweep of simulations: rows so far and the settings they were made with, so
that an interrupted sweep goes on. Rows of other settings are refused, never mixed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trtllm_dspark.config import load_json
from trtllm_dspark.errors import ConfigError


def loop_kind(arrivals: Sequence[float] | None) -> str:
    """What a load of the sweep is: 'open' = requests/s, 'closed' = requests at once."""
    return "open" if arrivals else "closed"


def settings_before(
    settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a file's settings; one that does not name its loop is closed if its loads can be.

    Requests/s are numbers with a point in JSON, numbers of requests are not.
    """
    is_closed = all(isinstance(row.get("load"), int) for row in rows)
    return {"loop": "closed" if is_closed else None, **settings}


class SweepFile:
    """Rows that are kept after every run; without a path they are only in memory."""

    def __init__(
        self, path: str | None, settings: Mapping[str, Any], ignored: Sequence[str] = ()
    ) -> None:
        """`ignored` settings may differ between runs: they say which rows are wanted."""
        self.path = Path(path) if path else None
        self.settings: dict[str, Any] = json.loads(json.dumps(dict(settings)))
        self.rows: list[dict[str, Any]] = self._load(ignored)

    def _load(self, ignored: Sequence[str]) -> list[dict[str, Any]]:
        if self.path is None or not self.path.is_file():
            return []
        data = load_json(self.path)
        if "settings" not in data or "rows" not in data:
            raise ConfigError(f"{self.path} holds no sweep: name another file or delete it")
        before = settings_before(data["settings"], data["rows"])
        differing = sorted(
            k for k, v in self.settings.items() if k not in ignored and before.get(k) != v
        )
        if differing:
            raise ConfigError(
                f"{self.path} holds a sweep with other {', '.join(differing)}: name another file "
                "or delete it"
            )
        rows: list[dict[str, Any]] = data["rows"]
        return rows

    def add(self, row: dict[str, Any]) -> None:
        """Keep one more row."""
        self.rows.append(row)
        self.save()

    def save(self, **more: Any) -> None:
        """Write aside and rename: an interruption leaves the older file whole."""
        if self.path is None:
            return
        data = {**more, "settings": self.settings, "rows": self.rows}
        aside = self.path.with_name(self.path.name + ".tmp")
        aside.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        os.replace(aside, self.path)
