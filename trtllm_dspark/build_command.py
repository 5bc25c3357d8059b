# SPDX-License-Identifier: Apache-2.0
"""`dspark build` and `build_scripts/build_engines.py`: one engine directory from a model.

Takes `trtllm-build`'s flag names (underscores or dashes) and this project's own. Puts ladder
(scheduling) and build (engines) together; knows no builder.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trtllm_dspark.checkpoints import prepared_model
from trtllm_dspark.config import BucketConfig, require
from trtllm_dspark.engines.build import BuildJob, build_engine_dir, timing_cache_name
from trtllm_dspark.engines.build_models import Source, open_source
from trtllm_dspark.engines.build_plan import (
    BuildShape,
    bucket_rows,
    check_memory,
    estimate_sizes,
    format_plan,
    plan_limits,
)
from trtllm_dspark.engines.build_profiles import EngineLimits
from trtllm_dspark.engines.build_tensorrt import BuildOptions, Progress
from trtllm_dspark.engines.build_timing import TimingCache
from trtllm_dspark.environment import cache_dir
from trtllm_dspark.options import add_flag as _add
from trtllm_dspark.options import configure_logging
from trtllm_dspark.scheduling.buckets import build_ladder, grid_total, request_buckets

DEFAULT_CAPABILITY = "8.9"
FIXED = {
    "kv_cache_type": ("paged", "this project's K/V cache is paged"),
    "logits_dtype": ("float32", "acceptance needs float32 logits"),
    "speculative_decoding_mode": ("draft_tokens_external", "drafts are verified by the target"),
}
"""trtllm-build flags with one possible value."""
UNUSED = {
    "model_config": "the configuration is read from the model or checkpoint directory",
    "model_cls_file": "the architectures are this project's own",
    "model_cls_name": "the architecture is read from the model's configuration",
}
"""trtllm-build flags that mean nothing here."""
UNSUPPORTED = {
    "strip_plan": "engines are run with the weights they hold; nothing puts them back (refit)",
    "weight_streaming": "engines are run with all weights on the GPU",
}
"""trtllm-build switches that the run time has no counterpart for."""
TIMING = ("input_timing_cache", "output_timing_cache")
NO_TIMING = {
    "torch": "there is no builder",
    "tensorrt_rtx": "its builder times no tactics (there the cache is a no-op)",
}
"""Backends without a timing cache, and why."""
LOG_LEVELS = ("internal_error", "error", "warning", "info", "verbose", "debug", "trace")


def build_parser(prog: str = "dspark build") -> argparse.ArgumentParser:
    """Arguments, with dashes or underscores."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Build an engine directory: one target engine with a profile per rung, and the "
        "drafter's.",
        epilog="example: dspark build --model-dir models/smollm2 --output-dir engines/smollm2 "
        "--backend tensorrt_rtx --compute-capability 8.9",
    )
    source = parser.add_argument_group("source and result")
    _add(source, "model_dir", help="Hugging Face directory, .gguf file or smollm2")
    _add(source, "checkpoint_dir", help="TensorRT-LLM checkpoint, instead of --model-dir")
    _add(source, "drafter_dir", default="auto", help="auto (the model's own), none, or a directory")
    _add(source, "output_dir", help="directory to create")
    _add(source, "dry_run", action="store_true", help="print the bucket table, build nothing")
    _add_limits(parser.add_argument_group("limits"))
    _add_builder(parser.add_argument_group("builder"))
    unused = parser.add_argument_group("flags of trtllm-build that are refused with the reason")
    for name, reason in UNUSED.items():
        _add(unused, name, help=f"left out: {reason}")
    for name, reason in UNSUPPORTED.items():
        _add(unused, name, action="store_const", const=True, help=f"left out: {reason}")
    return parser


def _add_limits(group: argparse._ArgumentGroup) -> None:
    defaults = BucketConfig()
    _add(group, "max_batch_size", type=int, default=defaults.max_num_requests)
    _add(group, "max_num_tokens", type=int, default=defaults.max_num_tokens)
    _add(group, "max_seq_len", type=int, default=2048)
    _add(group, "max_input_len", type=int, default=0, help="checked against max_seq_len")
    _add(group, "max_draft_len", type=int, default=0, help="must be the drafter's γ")
    _add(group, "opt_num_tokens", type=int, default=0, help="ignored: every rung is an optimum")
    _add(group, "tokens_per_block", type=int, default=32, help="tokens per K/V page")
    _add(group, "num_pages", type=int, default=0, help="K/V pages; 0 = enough for all")
    _add(group, "ratios", type=_floats, default=defaults.ratios, help="0.25,0.5,0.75,1.0")
    _add(group, "request_buckets", type=_ints, default=defaults.request_buckets)
    _add(group, "gpu_memory_gb", type=float, default=0.0, help="refuse what does not fit")
    for name, (value, reason) in FIXED.items():
        _add(group, name, default=value, help=f"{value} only: {reason}")


def _add_builder(group: argparse._ArgumentGroup) -> None:
    _add(group, "backend", default="tensorrt_rtx", choices=("tensorrt", "tensorrt_rtx", "torch"))
    _add(
        group,
        "compute_capability",
        type=_strings,
        default=None,
        help=f"TensorRT-RTX: one or more of 7.5, 8.0, 8.6, 8.9, 12.0, 12.1 ({DEFAULT_CAPABILITY})",
    )
    _add(group, "dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    _add(group, "separate_engines", action="store_true", help="one target file per rung")
    _add(
        group,
        "profiling_verbosity",
        default="layer_names_only",
        choices=("layer_names_only", "detailed", "none"),
    )
    _add(group, TIMING[0], help="backend tensorrt: file to read, if it exists")
    _add(
        group,
        TIMING[1],
        help="backend tensorrt: file to write; with neither of the two named, one per GPU and "
        "version of TensorRT is kept in DSPARK_CACHE_DIR and read again. tensorrt_rtx times "
        "nothing while it builds: none is read or written",
    )
    _add(group, "workers", type=int, default=2, help="engines built at once (TensorRT-RTX)")
    _add(group, "log_level", default="warning", choices=LOG_LEVELS)


def _strings(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _floats(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in _strings(text))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in _strings(text))


def main(argv: Sequence[str] | None = None, prog: str = "dspark build") -> int:
    """Check, then print the plan (`--dry-run`) or build."""
    arguments = build_parser(prog).parse_args(argv)
    configure_logging(LOG_LEVELS.index(arguments.log_level) > LOG_LEVELS.index("warning"))
    check_flags(arguments)
    for note in timing_notes(arguments):
        print(note, file=sys.stderr)
    with opened_source(arguments) as source:
        job, text = plan_job(arguments, source)
        print(text, flush=True)
        if arguments.dry_run:
            return 0
        job = dataclasses.replace(job, timing=timing_cache(arguments, job.options))
        with progress_display() as progress:
            build_engine_dir(job, report=lambda line: print(line, flush=True), progress=progress)
    print(job.output_dir)
    return 0


def check_flags(arguments: argparse.Namespace) -> None:
    """Refuse values of trtllm-build's flags that this project cannot honour."""
    for name, (value, reason) in FIXED.items():
        found = getattr(arguments, name)
        require(found == value, name, found, f"{value} ({reason})")
    for name, reason in {**UNUSED, **UNSUPPORTED}.items():
        found = getattr(arguments, name)
        require(found is None, name, found, f"left out: {reason}")
    require(arguments.workers >= 1, "workers", arguments.workers, "≥ 1")
    separate, backend = arguments.separate_engines, arguments.backend
    require(
        not separate or backend != "torch", "separate_engines", separate, "left out: backend torch"
    )


def timing_notes(arguments: argparse.Namespace) -> list[str]:
    """What is said where a timing cache was named and the backend has none."""
    reason = NO_TIMING.get(arguments.backend)
    return [
        f"note: {name} = {getattr(arguments, name)!r} is neither read nor written with backend "
        f"{arguments.backend}: {reason}"
        for name in TIMING
        if reason and getattr(arguments, name)
    ]


def timing_cache(arguments: argparse.Namespace, options: BuildOptions | None) -> TimingCache | None:
    """Full TensorRT: the caches that were named, else this machine's own."""
    if options is None or options.backend in NO_TIMING:
        return None
    source, output = (Path(path) if path else None for path in map(vars(arguments).get, TIMING))
    if source is None and output is None:
        source = output = cache_dir() / "timing" / timing_cache_name(options)
    return TimingCache(source, output)


def plan_job(arguments: argparse.Namespace, source: Source) -> tuple[BuildJob, str]:
    """The job that the arguments describe, checked, and the text of its bucket table."""
    buckets = BucketConfig(
        max_num_requests=arguments.max_batch_size,
        max_num_tokens=arguments.max_num_tokens,
        request_buckets=arguments.request_buckets,
        ratios=arguments.ratios,
    )
    shape = BuildShape(
        buckets=buckets,
        max_seq_len=arguments.max_seq_len,
        max_input_len=arguments.max_input_len,
        page_size=arguments.tokens_per_block,
        num_pages=arguments.num_pages,
        max_draft_len=arguments.max_draft_len,
        gpu_memory_gb=arguments.gpu_memory_gb,
    )
    gamma = 0 if source.drafter is None else source.drafter.num_drafts
    limits = plan_limits(
        shape, source.model, source.drafter, build_ladder(buckets, gamma), request_buckets(buckets)
    )
    sizes = estimate_sizes(
        source.model,
        source.drafter,
        limits,
        arguments.dtype,
        in_place=arguments.backend != "tensorrt_rtx",
        separate=arguments.separate_engines,
    )
    check_memory(shape, sizes)
    totals = {
        (requests, ratio): grid_total(requests, ratio, gamma)
        for requests in limits.request_buckets
        for ratio in buckets.ratios
    }
    job = BuildJob(
        source,
        Path(arguments.output_dir or ""),
        limits,
        ratios=buckets.ratios,
        dtype=arguments.dtype,
        options=_builder_options(arguments),
        separate_engines=arguments.separate_engines,
        workers=arguments.workers,
        build_config=build_config_of(arguments, limits),
    )
    require(
        arguments.dry_run or bool(arguments.output_dir), "output_dir", arguments.output_dir, "named"
    )
    return job, format_plan(limits, bucket_rows(limits, buckets.ratios, totals), sizes)


@contextmanager
def opened_source(arguments: argparse.Namespace) -> Iterator[Source]:
    """The models to build from; what is no directory is prepared for the time of the build."""
    given = [arguments.model_dir, arguments.checkpoint_dir]
    require(
        sum(path is not None for path in given) == 1,
        "model_dir/checkpoint_dir",
        tuple(given),
        "exactly one of the two",
    )
    if arguments.checkpoint_dir:
        yield open_source(arguments.checkpoint_dir, arguments.drafter_dir)
        return
    with prepared_model(arguments.model_dir, dtype=arguments.dtype) as directory:
        yield open_source(directory, arguments.drafter_dir)


def _builder_options(arguments: argparse.Namespace) -> BuildOptions | None:
    named = arguments.compute_capability
    if arguments.backend == "torch":
        require(named is None, "compute_capability", named, "left out with backend torch")
        return None
    default = (DEFAULT_CAPABILITY,) if arguments.backend == "tensorrt_rtx" else ()
    return BuildOptions(
        backend=arguments.backend,
        compute_capabilities=default if named is None else named,
        profiling_verbosity=arguments.profiling_verbosity,
    )


def build_config_of(arguments: argparse.Namespace, limits: EngineLimits) -> dict[str, Any]:
    """`build_config` of config.json, in trtllm-build's names."""
    return {
        "max_batch_size": limits.max_num_requests,
        "max_input_len": arguments.max_input_len or limits.max_seq_len - 1,
        "max_seq_len": limits.max_seq_len,
        "max_num_tokens": limits.max_num_tokens,
        "opt_num_tokens": limits.max_num_tokens,
        "max_draft_len": limits.num_drafts,
        "max_beam_width": 1,
        "kv_cache_type": "PAGED",
        "speculative_decoding_mode": "DRAFT_TOKENS_EXTERNAL" if limits.num_drafts else "NONE",
        "strongly_typed": True,
        "plugin_config": {"tokens_per_block": limits.page_size, "paged_kv_cache": True},
    }


@contextmanager
def progress_display() -> Iterator[Progress | None]:
    """A bar for the builder's outer phases on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        yield _bar_updates(bar)


def _bar_updates(bar: Any) -> Callable[[str, int, int], None]:
    tasks: dict[str, Any] = {}

    def update(phase: str, done: int, total: int) -> None:
        if phase not in tasks:
            tasks[phase] = bar.add_task(phase, total=total)
        bar.update(tasks[phase], completed=done, total=total)
        if total and done >= total:
            bar.remove_task(tasks.pop(phase))

    return update
