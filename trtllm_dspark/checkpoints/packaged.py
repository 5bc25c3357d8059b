# SPDX-License-Identifier: Apache-2.0
"""Drafters that ship with this package, and their way into a prepared model directory.

A packaged drafter goes to MODEL_DIR/drafter, where `--drafter auto` finds it. One that somebody
else put there is left alone.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from trtllm_dspark.checkpoints.staging import sha256_of, staged_directory, write_json
from trtllm_dspark.config import load_json
from trtllm_dspark.errors import ConfigError

logger = logging.getLogger(__name__)

PACKAGED_DIR = Path(__file__).resolve().parents[1] / "packaged"
"""One directory per model source: config.json, drafter.safetensors, calibration.json, …"""
DRAFTER_SUBDIR = "drafter"
"""Where the default drafter lies inside a model directory."""
MARKER = "packaged.json"


def packaged_drafter(source: str) -> Path | None:
    """The packaged drafter for a model source of `dspark prepare`, None without one."""
    directory = PACKAGED_DIR / source
    if Path(source).name != source or not (directory / "config.json").is_file():
        return None
    return directory


def find_drafter(model_dir: str | Path, name: str = "auto") -> Path | None:
    """Directory of a model's drafter: 'auto' the model's own if it has one, 'none', or a path."""
    own = Path(model_dir) / DRAFTER_SUBDIR
    if name == "none" or (name == "auto" and not own.is_dir()):
        return None
    path = own if name == "auto" else Path(name)
    if not path.is_dir():
        raise ConfigError(
            f"drafter_dir = {str(path)!r} is not a directory: name one, auto (the model's own "
            f"{DRAFTER_SUBDIR}/) or none"
        )
    return path


def install_packaged_drafter(source: str, model_dir: Path) -> Path | None:
    """Copy the drafter of `source` to `model_dir`/drafter; return where it lies, None without one.

    Idempotent. An older packaged one is replaced, one of the user's own is kept.
    """
    packaged = packaged_drafter(source)
    if packaged is None:
        return None
    installed = model_dir / DRAFTER_SUBDIR
    digests = {path.name: sha256_of(path) for path in packaged.iterdir()}
    identity = {"source": source, "files": digests}
    if installed.exists():
        if not (installed / MARKER).is_file():
            logger.info("%s was not put there by this package: it is kept", installed)
            return installed
        if load_json(installed / MARKER) == identity:
            return installed
    with staged_directory(installed, replace=True) as staged:
        for path in sorted(packaged.iterdir()):
            shutil.copyfile(path, staged / path.name)
        write_json(staged / MARKER, identity)
    logger.info("installed the packaged drafter of %s in %s", source, installed)
    return installed
