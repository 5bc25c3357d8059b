# SPDX-License-Identifier: Apache-2.0
"""Builds an engine directory aside and renames it once: export, engines, configuration, manifest.

The caller brings limits (the ladder is scheduling's business) and has checked them.
"""

from __future__ import annotations

import importlib
import logging
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from trtllm_dspark.checkpoints import convert_from_trtllm
from trtllm_dspark.checkpoints.packaged import DRAFTER_SUBDIR
from trtllm_dspark.checkpoints.staging import refuse_existing, staged_directory, write_json
from trtllm_dspark.checkpoints.trtllm_config import trtllm_config_of
from trtllm_dspark.config import BucketConfig
from trtllm_dspark.engines.build_models import (
    Source,
    load_unpacked_drafter,
    load_unpacked_target,
)
from trtllm_dspark.engines.build_profiles import (
    EngineLimits,
    Profile,
    drafter_profiles,
    target_profiles,
)
from trtllm_dspark.engines.build_tensorrt import (
    BuildOptions,
    Progress,
    build_engine,
    built_for,
    import_backend,
)
from trtllm_dspark.engines.build_timing import TimingCache
from trtllm_dspark.engines.engine_dir import (
    DRAFTER_ENGINE,
    MODEL_DIR,
    EngineFacts,
    write_config,
    write_manifest,
)
from trtllm_dspark.errors import EngineError
from trtllm_dspark.models.target import TargetModel

logger = logging.getLogger(__name__)

GENERATION = "generation_config.json"
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    GENERATION,
)
Report = Callable[[str], None]
"""One line per stage of the build."""


@dataclass(frozen=True)
class BuildJob:
    """One engine directory to make."""

    source: Source
    output_dir: Path
    limits: EngineLimits
    ratios: tuple[float, ...] = BucketConfig.ratios
    dtype: str = "bfloat16"
    options: BuildOptions | None = None
    """None: backend torch, no engines."""
    separate_engines: bool = False
    workers: int = 2
    """Engines built at once where that disturbs nothing: TensorRT times tactics on the GPU, so that
    only TensorRT-RTX builds the drafter beside the target."""
    timing: TimingCache | None = None
    """Full TensorRT only."""
    build_config: dict[str, Any] = field(default_factory=dict)
    """`build_config` of config.json, under trtllm-build's names."""


def build_engine_dir(
    job: BuildJob, *, report: Report = logger.info, progress: Progress | None = None
) -> Path:
    """Build everything and return the directory; an existing one is refused before any work."""
    refuse_existing(job.output_dir)
    facts = job_facts(job)
    with staged_directory(job.output_dir) as staged:
        if job.options is None:
            _copy_model(job, staged)
        else:
            _build_engines(job, facts, staged, report, progress)
        _copy_companions(job.source, staged)
        pretrained = trtllm_config_of(job.source.model, dtype=job.dtype)
        write_config(staged, facts, pretrained, job.build_config)
        write_manifest(staged, facts)
    return job.output_dir


def job_facts(job: BuildJob) -> EngineFacts:
    """What the finished directory will say of itself."""
    source, options = job.source, job.options
    drafter = source.drafter
    target_hash, drafter_hash = source.hashes
    capabilities, gpu_name = ((), "") if options is None else built_for(options)
    return EngineFacts(
        backend="torch" if options is None else options.backend,
        dtype=job.dtype,
        limits=job.limits,
        ratios=job.ratios,
        tap_layers=() if drafter is None else drafter.target_layer_ids,
        tap_width=tap_width(source),
        drafter=drafter,
        compute_capabilities=capabilities,
        backend_version="" if options is None else import_backend(options.backend).__version__,
        gpu_name=gpu_name,
        plugins=options is not None and options.backend == "tensorrt",
        separate_engines=job.separate_engines,
        checkpoint_hash=target_hash,
        drafter_hash=drafter_hash,
    )


def timing_cache_name(options: BuildOptions) -> str:
    """File name of the timing cache that fits this version of TensorRT and this machine's GPU."""
    version = import_backend(options.backend).__version__
    (capability,), gpu_name = built_for(options)
    return f"{version}-sm_{capability.replace('.', '')}-{gpu_name.replace(' ', '_')}.cache"


def tap_width(source: Source) -> int:
    """Columns of the taps, 0 without a drafter."""
    drafter = source.drafter
    return 0 if drafter is None else len(drafter.target_layer_ids) * drafter.target_hidden_size


def _build_engines(
    job: BuildJob, facts: EngineFacts, staged: Path, report: Report, progress: Progress | None
) -> None:
    export = _import_exporter(facts.backend)
    positions = job.limits.max_seq_len + job.limits.block_len + 1
    target = load_unpacked_target(job.source, job.dtype, positions)
    with (
        tempfile.TemporaryDirectory(prefix=".onnx.", dir=staged.parent) as scratch,
        ThreadPoolExecutor(1) as pool,
    ):
        report("exporting the target")
        path = export.export_target(
            target,
            Path(scratch) / "target.onnx",
            facts.tap_layers,
            page_size=job.limits.page_size,
            with_functions=not facts.plugins,
            max_query_len=job.limits.num_drafts + 1,
        )
        path = _prepare_graph(path, facts)
        building = pool.submit(_build_target, job, facts, path, staged, report, progress)
        if not builds_beside(job):
            building.result()
        if job.source.drafter is not None:
            _build_drafter(job, facts, target, staged, Path(scratch), report, progress)
        building.result()


def _prepare_graph(path: Path, facts: EngineFacts) -> Path:
    """What the backend's parser gets: with plugins the nodes must stay whole."""
    if facts.plugins:
        return path
    from trtllm_dspark.engines.onnx_sharing import share_common_nodes

    return share_common_nodes(path, path.with_suffix(".shared.onnx"))


def _import_exporter(backend: str) -> ModuleType:
    """`engines.export`, which needs ONNX: only builds that write a graph import it."""
    try:
        return importlib.import_module("trtllm_dspark.engines.export")
    except ModuleNotFoundError as error:
        raise EngineError(
            f"backend {backend!r} needs the Python module {error.name}, which is not installed: "
            f"install the extra {'rtx' if backend == 'tensorrt_rtx' else 'tensorrt'}"
        ) from error


def builds_beside(job: BuildJob) -> bool:
    """Whether the drafter is exported and built while the target is (builders use one thread)."""
    return job.workers > 1 and job.options is not None and job.options.backend == "tensorrt_rtx"


def _build_target(
    job: BuildJob,
    facts: EngineFacts,
    path: Path,
    staged: Path,
    report: Report,
    progress: Progress | None,
) -> None:
    groups = _groups(facts, target_profiles(job.limits))
    for name, group in zip(facts.target_files(), groups, strict=True):
        report(f"building {name} with {len(group)} profiles")
        _build(job, staged / name, path, group, job.source.model.num_layers, progress)


def _groups(facts: EngineFacts, profiles: list[Profile]) -> list[list[Profile]]:
    return [[p] for p in profiles] if facts.separate_engines else [profiles]


def _build_drafter(
    job: BuildJob,
    facts: EngineFacts,
    target: TargetModel,
    staged: Path,
    scratch: Path,
    report: Report,
    progress: Progress | None,
) -> None:
    report("exporting the drafter")
    model = load_unpacked_drafter(job.source, target, job.limits.max_seq_len)
    path = _import_exporter(facts.backend).export_drafter(
        model,
        scratch / "drafter.onnx",
        page_size=job.limits.page_size,
        with_functions=not facts.plugins,
        max_requests=job.limits.max_num_requests,
    )
    path = _prepare_graph(path, facts)
    profiles = drafter_profiles(job.limits, facts.tap_width)
    report(f"building {DRAFTER_ENGINE} with {len(profiles)} profiles")
    _build(job, staged / DRAFTER_ENGINE, path, profiles, model.config.num_layers, progress)


def _build(
    job: BuildJob,
    output: Path,
    onnx_path: Path,
    profiles: list[Profile],
    num_layers: int,
    progress: Progress | None,
) -> None:
    assert job.options is not None
    counts = (num_layers, job.limits.num_pages)
    named = None if progress is None else _name_phases(progress, output.name)
    plan = build_engine(onnx_path, profiles, counts, job.options, progress=named, timing=job.timing)
    output.write_bytes(plan)


def _name_phases(progress: Progress, name: str) -> Progress:
    """Two builders run at once: their phases are told apart by the file."""
    return lambda phase, done, total: progress(f"{name}: {phase}", done, total)


def _copy_model(job: BuildJob, staged: Path) -> None:
    """Backend torch: the model in the Hugging Face layout, with the drafter that was asked for."""
    source, output = job.source, staged / MODEL_DIR
    if source.is_trtllm:
        convert_from_trtllm(source.path, output)
        shutil.rmtree(output / DRAFTER_SUBDIR, ignore_errors=True)  # its own, not always the asked
    else:
        shutil.copytree(source.path, output, ignore=shutil.ignore_patterns(DRAFTER_SUBDIR))
    if source.drafter_path is not None:
        shutil.copytree(source.drafter_path, output / DRAFTER_SUBDIR)


def _copy_companions(source: Source, staged: Path) -> None:
    """Tokenizer files, and a calibration that lies beside the drafter."""
    paths = [source.path / name for name in COMPANIONS]
    if source.drafter_path is not None:
        paths.append(source.drafter_path / "calibration.json")
    for path in paths:
        if path.is_file():
            shutil.copy2(path, staged / path.name)
    ends, generation = source.model.eos_token_ids, staged / GENERATION
    if ends and not generation.exists():
        # config.json named them, and an engine directory's config.json is another file.
        write_json(generation, {"eos_token_id": list(ends)})
