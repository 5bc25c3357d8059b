# SPDX-License-Identifier: Apache-2.0
"""Turns accepted tokens into what a client gets: cut at end tokens, stop words and max_tokens, with
tokens held back while a stop word may still be completing. Works inside accepted blocks.
"""

from __future__ import annotations

from collections.abc import Callable

from trtllm_dspark.decoding.acceptance import AcceptanceResult
from trtllm_dspark.decoding.sequence import Sequence
from trtllm_dspark.decoding.stops import find_end, held_back
from trtllm_dspark.types import FinishReason, RequestOutput


class Emitter:
    """Commits tokens to sequences and makes their outputs."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock

    def commit(
        self, sequence: Sequence, result: AcceptanceResult, index: int
    ) -> RequestOutput | None:
        """Commit row `index` of an acceptance; returns the output, or None if all is held back."""
        count = min(int(result.num_tokens[index]), sequence.num_wanted)
        num_old = len(sequence.output_ids)
        sequence.append(result.token_ids[index, :count])
        if result.log_probs is not None and sequence.params.return_log_probs:
            sequence.log_probs.extend(result.log_probs[index, :count].tolist())
        stats = sequence.stats
        stats.num_steps += 1
        stats.num_accepted_tokens += int(result.accepted_lens[index])
        stats.last_token_time_s = self.clock()
        if stats.first_token_time_s is None:
            stats.first_token_time_s = stats.last_token_time_s
        num_kept = self._find_end(sequence, num_old)
        return self._emit(sequence, num_kept)

    def _find_end(self, sequence: Sequence, num_old: int) -> int:
        """Set the finish reason if the output ends here; returns how many tokens may go out."""
        params = sequence.params
        end = find_end(sequence.output_ids, num_old, params.end_ids, params.stop_token_ids)
        if end is not None:
            num_kept, sequence.finish_reason = end
            return num_kept
        if sequence.num_wanted <= 0:
            sequence.finish_reason = FinishReason.LENGTH
            return len(sequence.output_ids)
        return len(sequence.output_ids) - held_back(sequence.output_ids, params.stop_token_ids)

    def _emit(self, sequence: Sequence, num_kept: int) -> RequestOutput | None:
        num_kept = max(num_kept, sequence.num_emitted)
        new = sequence.output_ids[sequence.num_emitted : num_kept]
        if not len(new) and sequence.finish_reason is None:
            return None
        log_probs = None
        if sequence.params.return_log_probs:
            log_probs = tuple(sequence.log_probs[sequence.num_emitted : num_kept])
        sequence.num_emitted = num_kept
        sequence.stats.num_output_tokens = num_kept
        return RequestOutput(
            request_id=sequence.request.request_id,
            new_token_ids=tuple(new.tolist()),
            log_probs=log_probs,
            finish_reason=sequence.finish_reason,
            stats=sequence.stats,
        )

    def end(self, sequence: Sequence) -> RequestOutput:
        """The last output of a request that ends without new tokens; held-back tokens go out."""
        output = self._emit(sequence, len(sequence.output_ids))
        if output is None:
            raise RuntimeError("end() needs a sequence with a finish reason")
        return output
