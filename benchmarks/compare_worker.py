# SPDX-License-Identifier: Apache-2.0
"""One runtime of compare_runtimes.py: loads a model, says what it is, then answers JSON lines
{"prompts": token ids, "num_tokens": N} with {"seconds": …, "num_tokens": …}.

Only this project's runtimes batch requests of different lengths that come and go; transformers
gets one padded batch (its assisted generation takes one prompt at a time), llama-cpp-python's
`Llama` holds one sequence: where a runtime cannot batch, prompts are answered one after another.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LOOKUP_TOKENS = 7
"""Drafts per look-up, everywhere."""


class Runtime(Protocol):
    """Answers prompts greedily with exactly `num_tokens` new tokens each."""

    about: dict[str, Any]

    def answer(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> int:
        """Generate; returns how many tokens came."""
        ...


class TransformersRuntime:
    """Hugging Face `generate`."""

    def __init__(self, arguments: argparse.Namespace, lookup: bool) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch, self.lookup = torch, lookup
        torch.set_num_threads(arguments.threads)
        self.model = AutoModelForCausalLM.from_pretrained(
            arguments.model_dir, dtype=getattr(torch, arguments.dtype)
        ).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0
        how = "one after another, prompt look-up" if lookup else "one padded batch"
        self.about = {"version": metadata.version("transformers"), "how": how}

    def answer(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> int:
        """Generate."""
        groups = [[prompt] for prompt in prompts] if self.lookup else [list(prompts)]
        return sum(self._answer_batch(group, num_tokens) for group in groups)

    def _answer_batch(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> int:
        torch, longest = self.torch, max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        extra = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if self.lookup else {}
        with torch.inference_mode():
            found = self.model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=num_tokens, **extra
            )
        return int(found.shape[1] - longest) * len(prompts)


class LlamaCppRuntime:
    """llama-cpp-python on a GGUF (its own quantisation: named in `about`)."""

    def __init__(self, arguments: argparse.Namespace, lookup: bool) -> None:
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        if not arguments.gguf:
            raise ImportError("no --gguf was given")
        if arguments.no_repack:
            keep_weights_as_they_are()
        draft = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS) if lookup else None
        self.model = Llama(
            model_path=arguments.gguf, n_ctx=2048, n_threads=arguments.threads,
            n_threads_batch=arguments.threads, draft_model=draft,
            logits_all=lookup,  # else its scores have room for n_batch tokens, not for n_ctx
            verbose=False,
        )  # fmt: skip
        self.about = {
            "version": metadata.version("llama-cpp-python"),
            "gguf": Path(arguments.gguf).name,
            "how": "one after another"
            + (", prompt look-up" if lookup else "")
            + (", weights not repacked" if arguments.no_repack else ""),
        }

    def answer(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> int:
        """Generate; `Llama.generate` does not stop at end tokens."""
        count = 0
        for prompt in prompts:
            self.model.reset()
            for index, _ in enumerate(self.model.generate(list(prompt), temp=0.0)):
                if index + 1 == num_tokens:
                    count += num_tokens
                    break
        return count


def keep_weights_as_they_are() -> None:
    """Forbid llama.cpp to repack weights: on some machines its AMX kernels end with signal 11
    (ggml-org/llama.cpp#20824). `Llama` has no argument for it, its default parameters have.
    """
    from llama_cpp import llama_cpp as library

    defaults = library.llama_model_default_params

    def without_repacking() -> Any:
        params = defaults()
        params.use_extra_bufts = False
        return params

    library.llama_model_default_params = without_repacking


class DSparkRuntime:
    """This project's decoding loop in this process."""

    def __init__(self, arguments: argparse.Namespace, drafter: str, policy: str) -> None:
        from trtllm_dspark.config import BucketConfig, CacheConfig, SchedulerConfig, SystemConfig
        from trtllm_dspark.runtime import build_system

        self.system = build_system(
            SystemConfig(
                model_dir=arguments.model_dir,
                drafter=drafter,
                dtype=arguments.dtype,
                num_threads=arguments.threads,
                max_seq_len=2048,
                buckets=BucketConfig(max_num_requests=arguments.concurrency),
                cache=CacheConfig(enable_prefix_reuse=False),
                scheduler=SchedulerConfig(policy),
            )
        )
        self.about = {
            "version": metadata.version("trtllm-dspark"),
            "how": f"continuous batching, policy {policy}, drafter {self.system.drafter.name}",
        }

    def answer(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> int:
        """Generate, end tokens ignored."""
        from trtllm_dspark.types import GenerationRequest, SamplingParams

        params = SamplingParams(max_tokens=num_tokens, temperature=0.0)
        for index, prompt in enumerate(prompts):
            tokens = np.asarray(prompt, np.int32)
            self.system.loop.add(GenerationRequest(str(index), tokens, params, time.monotonic()))
        count = 0
        while self.system.loop.has_work:
            count += sum(len(output.new_token_ids) for output in self.system.loop.step())
        return count


def make_runtime(arguments: argparse.Namespace) -> Runtime:
    """The runtime that --runtime names."""
    name = arguments.runtime
    if name.startswith("transformers"):
        return TransformersRuntime(arguments, name.endswith("lookup"))
    if name.startswith("llama.cpp"):
        return LlamaCppRuntime(arguments, name.endswith("lookup"))
    if name == "dspark-plain":
        return DSparkRuntime(arguments, "none", "autoregressive")
    drafter = "ngram" if name == "dspark-ngram" else arguments.drafter
    return DSparkRuntime(arguments, drafter, "adaptive")


def main() -> int:
    """Load, say what was loaded, answer lines until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runtime", required=True)
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--gguf")
    parser.add_argument("--no-repack", action="store_true")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--concurrency", type=int, default=8)
    arguments = parser.parse_args()
    try:
        runtime = make_runtime(arguments)
    except ImportError as error:
        print(json.dumps({"missing": str(error)}), flush=True)
        return 0
    print(json.dumps(runtime.about), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        started = time.perf_counter()
        count = runtime.answer(request["prompts"], request["num_tokens"])
        seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, "num_tokens": count}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
