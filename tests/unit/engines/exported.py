# SPDX-License-Identifier: Apache-2.0
"""Exported graphs of tiny models in ONNX Runtime, driven by the very arrays TensorRT would get."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch

from tests.unit.models.builders import target_from_hf
from trtllm_dspark.config import DrafterConfig
from trtllm_dspark.engines.build_profiles import EngineLimits
from trtllm_dspark.engines.export import export_drafter, export_target
from trtllm_dspark.engines.graph_names import pages_in, pages_out
from trtllm_dspark.engines.protocol import ContextAppend, DrafterStep, TargetStep
from trtllm_dspark.engines.tensorrt_engine_inputs import (
    NO_ROWS,
    append_inputs,
    append_key,
    context_rows,
    drafting_inputs,
    drafting_key,
    target_inputs,
    target_key,
)
from trtllm_dspark.engines.torch_engine import TorchEngine
from trtllm_dspark.models.drafter import DSparkModel
from trtllm_dspark.models.target import TargetModel
from trtllm_dspark.types import EngineInfo

PAGE_SIZE = 4
# pytest keeps every record of torch's tracing log, which costs more than the export itself.
logging.getLogger("torch.__trace").disabled = True


def make_target(config, seed: int = 0) -> TargetModel:
    from transformers import LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    cls = Qwen3ForCausalLM if isinstance(config, Qwen3Config) else LlamaForCausalLM
    reference = cls(config).eval()
    for parameter in reference.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    return target_from_hf(reference)


def make_drafter(config: DrafterConfig, target: TargetModel, seed: int = 1) -> DSparkModel:
    model = DSparkModel(config, target.embed_tokens, target.lm_head)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.1 * noise if parameter.dim() == 1 else 0.3 * noise
    return model.requires_grad_(False).eval()


def make_limits(drafter: DSparkModel | None, **changes: object) -> EngineLimits:
    fields: dict[str, object] = dict(
        rungs=(1, 2, 4, 8, 16, 32),
        request_buckets=(1, 2, 4),
        num_drafts=0 if drafter is None else drafter.config.num_drafts,
        block_len=0 if drafter is None else drafter.block_len,
        max_seq_len=40,
        page_size=PAGE_SIZE,
        num_pages=41,
    )
    return EngineLimits(**{**fields, **changes})  # type: ignore[arg-type]


def make_torch_engine(
    target: TargetModel, drafter: DSparkModel | None, limits: EngineLimits
) -> TorchEngine:
    info = EngineInfo(
        vocab_size=target.config.vocab_size,
        max_num_requests=limits.max_num_requests,
        max_seq_len=limits.max_seq_len,
        page_size=limits.page_size,
        num_pages=limits.num_pages,
        rungs=limits.rungs,
        num_drafts=limits.num_drafts,
        fingerprint="test",
        device="cpu",
    )
    return TorchEngine(target, info, drafter)


class ExportedEngine:
    """One exported target (and drafter) in ONNX Runtime; pages go in and out of every call."""

    def __init__(
        self,
        directory: Path,
        target: TargetModel,
        drafter: DSparkModel | None,
        limits: EngineLimits,
        exact_shapes: bool = True,
    ) -> None:
        self.limits, self.exact_shapes = limits, exact_shapes
        self.taps = () if drafter is None else drafter.config.target_layer_ids
        self.target = _session(
            export_target(target, directory / "target.onnx", self.taps, page_size=limits.page_size)
        )
        shape = target.config
        self.kv_pages = self._pages(shape.num_layers, shape.num_kv_heads, shape.head_dim)
        self.drafter_pages: list[np.ndarray] = []
        if drafter is not None:
            path = directory / "drafter.onnx"
            self.drafter = _session(export_drafter(drafter, path, page_size=limits.page_size))
            layout = drafter.config
            self.tap_width = len(self.taps) * layout.target_hidden_size
            self.drafter_pages = self._pages(
                layout.num_layers, layout.num_kv_heads, layout.head_dim
            )

    def _pages(self, layers: int, heads: int, dim: int) -> list[np.ndarray]:
        shape = (self.limits.num_pages, self.limits.page_size, 2, heads, dim)
        return [np.zeros(shape, np.float32) for _ in range(layers)]

    def run_target(self, step: TargetStep) -> tuple[np.ndarray, np.ndarray | None]:
        key = target_key(step, self.limits, exact_shapes=self.exact_shapes)
        outputs = _run(self.target, target_inputs(step, key, self.limits), self.kv_pages)
        taps = outputs["taps"][: len(step.token_ids)] if self.taps else None
        return outputs["logits"][: len(step.logit_rows)], taps

    def append_context(self, rows: ContextAppend) -> None:
        new = context_rows(rows.positions, rows.cu_row_lens, rows.page_table, PAGE_SIZE)
        key = append_key(len(rows.positions), self.limits)
        inputs = append_inputs(new, key, self.limits)
        inputs["taps"] = self._taps(rows.taps, key.context_rows)
        _run(self.drafter, inputs, self.drafter_pages)

    def run_drafter(
        self, step: DrafterStep, rows: ContextAppend | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        new = NO_ROWS
        if rows is not None:
            new = context_rows(rows.positions, rows.cu_row_lens, rows.page_table, PAGE_SIZE)
        key = drafting_key(step, len(new.positions), self.limits)
        inputs = drafting_inputs(step, new, key, self.limits)
        inputs["taps"] = self._taps(None if rows is None else rows.taps, key.context_rows)
        outputs = _run(self.drafter, inputs, self.drafter_pages)
        count = len(step.anchor_ids)
        return outputs["token_ids"][:count], outputs["confidence_logits"][:count]

    def _taps(self, taps: np.ndarray | None, rows: int) -> np.ndarray:
        padded = np.zeros((rows, self.tap_width), np.float32)
        if taps is not None:
            padded[: len(taps)] = taps
        return padded


def _session(path: Path):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _run(session, inputs: dict[str, np.ndarray], pages: list[np.ndarray]) -> dict[str, np.ndarray]:
    feed = {**inputs, **{pages_in(i): p for i, p in enumerate(pages)}}
    names = [output.name for output in session.get_outputs()]
    outputs = dict(zip(names, session.run(names, feed), strict=True))
    for index in range(len(pages)):
        pages[index] = outputs[pages_out(index)]
    return outputs
