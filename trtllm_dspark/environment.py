# SPDX-License-Identifier: Apache-2.0
"""The one table of environment variables this package reads. Everything else is configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Variable:
    """One variable: its name, what it does, what holds without it."""

    name: str
    purpose: str
    default: str


VARIABLES = {
    "cache_dir": Variable(
        "DSPARK_CACHE_DIR",
        "where measured latency tables are kept, one file per engine fingerprint",
        "~/.cache/trtllm_dspark",
    ),
}


def cache_dir() -> Path:
    """Directory for things that can be measured or made again."""
    variable = VARIABLES["cache_dir"]
    return Path(os.environ.get(variable.name) or variable.default).expanduser()
