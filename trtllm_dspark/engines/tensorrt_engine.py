# SPDX-License-Identifier: Apache-2.0
"""The `Engine` protocol over TensorRT or TensorRT-RTX engine files.

Joins what is decided elsewhere: `tensorrt_engine_inputs` (keys, arrays), `tensorrt_engine_calls`
(memory, graphs), `tensorrt_engine_exchange` (torch tensors for the protocol, the only torch there
is). Drafting is greedy. Not yet executed on a GPU: see docs/engines.md.
"""

from __future__ import annotations

import numpy as np

from trtllm_dspark.engines.build_profiles import EngineLimits
from trtllm_dspark.engines.protocol import (
    ContextAppend,
    DrafterOutput,
    DrafterStep,
    TargetOutput,
    TargetStep,
)
from trtllm_dspark.engines.step_checks import (
    check_drafter_step,
    check_pages,
    check_target_step,
)
from trtllm_dspark.engines.tensorrt_engine_buffers import split_rows
from trtllm_dspark.engines.tensorrt_engine_calls import EngineCalls
from trtllm_dspark.engines.tensorrt_engine_device import Device
from trtllm_dspark.engines.tensorrt_engine_exchange import Exchange
from trtllm_dspark.engines.tensorrt_engine_inputs import (
    NO_ROWS,
    ContextRows,
    append_inputs,
    append_key,
    context_rows,
    drafting_inputs,
    drafting_key,
    fits_drafting,
    target_inputs,
    target_key,
)
from trtllm_dspark.engines.tensorrt_engine_memory import as_floats
from trtllm_dspark.errors import EngineError
from trtllm_dspark.types import EngineInfo, FloatArray, IntArray


class TensorRTEngine:
    """Runs one engine directory. Not thread-safe: one thread drives it."""

    def __init__(
        self,
        info: EngineInfo,
        limits: EngineLimits,
        device: Device,
        exchange: Exchange,
        target: EngineCalls,
        drafter: EngineCalls | None = None,
    ) -> None:
        self.info = info
        self._limits, self._device, self._exchange = limits, device, exchange
        self._target, self._drafter = target, drafter
        self._pending = NO_ROWS
        """Context rows whose taps lie in the drafter's buffer: the next draft takes them along."""
        outputs = {} if drafter is None else drafter.buffers
        self._results = {
            name: (outputs[name], device.host_zeros(outputs[name].shape, outputs[name].dtype))
            for name in ("token_ids", "confidence_logits")
            if name in outputs
        }

    def run_target(self, step: TargetStep) -> TargetOutput:
        """Append K/V of the new rows; return logits of `logit_rows` and taps of all real rows."""
        check_target_step(step, self.info)
        key = target_key(step, self._limits, exact_shapes=not self._target.in_place)
        self._device.activate()
        self._exchange.begin()
        self._target.run(key, target_inputs(step, key, self._limits))
        buffers = self._target.buffers
        wanted = [(buffers["logits"], len(step.logit_rows))]
        if self._drafter is not None:
            wanted.append((buffers["taps"], len(step.token_ids)))
        logits, *taps = self._exchange.give(wanted)
        self._exchange.end()
        return TargetOutput(logits, taps[0] if taps else None)

    def append_context(self, rows: ContextAppend) -> None:
        """Take new context rows (no drafting); the last of them are written with the next draft."""
        drafter = self._require_drafter("append_context")
        check_pages(rows.page_table, self.info)
        new = context_rows(
            rows.positions, rows.cu_row_lens, rows.page_table, self._limits.page_size
        )
        self._device.activate()
        self._exchange.begin()
        for part in split_rows(len(new.positions), self._limits.max_num_tokens):
            self._flush(drafter)
            self._exchange.take(drafter.buffers["taps"], rows.taps[part])
            self._pending = ContextRows(new.positions[part], new.slots[part])
        self._exchange.end()

    def run_drafter(self, step: DrafterStep) -> DrafterOutput:
        """Draft one block per request, greedily whatever the step's sampling says."""
        drafter = self._require_drafter("run_drafter")
        check_drafter_step(step, self.info)
        self._device.activate()
        if not fits_drafting(len(step.anchor_ids), len(self._pending.positions), self._limits):
            self._flush(drafter)
        rows, self._pending = self._pending, NO_ROWS
        key = drafting_key(step, len(rows.positions), self._limits)
        drafter.run(key, drafting_inputs(step, rows, key, self._limits))
        token_ids, confidence = self._read_results(len(step.anchor_ids))
        return DrafterOutput(token_ids, confidence, None)

    def synchronize(self) -> None:
        """Wait for everything that was queued, appended context rows included."""
        self._device.synchronize()

    def _flush(self, drafter: EngineCalls) -> None:
        """Write pending context rows in a call of their own."""
        rows, self._pending = self._pending, NO_ROWS
        if len(rows.positions):
            key = append_key(len(rows.positions), self._limits)
            drafter.run(key, append_inputs(rows, key, self._limits))

    def _read_results(self, count: int) -> tuple[IntArray, FloatArray]:
        """Token ids and confidences of the first rows on the host (waits for the device)."""
        for buffer, host in self._results.values():
            self._device.copy(host.ctypes.data, buffer.address, buffer.rows(count).num_bytes)
        self._device.synchronize()
        token_ids = self._results["token_ids"][1][:count]
        buffer, confidence = self._results["confidence_logits"]
        return token_ids.astype(np.int32), as_floats(confidence[:count], buffer.dtype)

    def _require_drafter(self, call: str) -> EngineCalls:
        if self._drafter is None:
            raise EngineError(f"{call} was called on an engine loaded without a drafter")
        return self._drafter
