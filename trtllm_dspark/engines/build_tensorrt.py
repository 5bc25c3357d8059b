# SPDX-License-Identifier: Apache-2.0
"""Builds one serialized engine from an exported graph with TensorRT or TensorRT-RTX.

Knows builders, profiles and compute capabilities; not models or directories. The builder of
TensorRT-RTX needs neither a GPU nor a driver; TensorRT's needs both.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_dspark.config import require
from trtllm_dspark.engines.build_profiles import Profile
from trtllm_dspark.engines.build_timing import TimingCache
from trtllm_dspark.engines.graph_names import pages_in
from trtllm_dspark.engines.tensorrt_gpu import built_on, register_plugins
from trtllm_dspark.errors import EngineError

logger = logging.getLogger(__name__)

CAPABILITIES = {
    "tensorrt_rtx": ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1"),
    "tensorrt": (),
}
"""Targets that can be named; full TensorRT builds for the GPU it finds."""
_MODULES = {
    "tensorrt": ("tensorrt",),
    "tensorrt_rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings"),
}
_EXTRAS = {"tensorrt": "the tensorrt wheels of your CUDA version", "tensorrt_rtx": "the extra rtx"}

Progress = Callable[[str, int, int], None]
"""(phase, steps done, steps in all), for a progress bar."""


@dataclass(frozen=True)
class BuildOptions:
    """How one engine is built."""

    backend: str = "tensorrt_rtx"
    compute_capabilities: tuple[str, ...] = ("8.9",)
    profiling_verbosity: str = "layer_names_only"

    def __post_init__(self) -> None:
        require(
            self.backend in CAPABILITIES, "backend", self.backend, f"one of {sorted(CAPABILITIES)}"
        )
        allowed = CAPABILITIES[self.backend]
        for value in self.compute_capabilities:
            require(
                value in allowed,
                "compute_capability",
                value,
                f"one of {', '.join(allowed)}"
                if allowed
                else "left out: TensorRT builds for the GPU it finds",
            )
        require(
            self.backend == "tensorrt" or bool(self.compute_capabilities),
            "compute_capability",
            self.compute_capabilities,
            "named for TensorRT-RTX",
        )
        require(
            self.profiling_verbosity in ("layer_names_only", "detailed", "none"),
            "profiling_verbosity",
            self.profiling_verbosity,
            "layer_names_only, detailed or none",
        )


def import_backend(backend: str) -> Any:
    """The Python module of a backend; EngineError with what to install where it is missing."""
    for name in _MODULES[backend]:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise EngineError(f"{name} is installed but cannot be imported: {error}") from error
        except (ImportError, OSError) as error:
            raise EngineError(f"{name} is installed but cannot be imported: {error}") from error
    raise EngineError(
        f"backend {backend!r} needs the Python module {_MODULES[backend][0]}, which is not "
        f"installed: install {_EXTRAS[backend]}"
    )


def built_for(options: BuildOptions) -> tuple[tuple[str, ...], str]:
    """(compute capabilities, name of the GPU that the engines are locked to or '')."""
    if options.backend != "tensorrt":
        return options.compute_capabilities, ""
    capability, name = built_on()
    return (capability,), name


def build_engine(
    onnx_path: Path,
    profiles: Sequence[Profile],
    page_counts: tuple[int, int],
    options: BuildOptions,
    *,
    progress: Progress | None = None,
    timing: TimingCache | None = None,
) -> bytes:
    """Parse `onnx_path` and build it with one optimization profile per entry of `profiles`.

    page_counts (number of layers, number of pages): every kv_pages_i gets exactly that pool.
    `timing` is read and grows; TensorRT-RTX has no use for one.
    EngineError names the node or layer that failed.
    """
    trt = import_backend(options.backend)
    if options.backend == "tensorrt":
        register_plugins()
    messages = BuildLog(trt)
    builder = trt.Builder(messages.logger)
    # 10.x and 11.x name the flag; networks are strongly typed: no silent precision changes.
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    _parse(trt, network, messages, onnx_path)
    config = builder.create_builder_config()
    _configure(trt, config, options)
    pages = _page_shapes(network, page_counts)
    names = {network.get_input(i).name for i in range(network.num_inputs)}
    for profile in profiles:
        _add_profile(builder, config, profile, pages, names)
    if progress is not None:
        config.progress_monitor = make_progress_monitor(trt, progress)
    if timing is not None:
        timing.attach(config)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise EngineError(f"building {onnx_path.name} failed: {messages.summary()}")
    if timing is not None:
        timing.keep()
    return bytes(plan)


class BuildLog:
    """Collects the backend's errors, so that a failure can name layers and ops."""

    def __init__(self, trt: Any) -> None:
        self.errors: list[str] = []
        self.logger = self._make_logger(trt)

    def _make_logger(self, trt: Any) -> Any:
        severities, errors = trt.ILogger.Severity, self.errors

        class Collector(trt.ILogger):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, severity: Any, message: str) -> None:
                if severity in (severities.ERROR, severities.INTERNAL_ERROR):
                    errors.append(message)
                elif severity == severities.WARNING:
                    logger.debug("%s", message)

        return Collector()

    def summary(self) -> str:
        """The collected errors, the first ones, in one line."""
        return "; ".join(e.strip() for e in self.errors[:4]) or "the builder gave no reason"


def _parse(trt: Any, network: Any, messages: BuildLog, path: Path) -> None:
    if not path.is_file():
        raise EngineError(f"{path} does not exist: export the model first")
    parser = trt.OnnxParser(network, messages.logger)
    if parser.parse_from_file(str(path)):
        return
    found = []
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        found.append(f"node {error.node_name()!r} ({error.node_operator()}): {error.desc()}")
    detail = "; ".join(found[:4]) or messages.summary()
    raise EngineError(f"{path.name} cannot be read by the backend's ONNX parser: {detail}")


def _configure(trt: Any, config: Any, options: BuildOptions) -> None:
    verbosity = getattr(trt.ProfilingVerbosity, options.profiling_verbosity.upper())
    config.profiling_verbosity = verbosity
    if not options.compute_capabilities:
        return
    config.num_compute_capabilities = len(options.compute_capabilities)
    for index, value in enumerate(options.compute_capabilities):
        capability = getattr(trt.ComputeCapability, "SM" + value.replace(".", ""))
        if not config.set_compute_capability(capability, index):
            raise EngineError(
                f"the backend refused compute capability {value}; it knows "
                f"{sorted(trt.ComputeCapability.__members__)}"
            )


def _page_shapes(network: Any, page_counts: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    num_layers, num_pages = page_counts
    shapes = {}
    names = {pages_in(layer) for layer in range(num_layers)}
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        if tensor.name in names:
            shapes[tensor.name] = (num_pages, *tuple(tensor.shape)[1:])
    if set(shapes) != names:
        raise EngineError(
            f"the exported graph lacks the page inputs {sorted(names - set(shapes))}: export it "
            "again with this version"
        )
    return shapes


def _add_profile(
    builder: Any,
    config: Any,
    profile: Profile,
    pages: dict[str, tuple[int, ...]],
    names: set[str],
) -> None:
    """Set the shapes of the inputs this graph has (with plugins there is no query_offsets)."""
    made = builder.create_optimization_profile()
    for name, allowed in profile.inputs.items():
        if name in names:
            made.set_shape(name, allowed.min, allowed.opt, allowed.max)
    for name, shape in pages.items():
        made.set_shape(name, shape, shape, shape)
    if config.add_optimization_profile(made) < 0:
        raise EngineError(f"the backend refused the optimization profile {profile.name!r}")


def make_progress_monitor(trt: Any, progress: Progress) -> Any:
    """TensorRT's progress monitor as calls of `progress`."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.steps[phase_name] = num_steps
            _guarded(progress, phase_name, 0, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            _guarded(progress, phase_name, step + 1, self.steps.get(phase_name, 0))
            return True

        def phase_finish(self, phase_name: str) -> None:
            total = self.steps.pop(phase_name, 0)
            _guarded(progress, phase_name, total, total)

    return Monitor()


def _guarded(progress: Progress, phase: str, done: int, total: int) -> None:
    """An exception must not travel through the builder's native frames."""
    try:
        progress(phase, done, total)
    except Exception as error:
        print(f"progress display failed: {error}", file=sys.stderr)
