# SPDX-License-Identifier: Apache-2.0
"""`dspark generate`: one prompt through the decoding loop, streamed to the terminal, no server."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

from trtllm_dspark.options import add_system_options, configure_logging, system_config
from trtllm_dspark.runtime import System, build_system
from trtllm_dspark.serving.text import TextStream
from trtllm_dspark.types import GenerationRequest, RequestOutput, SamplingParams


def build_parser() -> argparse.ArgumentParser:
    """Arguments of `dspark generate`."""
    parser = argparse.ArgumentParser(
        prog="dspark generate",
        description="Answer one prompt on this machine, without a server.",
        epilog='example: dspark generate --model-dir models/smollm2 "Why is the sky blue?"',
    )
    parser.add_argument("prompt")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--seed", type=int, help="reproducible sampling")
    parser.add_argument("--stop", action="append", default=[], help="stop string (repeatable)")
    parser.add_argument("--raw", action="store_true", help="do not apply the chat template")
    parser.add_argument("--stats", action="store_true", help="tokens/s and acceptance on stderr")
    parser.add_argument("--verbose", action="store_true")
    add_system_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Stream one answer."""
    arguments = build_parser().parse_args(argv)
    configure_logging(arguments.verbose)
    system = build_system(system_config(arguments))
    params = SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        seed=arguments.seed,
        end_ids=system.tokenizer.eos_ids,
    )

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    started = time.monotonic()
    final = stream_answer(
        system,
        encode_prompt(system, arguments.prompt, arguments.raw),
        params,
        arguments.stop,
        write,
    )
    write("\n")
    if arguments.stats:
        seconds = time.monotonic() - started
        stats = final.stats
        print(
            f"{stats.num_output_tokens} tokens in {seconds:.2f} s "
            f"({stats.num_output_tokens / seconds:.1f} tokens/s), acceptance length "
            f"{stats.acceptance_length:.2f}, finished by {final.finish_reason.value}",  # type: ignore[union-attr]
            file=sys.stderr,
        )
    return 0


def encode_prompt(system: System, text: str, raw: bool) -> list[int]:
    """Token ids of a prompt, in the model's chat template unless it has none or `raw` is set."""
    tokenizer = system.tokenizer
    if raw or tokenizer.chat_template is None:
        return tokenizer.encode(text)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": text}])
    return tokenizer.encode(rendered, add_special=False)


def stream_answer(
    system: System,
    prompt: Sequence[int],
    params: SamplingParams,
    stop_strings: Sequence[str],
    write: Callable[[str], None],
) -> RequestOutput:
    """Run one request to its end, writing stable text as it comes; returns its last output."""
    loop = system.loop
    stream = TextStream(system.tokenizer, stop_strings)
    loop.add(GenerationRequest("generate", np.asarray(prompt, np.int32), params, time.monotonic()))
    while True:
        for output in loop.step():
            group = stream.push(output.new_token_ids, output.log_probs)
            write(group.text)
            if output.finish_reason is not None:
                write(stream.finish().text)
                return output
            if stream.is_stopped:
                loop.cancel("generate")
