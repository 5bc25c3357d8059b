# SPDX-License-Identifier: Apache-2.0
"""Small systems on `KernelEngine` in the kernels' interpreter, beside the same on the torch ops."""

from __future__ import annotations

from tests.unit.decoding.loops import TinyModel
from tests.unit.decoding.test_dspark_loop import random_drafter
from trtllm_dspark.config import BucketConfig
from trtllm_dspark.decoding.drafters.dspark import DSparkDrafter
from trtllm_dspark.decoding.loop import DecodingLoop
from trtllm_dspark.engines.kernel_engine import KernelEngine
from trtllm_dspark.engines.torch_engine import TorchEngine
from trtllm_dspark.engines.torch_graphs import Capture
from trtllm_dspark.models.drafter import DSparkModel
from trtllm_dspark.scheduling import create_policy
from trtllm_dspark.scheduling.buckets import build_ladder
from trtllm_dspark.scheduling.survival import SurvivalEstimator
from trtllm_dspark.types import EngineInfo

GAMMA = 3


def make_info(vocab_size: int, num_drafts: int = GAMMA) -> EngineInfo:
    """Two requests, short sequences, few rungs: what an interpreter can bear."""
    buckets = BucketConfig(
        max_num_requests=2, max_num_tokens=12, request_buckets=(1, 2), ratios=(0.5, 1.0)
    )
    return EngineInfo(
        vocab_size=vocab_size,
        max_num_requests=2,
        max_seq_len=40,
        page_size=8,
        num_pages=16,
        rungs=build_ladder(buckets, num_drafts),
        num_drafts=num_drafts,
        fingerprint="tiny",
        device="cpu",
    )


def make_drafter(tiny: TinyModel, **changes: object) -> DSparkModel:
    """A random drafter of the tiny model."""
    fields: dict[str, object] = {"num_drafts": GAMMA, "num_layers": 1, "head_type": "markov"}
    return random_drafter(tiny.target, **{**fields, **changes})


def make_engine(
    tiny: TinyModel, drafter: DSparkModel, *, by_kernel: bool, capture: Capture | None = None
) -> TorchEngine:
    """The engine under test, or the torch one."""
    info = make_info(tiny.target.config.vocab_size, drafter.config.num_drafts)
    if by_kernel:
        return KernelEngine(tiny.target, info, drafter, capture=capture)
    return TorchEngine(tiny.target, info, drafter)


def make_loop(
    engine: TorchEngine, policy: str = "fixed", options: dict | None = None
) -> DecodingLoop:
    """A loop whose unseeded requests draw the same noise every time."""
    gamma = engine.info.num_drafts
    return DecodingLoop(
        engine,
        DSparkDrafter(engine),
        create_policy(policy, options),
        SurvivalEstimator(gamma),
        draw_seed=lambda: 1234,
    )
