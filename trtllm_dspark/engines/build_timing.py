# SPDX-License-Identifier: Apache-2.0
"""The timing cache of TensorRT's builder: read before a build, handed on, kept for the next one.

TensorRT times tactics on the GPU and a cache saves it from doing so again. TensorRT-RTX times
nothing while it builds (its timing cache is a no-op, deprecated since 1.2): it gets none.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class TimingCache:
    """One cache for all engines of a directory: what one of them measured the next one reads."""

    def __init__(self, source: Path | None, destination: Path | None) -> None:
        """Read `source` (as upstream: one that does not exist yet is an empty cache)."""
        self._source, self._destination = source, destination
        self._data = b""
        self._cache: Any = None
        if source is not None and source.is_file():
            self._data = source.read_bytes()
        elif source is not None:
            logger.info("%s does not exist yet: tactics are timed anew", source)

    def attach(self, config: Any) -> None:
        """Give the cache to a builder configuration; one of another GPU or version is left out."""
        if self._data:
            if self._set(config, self._data):
                return
            logger.warning(
                "the timing cache %s was made on another GPU or by another version of TensorRT: "
                "tactics are timed anew",
                self._source,
            )
        self._set(config, b"")

    def _set(self, config: Any, data: bytes) -> bool:
        # A builder does not own its cache: it must live here until the engine is built.
        self._cache = config.create_timing_cache(data)
        return self._cache is not None and bool(config.set_timing_cache(self._cache, False))

    def keep(self) -> None:
        """Take over what the build has added, and write it, whole, where it is to be kept."""
        if self._cache is None:
            return
        self._data = bytes(self._cache.serialize())
        if self._destination is None:
            return
        directory = self._destination.parent
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, delete=False) as file:
            file.write(self._data)
        made = Path(file.name)
        made.chmod(0o644)
        made.replace(self._destination)
