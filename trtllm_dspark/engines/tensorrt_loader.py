# SPDX-License-Identifier: Apache-2.0
"""Puts a `TensorRTEngine` together from an engine directory, after checking version and GPU."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_dspark.engines.build_profiles import Profile, drafter_profiles, target_profiles
from trtllm_dspark.engines.build_tensorrt import import_backend
from trtllm_dspark.engines.engine_dir import EngineDirectory, EngineFacts
from trtllm_dspark.engines.fingerprint import fingerprint
from trtllm_dspark.engines.tensorrt_engine import TensorRTEngine
from trtllm_dspark.engines.tensorrt_engine_calls import EngineCalls
from trtllm_dspark.engines.tensorrt_engine_device import Device, open_device
from trtllm_dspark.engines.tensorrt_engine_exchange import Exchange, make_exchange
from trtllm_dspark.engines.tensorrt_engine_memory import DeviceArray
from trtllm_dspark.engines.tensorrt_engine_session import EngineSession
from trtllm_dspark.engines.tensorrt_gpu import Gpu, describe_gpu, import_cuda, register_plugins
from trtllm_dspark.errors import EngineError
from trtllm_dspark.types import EngineInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Machine:
    """What this machine has to run an engine with."""

    backend_version: str
    gpu: Gpu


def check_machine(facts: EngineFacts, machine: Machine) -> None:
    """Refuse engines of another backend version or another GPU, before they are read."""
    if facts.backend_version != machine.backend_version:
        raise EngineError(
            f"the engines were built with {facts.backend} {facts.backend_version}, this machine "
            f"has {machine.backend_version}: engines are locked to the version; install that one "
            "or build again"
        )
    built_for = facts.compute_capabilities
    gpu = machine.gpu
    if gpu.compute_capability not in built_for:
        raise EngineError(
            f"the engines were built for compute capability {', '.join(built_for)}, this GPU "
            f"({gpu.name}) has {gpu.compute_capability}: build again with "
            f"--compute-capability {gpu.compute_capability}"
        )
    if facts.gpu_name and facts.gpu_name != gpu.name:
        raise EngineError(
            f"the engines were built on {facts.gpu_name!r} and this GPU is {gpu.name!r}: "
            "TensorRT engines are locked to the GPU model; build again here"
        )


def load_tensorrt_engine(
    directory: EngineDirectory,
    *,
    device_name: str = "cuda",
    use_drafter: bool = True,
    num_drafts: int | None = None,
) -> TensorRTEngine:
    """Deserialise the directory's engines and allocate their memory; fails in one sentence.

    `num_drafts`: γ of whatever drafts, by default the built-in drafter's.
    """
    facts = directory.facts
    device = open_device(device_name)
    trt = import_backend(facts.backend)
    machine = Machine(str(trt.__version__), describe_gpu(import_cuda(), device.index))
    check_machine(facts, machine)
    if facts.plugins:  # their creators live in the process-wide registry from now on
        register_plugins()
    exchange = make_exchange(device)
    logger.info("loading %s on %s (results: %s)", directory.path, device.name, exchange.name)
    return assemble_engine(
        directory,
        trt,
        device,
        exchange,
        machine,
        use_drafter=use_drafter,
        num_drafts=num_drafts,
    )


def assemble_engine(
    directory: EngineDirectory,
    trt: Any,
    device: Device,
    exchange: Exchange,
    machine: Machine,
    *,
    use_drafter: bool = True,
    num_drafts: int | None = None,
) -> TensorRTEngine:
    """The engine on an opened device; the machine has been checked."""
    facts, limits = directory.facts, directory.facts.limits
    target = _open_calls(
        trt, device, directory.path, facts.target_files(), target_profiles(limits), facts
    )
    drafter = None
    if use_drafter and facts.drafter is not None:
        profiles = drafter_profiles(limits, facts.tap_width)
        files = facts.drafter_files()
        drafter = _open_calls(trt, device, directory.path, files, profiles, facts)
    gamma = limits.num_drafts if num_drafts is None else num_drafts
    info = engine_info(directory, target, device.name, gamma, machine, exchange.name)
    return TensorRTEngine(info, limits, device, exchange, target, drafter)


def engine_info(
    directory: EngineDirectory,
    target: EngineCalls,
    device_name: str,
    num_drafts: int,
    machine: Machine,
    results: str,
) -> EngineInfo:
    """What the loop must know; the fingerprint is of this directory on this machine.

    `results`: the exchange's name.
    """
    facts, limits = directory.facts, directory.facts.limits
    parts = {"engine": facts.fingerprint, "num_drafts": num_drafts, "results": results}
    return EngineInfo(
        vocab_size=int(target.spec("logits").shape[1]),
        max_num_requests=limits.max_num_requests,
        max_seq_len=limits.max_seq_len,
        page_size=limits.page_size,
        num_pages=limits.num_pages,
        rungs=limits.rungs,
        num_drafts=num_drafts,
        fingerprint=fingerprint(parts, device_name, description=str(machine.gpu)),
        device=device_name,
        extra={
            "dtype": facts.dtype,
            "machine": str(machine.gpu),
            "backend": facts.backend,
            "results": results,
        },
    )


def _open_calls(
    trt: Any,
    device: Device,
    path: Path,
    files: Sequence[str],
    profiles: Sequence[Profile],
    facts: EngineFacts,
) -> EngineCalls:
    scratch: list[DeviceArray] = []

    def allocate(num_bytes: int) -> int:
        scratch.append(device.zeros((num_bytes,), "UINT8"))
        return scratch[-1].address

    sessions = [EngineSession(trt, path / name, device.stream, allocate) for name in files]
    calls = EngineCalls(sessions, device, profiles, facts.limits.num_pages, scratch)
    if calls.in_place != facts.plugins:
        raise EngineError(
            f"{path}: config.json says plugins = {facts.plugins}, but the engine "
            f"{'updates' if calls.in_place else 'does not update'} pages in place: build again"
        )
    return calls
