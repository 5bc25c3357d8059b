# SPDX-License-Identifier: Apache-2.0
"""What a training run leaves on disk: JSONL log, provenance, exact state, exported drafters.

Every file that matters is written aside and renamed, so that a killed run leaves the older one.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trtllm_dspark._version import __version__
from trtllm_dspark.config import load_json
from trtllm_dspark.errors import ConfigError

START_KEYS = ("argv", "started", "git_revision", "resumed_at_step")


class RunFiles:
    """Names and writers of one run directory."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.state_path = self.directory / "state.pt"
        self.log_path = self.directory / "log.jsonl"
        self.best_dir = self.directory / "best"
        self.last_dir = self.directory / "last"

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one JSON line (NaN becomes null)."""
        with self.log_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite_json(record), ensure_ascii=False) + "\n")

    def trim_log(self, last_step: int) -> None:
        """Drop lines of steps that a resumed run will do again."""
        if not self.log_path.exists():
            return
        lines = self.log_path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line).get("step", 0) <= last_step]
        self.log_path.write_text("".join(kept), encoding="utf-8")

    def save_state(self, state: Mapping[str, Any]) -> None:
        """Write the resumable state; the previous one stays until the new one is whole."""
        aside = self.state_path.with_suffix(".tmp")
        torch.save(dict(state), aside)
        os.replace(aside, self.state_path)

    def load_state(self) -> dict[str, Any] | None:
        """The saved state, None if there is none yet."""
        if not self.state_path.exists():
            return None
        try:
            return torch.load(self.state_path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ConfigError(
                f"{self.state_path} cannot be read ({error}): remove it to start again"
            ) from error

    def write_provenance(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Write provenance.json, earlier starts in this directory under "earlier"; its data."""
        path = self.directory / "provenance.json"
        earlier = list_starts(load_json(path)) if path.exists() else []
        data = {**describe_run(), **extra, "earlier": earlier}
        write_json(path, data)
        return data


def list_starts(provenance: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every start that a provenance file tells of, oldest first.

    A start with the same argv and revision as the one before it is only counted there.
    """
    starts = [dict(start) for start in provenance.get("earlier", [])]
    latest = {name: provenance.get(name) for name in START_KEYS}
    if starts and all(starts[-1].get(name) == latest[name] for name in ("argv", "git_revision")):
        starts[-1]["num_starts"] += 1
        starts[-1]["last_started"] = latest["started"]
    else:
        starts.append({**latest, "num_starts": 1, "last_started": latest["started"]})
    return starts


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write aside and rename."""
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(aside, path)


def describe_run() -> dict[str, Any]:
    """argv, git revision, versions, processor; no host names or paths beyond argv."""
    return {
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "git_revision": _git_revision(),
        "versions": {
            "trtllm_dspark": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "processor": platform.processor() or platform.machine(),
        "num_cpus": os.cpu_count(),
    }


def _git_revision() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def finite_json(value: Any) -> Any:
    """The same JSON data with NaN as null."""
    if isinstance(value, Mapping):
        return {k: finite_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_json(v) for v in value]
    if isinstance(value, float) and value != value:
        return None
    return value
