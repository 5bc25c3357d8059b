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
        "where latency tables (one file per engine fingerprint), compiled kernels and TensorRT's "
        "timing caches are kept",
        "~/.cache/trtllm_dspark",
    ),
    "native": Variable(
        "DSPARK_NATIVE",
        "0: the CPU runs torch's operators only, even where a C compiler is at hand",
        "1",
    ),
}


def cache_dir() -> Path:
    """Directory for things that can be measured or made again."""
    variable = VARIABLES["cache_dir"]
    return Path(os.environ.get(variable.name) or variable.default).expanduser()


def native_kernels_wanted() -> bool:
    """Whether CPU kernels may be compiled and used."""
    variable = VARIABLES["native"]
    return (os.environ.get(variable.name) or variable.default) != "0"
