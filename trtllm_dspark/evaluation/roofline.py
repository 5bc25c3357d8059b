# SPDX-License-Identifier: Apache-2.0
"""Latency tables for machines nobody has measured: a roofline of {GPU, model, precision, TP} with a
five-layer drafter. An estimate: every assumption is a field, and `describe` prints them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from trtllm_dspark.config import BucketConfig, require
from trtllm_dspark.errors import ConfigError
from trtllm_dspark.evaluation.hardware import GPUS, MODELS, Gpu, TargetShape
from trtllm_dspark.scheduling.buckets import build_ladder, request_buckets
from trtllm_dspark.scheduling.latency_table import LatencyTable

PRECISION_BYTES = {"bf16": 2.0, "fp8": 1.0}


@dataclass(frozen=True)
class Roofline:
    """What is estimated and under which assumptions."""

    gpu: str = "h100"
    model: str = "qwen3-8b"
    precision: str = "bf16"
    tensor_parallel: int = 1
    context_tokens: int = 2048
    """K/V that every decoding request reads."""
    num_drafts: int = 7
    """γ"""
    max_num_requests: int = 256
    ratios: tuple[float, ...] = (0.125, 0.25, 0.375, 0.5, 0.75, 1.0)
    memory_efficiency: float = 0.7
    compute_efficiency: float = 0.85
    host_ms: float = 0.6
    """Launches, sampling and scheduling of a whole step."""
    request_us: float = 20.0
    """Host time per request and step."""
    collective_us: float = 12.0
    """Latency of one all-reduce (two per layer with tensor parallelism)."""
    drafter_layers: int = 5
    markov_rank: int = 256
    gpu_spec: Gpu = field(init=False, repr=False)
    shape: TargetShape = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, value, known in (
            ("GPU", self.gpu, GPUS), ("model", self.model, MODELS),
            ("precision", self.precision, PRECISION_BYTES),
        ):  # fmt: skip
            if value not in known:
                raise ConfigError(f"{name} {value!r} is unknown: choose one of {', '.join(known)}")
        require(self.tensor_parallel in (1, 2, 4, 8), "tensor_parallel", self.tensor_parallel,
                "1, 2, 4 or 8")  # fmt: skip
        require(1 <= self.max_num_requests <= 4096, "max_num_requests", self.max_num_requests,
                "between 1 and 4096")  # fmt: skip
        object.__setattr__(self, "gpu_spec", GPUS[self.gpu])
        object.__setattr__(self, "shape", MODELS[self.model])
        if self.kv_tokens < self.context_tokens:
            raise ConfigError(
                f"{self.model} in {self.precision} leaves K/V room for {self.kv_tokens} tokens on "
                f"{self.tensor_parallel} × {self.gpu}: use more GPUs or another precision"
            )

    @property
    def kv_tokens(self) -> int:
        """Tokens whose K/V fit beside the weights (10 % of memory kept free)."""
        held = 0.9 * self.gpu_spec.memory_gb * 1e9 * self.tensor_parallel
        free = held - (self.shape.all_params + self._drafter_params) * self._bytes
        per_token = self.shape.kv_bytes_per_token()
        per_token *= 1.0 + self.drafter_layers / self.shape.num_layers
        return max(int(free / per_token), 0)

    @property
    def _bytes(self) -> float:
        return PRECISION_BYTES[self.precision]

    @property
    def _drafter_params(self) -> float:
        layer = self.shape.attention_params + 3.0 * self.shape.hidden_size * min(
            4 * self.shape.hidden_size, 12288
        )
        return self.drafter_layers * layer + 2.0 * self.markov_rank * self.shape.vocab_size

    def target_ms(self, num_requests: int, num_tokens: int) -> float:
        """Milliseconds of one target pass over `num_tokens` rows of `num_requests` requests."""
        shape = self.shape
        kv = num_requests * self.context_tokens * shape.kv_bytes_per_token()
        time = self._pass_ms(
            shape.read_params(num_tokens) * self._bytes + kv, 2.0 * shape.active_params * num_tokens
        )
        if self.tensor_parallel > 1:
            volume = 2.0 * num_tokens * shape.hidden_size * 2.0
            reduce_ms = self.collective_us / 1e3 + volume / (self.gpu_spec.nvlink_gb_s * 1e6)
            time += 2 * shape.num_layers * reduce_ms
        return time

    def draft_ms(self, num_requests: int) -> float:
        """Milliseconds of drafting one block for each of `num_requests` requests."""
        if not self.num_drafts:
            return 0.0
        shape, rows = self.shape, num_requests * self.num_drafts
        head = float(shape.vocab_size * shape.hidden_size)
        kv = num_requests * self.context_tokens * shape.kv_bytes_per_token()
        kv *= self.drafter_layers / shape.num_layers
        return self._pass_ms(
            (self._drafter_params + head) * self._bytes + kv,
            2.0 * (self._drafter_params + head) * rows,
        )

    def plain_ms(self, num_requests: int) -> float:
        """Milliseconds of a plain decoding step of a server without a drafter."""
        overhead = self.host_ms + num_requests * self.request_us / 1e3
        return self.target_ms(num_requests, num_requests) + overhead

    def step_ms(self, num_requests: int, num_tokens: int) -> float:
        """Milliseconds of a whole drafted step."""
        overhead = self.host_ms + num_requests * self.request_us / 1e3
        return self.draft_ms(num_requests) + self.target_ms(num_requests, num_tokens) + overhead

    def _pass_ms(self, num_bytes: float, flops: float) -> float:
        gpu, parts = self.gpu_spec, self.tensor_parallel
        peak = gpu.bf16_tflops if self.precision == "bf16" else gpu.fp8_tflops
        memory = num_bytes / (gpu.bandwidth_tb_s * 1e9 * self.memory_efficiency * parts)
        compute = flops / (peak * 1e9 * self.compute_efficiency * parts)
        return float((memory**3 + compute**3) ** (1 / 3))  # a corner that is round, as measured

    def latency_table(self) -> LatencyTable:
        """Return the table over this roofline's own ladder."""
        last = self.max_num_requests * (self.num_drafts + 1)
        config = BucketConfig(
            max_num_requests=self.max_num_requests, max_num_tokens=last, ratios=self.ratios
        )
        buckets, rungs = request_buckets(config), build_ladder(config, self.num_drafts)
        plain = np.array([self.plain_ms(b) for b in buckets])
        return LatencyTable(
            request_buckets=buckets,
            rungs=rungs,
            step_ms=np.array([[self.step_ms(b, max(t, b)) for t in rungs] for b in buckets]),
            autoregressive_ms=plain,
            no_draft_ms=plain * 1.01,
            draft_ms=np.array([self.draft_ms(b) for b in buckets]),
            fingerprint=f"roofline-{self.gpu}-{self.model}-{self.precision}-{self.tensor_parallel}",
            num_drafts=self.num_drafts,
            context_lens=(self.context_tokens,),
            machine={"device": f"roofline of {self.tensor_parallel} × {self.gpu}, {self.model}"},
        )

    def describe(self) -> list[str]:
        """Return the assumptions, one a line."""
        gpu, shape = self.gpu_spec, self.shape
        return [
            f"{self.tensor_parallel} × {self.gpu}: {gpu.bandwidth_tb_s} TB/s at "
            f"{self.memory_efficiency:.0%}, {gpu.bf16_tflops} (fp8 {gpu.fp8_tflops}) TFLOPS at "
            f"{self.compute_efficiency:.0%}, {gpu.memory_gb} GB",
            f"{self.model} in {self.precision}: {shape.all_params / 1e9:.1f} B parameters, "
            f"{shape.active_params / 1e9:.1f} B per token, K/V "
            f"{shape.kv_bytes_per_token() / 1024:.0f} KiB per token",
            f"a request holds {self.context_tokens} tokens; K/V for {self.kv_tokens} tokens fit",
            f"drafter: {self.drafter_layers} layers of the target's width, γ = {self.num_drafts}, "
            f"Markov rank {self.markov_rank}",
            f"host: {self.host_ms} ms a step + {self.request_us} µs a request"
            + (f"; all-reduce {self.collective_us} µs" if self.tensor_parallel > 1 else ""),
        ]
