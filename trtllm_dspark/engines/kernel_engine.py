# SPDX-License-Identifier: Apache-2.0
"""The torch engine by kernels: every step is a replay of one captured graph on static buffers.

Steps that no graph holds (prompts scored row by row) run the same kernels uncaptured. On CPU
tensors, in the kernels' interpreter, it is the same engine without graphs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from trtllm_dspark.engines.drafter_graphs import DrafterGraphs
from trtllm_dspark.engines.kernel_drafter import KernelDrafter
from trtllm_dspark.engines.protocol import (
    ContextAppend,
    DrafterOutput,
    DrafterStep,
    PendingRound,
    RoundStep,
    TargetOutput,
    TargetStep,
)
from trtllm_dspark.engines.round_graphs import RoundGraphs
from trtllm_dspark.engines.step_checks import (
    check_drafter_step,
    check_pages,
    check_round_step,
    check_target_step,
)
from trtllm_dspark.engines.step_limits import StepLimits
from trtllm_dspark.engines.target_graphs import TargetGraphs
from trtllm_dspark.engines.torch_engine import TorchEngine
from trtllm_dspark.engines.torch_graphs import Capture, choose_capture
from trtllm_dspark.models.drafter import DSparkModel
from trtllm_dspark.models.target import TargetModel
from trtllm_dspark.ops.kernels import kernels_on_cpu
from trtllm_dspark.types import EngineInfo, IntArray


class KernelEngine(TorchEngine):
    """See the module docstring. Not thread-safe: one thread drives it."""

    def __init__(
        self,
        model: TargetModel,
        info: EngineInfo,
        drafter: DSparkModel | None = None,
        *,
        request_buckets: tuple[int, ...] = (),
        capture: Capture | None = None,
    ) -> None:
        super().__init__(model, info, drafter)
        capture = capture or choose_capture(self.device)
        block_len = 0 if drafter is None else drafter.block_len
        self.limits = StepLimits(info, block_len, request_buckets)
        self.target = TargetGraphs(model, self.limits, self.kv_pages, self.tap_layers, capture)
        self.blocks: DrafterGraphs | None = None
        self.rounds: RoundGraphs | None = None
        if drafter is not None:
            width = self.target.taps.shape[1]
            kernels = KernelDrafter(drafter, self.drafter_pages)
            self.blocks = DrafterGraphs(kernels, self.limits, width, capture)
            self.rounds = RoundGraphs(kernels, self.target, self.limits, capture)

    def _kernels(self) -> AbstractContextManager[object]:
        """Where calls run: this engine's device (graphs replay on the current one)."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else kernels_on_cpu()

    @torch.inference_mode()
    def run_target(self, step: TargetStep) -> TargetOutput:
        """Append K/V of the new rows; return logits of `logit_rows` and taps of all real rows."""
        check_target_step(step, self.info)
        with self._kernels():
            if self.target.fits(step):
                return self.target.run(step)
            return super().run_target(step)

    @torch.inference_mode()
    def append_context(self, rows: ContextAppend) -> None:
        """Write the drafter's K/V of new context rows (no drafting)."""
        self._require_drafter("append_context")
        assert self.blocks is not None
        check_pages(rows.page_table, self.info)
        with self._kernels():
            self.blocks.append(rows)

    @torch.inference_mode()
    def run_drafter(self, step: DrafterStep) -> DrafterOutput:
        """Draft one block per request."""
        self._require_drafter("run_drafter")
        assert self.blocks is not None
        check_drafter_step(step, self.info)
        with self._kernels():
            return self.blocks.run(step)

    @torch.inference_mode()
    def start_round(self, step: RoundStep) -> PendingRound:
        """Launch a whole round and return at once; its context rows are written, too."""
        self._require_drafter("start_round")
        assert self.rounds is not None
        check_round_step(step, self.info)
        with self._kernels():
            return self.rounds.start(step)

    def _plan_attention(
        self,
        lengths: tuple[IntArray, IntArray, IntArray],
        num_rows: int,
        q_per_kv: int,
        is_causal: bool,
    ) -> dict[str, Any]:
        """The kernels' plan of an uncaptured target step, from its own lengths."""
        from dspark_plugins.ragged_attention import AttentionShape, plan_ragged_attention

        info, config = self.info, self.model.config
        shape = AttentionShape(
            config.num_heads, config.num_kv_heads, config.head_dim, info.page_size, info.num_pages
        )
        plan = plan_ragged_attention(shape, *lengths, num_rows=num_rows, device=self.device)
        return {"kernel_plan": plan}
