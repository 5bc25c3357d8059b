# SPDX-License-Identifier: Apache-2.0
"""Progress of long runs: a bar on a terminal, plain lines elsewhere; and where tables are shown."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 20.0
FILE_WIDTH = 160
"""Columns of tables that go to a file or a pipe: no number is cut off there."""


def make_console() -> Console:
    """A console on stdout, as wide as the terminal."""
    return Console() if sys.stdout.isatty() else Console(width=FILE_WIDTH)


class ProgressReport:
    """Context manager; `advance` is cheap enough for every item."""

    def __init__(self, title: str, total: int, done: int = 0) -> None:
        self.title, self.total, self.done = title, total, done
        self._bar: Progress | None = None
        self._last_line = -SECONDS_BETWEEN_LINES

    def __enter__(self) -> ProgressReport:
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task(
                self.title, total=self.total, completed=self.done, note=""
            )
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, note: str = "") -> None:
        """One more item is done."""
        self.done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, note=note)
            return
        now = time.monotonic()
        if self.done >= self.total or now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            print(f"{self.title}: {self.done}/{self.total} {note}".rstrip(), file=sys.stderr)
            sys.stderr.flush()
