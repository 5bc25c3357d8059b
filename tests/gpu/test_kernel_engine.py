# SPDX-License-Identifier: Apache-2.0
"""The engine under CUDA graphs gives the tokens of the torch ops on the CPU, step by step and in
rounds. Run with `TRITON_INTERPRET=0 pytest -m gpu`.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from tests.unit.decoding.loops import TinyModel, generate, random_prompts, request
from tests.unit.engines.kernel_loops import make_drafter, make_info, make_loop
from trtllm_dspark.engines.kernel_engine import KernelEngine
from trtllm_dspark.models.drafter import DSparkModel

triton = pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        triton.knobs.runtime.interpret, reason="kernels are interpreted: set TRITON_INTERPRET=0"
    ),
]


def cuda_engine(tiny: TinyModel) -> KernelEngine:
    target = copy.deepcopy(tiny.target).cuda()
    source = make_drafter(tiny)
    drafter = DSparkModel(source.config, target.embed_tokens, target.lm_head)
    drafter.load_state_dict(source.state_dict())
    info = dataclasses.replace(make_info(tiny.target.config.vocab_size), device="cuda")
    return KernelEngine(target, info, drafter.cuda().requires_grad_(False).eval())


@pytest.mark.parametrize("policy", ["fixed", "adaptive"])
def test_greedy_tokens_under_graphs_are_those_of_plain_decoding(policy: str) -> None:
    tiny = TinyModel(3)
    loop = make_loop(cuda_engine(tiny), policy)
    prompts = random_prompts(4, seed=1, longest=14)
    found = generate(loop, [request(i, p, max_tokens=12) for i, p in enumerate(prompts)])
    assert found == {str(i): tiny.greedy(p, 12) for i, p in enumerate(prompts)}
    assert (loop.rounds is not None) == (policy == "adaptive")
