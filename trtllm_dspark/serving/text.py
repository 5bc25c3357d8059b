# SPDX-License-Identifier: Apache-2.0
"""Text of a growing token sequence: incremental detokenisation and stop strings.

The result depends on the tokens alone, never on how they were grouped into steps or accepted
blocks. Knows tokens and text; nothing of requests, tensors or servers.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class TokenBytes(Protocol):
    """The part of a tokenizer that text needs."""

    special_ids: frozenset[int]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""
        ...


@dataclass(frozen=True)
class TextGroup:
    """Tokens whose text will not change any more, with that text."""

    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    text: str = ""


def decode_tokens(
    tokenizer: TokenBytes, token_ids: Sequence[int], skip_special: bool = True
) -> str:
    """Text of a whole sequence; bytes that are not UTF-8 become U+FFFD."""
    skipped = tokenizer.special_ids if skip_special else frozenset()
    pieces = (tokenizer.token_bytes(int(i)) for i in token_ids if int(i) not in skipped)
    return b"".join(pieces).decode("utf-8", "replace")


class StopMatcher:
    """Finds the first completed occurrence of one string in a text that comes in pieces (KMP)."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.state = 0
        """Length of the longest end of the text that begins the pattern."""
        self._fallback = [0] * len(pattern)
        length = 0
        for i in range(1, len(pattern)):
            while length and pattern[i] != pattern[length]:
                length = self._fallback[length - 1]
            length += pattern[i] == pattern[length]
            self._fallback[i] = length

    def advance(self, character: str) -> bool:
        """Take one character; True when the pattern is complete."""
        while self.state and self.pattern[self.state] != character:
            self.state = self._fallback[self.state - 1]
        self.state += self.pattern[self.state] == character
        return self.state == len(self.pattern)


@dataclass(frozen=True)
class _Pending:
    token_id: int
    log_prob: float | None
    end: int
    """Characters of the whole output up to and including this token."""
    is_aligned: bool
    """Whether a character ends with this token."""


class TextStream:
    """Turns one request's tokens into text-stable groups.

    A token is held back while its last character is incomplete or while its text may still become
    part of a stop string. The output ends just before the stop string that is completed first;
    where two are completed by the same character, before the longer one.
    """

    def __init__(
        self,
        tokenizer: TokenBytes,
        stop_strings: Sequence[str] = (),
        *,
        skip_special: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._matchers = [
            StopMatcher(s) for s in sorted(set(stop_strings), key=len, reverse=True) if s
        ]
        self._pending: list[_Pending] = []
        self._text = ""
        """Text that was decoded and not yet given out."""
        self._num_given = 0
        """Characters given out."""
        self.num_tokens = 0
        """Tokens given out."""
        self.is_stopped = False
        """A stop string was found: the output is over."""

    def push(self, token_ids: Sequence[int], log_probs: Sequence[float] | None = None) -> TextGroup:
        """Take new tokens; returns what became stable (perhaps nothing), cut at a stop string."""
        for position, token_id in enumerate(token_ids):
            log_prob = None if log_probs is None else log_probs[position]
            if not self.is_stopped:
                self._take(int(token_id), log_prob)
        if self.is_stopped:
            return self._give(len(self._pending), self._num_given + len(self._text))
        num_held = max((m.state for m in self._matchers), default=0)
        stable = self._num_given + len(self._text) - num_held
        count = 0
        for index, pending in enumerate(self._pending):
            if pending.end > stable:
                break
            if pending.is_aligned:
                count = index + 1
        return self._give(count, self._pending[count - 1].end if count else self._num_given)

    def finish(self) -> TextGroup:
        """The request ended for another reason: all that was held back, incomplete bytes too."""
        if self.is_stopped:
            return TextGroup()
        self._match(self._decoder.decode(b"", final=True))
        self._drop_cut_tokens()
        return self._give(len(self._pending), self._num_given + len(self._text))

    def _take(self, token_id: int, log_prob: float | None) -> None:
        data = b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id)
        self._match(self._decoder.decode(data))
        is_aligned = not self._decoder.getstate()[0]
        end = self._num_given + len(self._text)
        self._pending.append(_Pending(token_id, log_prob, end, is_aligned))
        if self.is_stopped:
            self._pending.pop()
            self._drop_cut_tokens()

    def _drop_cut_tokens(self) -> None:
        """Forget held-back tokens that reach into a stop string, if one was found."""
        if not self.is_stopped:
            return
        end = self._num_given + len(self._text)
        whole = [i for i, p in enumerate(self._pending, 1) if p.is_aligned and p.end <= end]
        self._pending = self._pending[: max(whole, default=0)]

    def _match(self, characters: str) -> None:
        """Append characters to the text, stopping before a completed stop string."""
        if not self._matchers:
            self._text += characters
            return
        for character in characters:
            self._text += character
            done = [m for m in self._matchers if m.advance(character)]
            if done:
                self._text = self._text[: -len(done[0].pattern)]
                self.is_stopped = True
                return

    def _give(self, count: int, end: int) -> TextGroup:
        given, self._pending = self._pending[:count], self._pending[count:]
        text = self._text[: end - self._num_given]
        self._text = self._text[len(text) :]
        self._num_given += len(text)
        self.num_tokens += len(given)
        log_probs = tuple(p.log_prob for p in given if p.log_prob is not None)
        return TextGroup(tuple(p.token_id for p in given), log_probs, text)
