# SPDX-License-Identifier: Apache-2.0
"""Registers every op of the `dspark` domain as a TensorRT plugin that carries its kernel's PTX.

Importing this file imports tensorrt and registers nothing; `register_plugins` does, once per
process. TensorRT validates signatures and annotations of live functions: they are made from the
table in `tensorrt_ops`. No engine with plugins has been built or run yet.
"""

import inspect
from typing import Any

import numpy.typing  # noqa: F401  (tensorrt.plugin expects it to be loaded)
import tensorrt as trt
import tensorrt.plugin as trtp
from dspark_plugins.compile import compile_variant
from dspark_plugins.kernel_variant import KernelVariant
from dspark_plugins.ptx import strip_hidden_parameters
from dspark_plugins.tensorrt_ops import OPS, Launch, OpSpec, Shapes

NAMESPACE = "dspark"

ELEMENT_TYPES = {
    trt.DataType.FLOAT: "fp32",
    trt.DataType.HALF: "fp16",
    trt.DataType.BF16: "bf16",
    trt.DataType.INT32: "i32",
    trt.DataType.INT64: "i64",
    trt.DataType.BOOL: "i8",
    trt.DataType.FP8: "u8",
}
"""Triton-language element type of TensorRT's types; fp8 is decoded from bytes."""

DATA_TYPES = {name: kind for kind, name in ELEMENT_TYPES.items()}

AotResult = tuple[str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymIntExprs]


def register_plugins(capability: int, ops: tuple[OpSpec, ...] = OPS) -> tuple[str, ...]:
    """Register the ops for sm_<capability>; returns their plugin ids.

    Raises ValueError when one of them is registered already: a process builds for one target.
    """
    ids = []
    for spec in ops:
        plugin_id = f"{NAMESPACE}::{spec.name}"
        trtp.register(plugin_id)(make_describe(spec))
        trtp.autotune(plugin_id)(make_autotune(spec))
        trtp.aot_impl(plugin_id)(make_aot_impl(spec, capability))
        ids.append(plugin_id)
    return tuple(ids)


def make_describe(spec: OpSpec) -> Any:
    """The function of @register: input descriptors and attributes → output descriptors."""
    signature = _signature(spec, (), _descriptors(spec))

    def describe(*args: Any, **kwargs: Any) -> Any:
        tensors, attributes = _split(spec, signature, args, kwargs)
        outputs = spec.outputs(_shapes(tensors, 0), attributes)
        return tuple(
            tensors[output.aliased_to].aliased()
            if output.aliased_to is not None
            else trtp.from_shape_expr(tuple(output.dims), DATA_TYPES[output.element_type])
            for output in outputs
        )

    return _with_signature(describe, spec.name, signature)


def make_autotune(spec: OpSpec) -> Any:
    """The function of @autotune: linear layouts, the op's type combinations and tactics."""
    signature = _signature(spec, ("outputs",), list[trtp.AutoTuneCombination])

    def autotune(*args: Any, **kwargs: Any) -> Any:
        return [trtp.AutoTuneCombination(spec.io_types, "LINEAR", list(spec.tactics) or None)]

    return _with_signature(autotune, spec.name, signature)


def make_aot_impl(spec: OpSpec, capability: int) -> Any:
    """The function of @aot_impl: kernel name, PTX, launch shape and integer arguments."""
    signature = _signature(spec, ("outputs", "tactic"), AotResult)

    def aot_impl(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        outputs, tactic = bound.pop("outputs"), bound.pop("tactic")
        tensors, attributes = _split(spec, signature, (), bound)
        launch = spec.launch(_shapes(tensors, capability, int(tactic or 0)), attributes)
        types = [ELEMENT_TYPES[desc.dtype] for desc in tensors.values()]
        entry, ptx, num_threads, shared = compile_plugin(
            spec, launch, types, [ELEMENT_TYPES[desc.dtype] for desc in outputs], capability
        )
        return entry, ptx, _launch_params(launch, num_threads, shared), _integers(launch)

    return _with_signature(aot_impl, spec.name, signature)


def compile_plugin(
    spec: OpSpec, launch: Launch, inputs: list[str], outputs: list[str], capability: int
) -> tuple[str, str, int, int]:
    """(kernel name, PTX without hidden parameters, threads per block, shared bytes)."""
    kinds = [*(f"*{x}" for x in inputs), *("i32" for _ in launch.integers)]
    kinds += [f"*{x}" for x in outputs]
    names = launch.kernel.arg_names[: len(kinds)]
    variant = KernelVariant(
        spec.name,
        "plugin",
        launch.kernel,
        dict(zip(names, kinds, strict=True)),
        launch.constants,
        launch.num_warps,
        launch.num_stages,
    )
    built = compile_variant(variant, capability)
    ptx = strip_hidden_parameters(built.ptx, built.entry, len(kinds))
    return built.entry, ptx, 32 * built.num_warps, built.shared_bytes


def _launch_params(launch: Launch, num_threads: int, shared: int) -> Any:
    params = trtp.KernelLaunchParams()
    for name, size in zip(("grid_x", "grid_y", "grid_z"), launch.grid, strict=False):
        setattr(params, name, size)
    params.block_x = num_threads
    params.shared_mem = shared
    return params


def _integers(launch: Launch) -> Any:
    found = trtp.SymIntExprs(len(launch.integers))
    for index, value in enumerate(launch.integers):
        found[index] = trtp.SymInt32(value)
    return found


def _shapes(tensors: dict[str, Any], capability: int, tactic: int = 0) -> Shapes:
    return Shapes(
        {name: tuple(desc.shape_expr) for name, desc in tensors.items()},
        {name: ELEMENT_TYPES[desc.dtype] for name, desc in tensors.items()},
        capability,
        tactic,
    )


def _descriptors(spec: OpSpec) -> Any:
    """The annotation tuple[TensorDesc, …] of the op's outputs."""
    num_outputs = spec.io_types.count(",") + 1 - len(spec.inputs)
    return tuple.__class_getitem__((trtp.TensorDesc,) * num_outputs)


def _signature(spec: OpSpec, extra: tuple[str, ...], returns: Any) -> inspect.Signature:
    """Tensors, attributes, then what autotune and aot_impl take besides."""
    kinds: dict[str, Any] = {name: trtp.TensorDesc for name in spec.inputs}
    kinds.update(spec.attributes)
    described = {
        "outputs": _descriptors(spec),
        "tactic": int,
    }
    kinds.update({name: described[name] for name in extra})
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, annotation=a) for name, a in kinds.items()]
    return inspect.Signature(parameters, return_annotation=returns)


def _split(
    spec: OpSpec, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tensors by name, attributes by name) of a call."""
    bound = signature.bind_partial(*args, **kwargs).arguments
    tensors = {name: bound[name] for name in spec.inputs}
    return tensors, {name: bound[name] for name in spec.attributes}


def _with_signature(function: Any, name: str, signature: inspect.Signature) -> Any:
    function.__signature__ = signature
    function.__name__ = name
    return function
