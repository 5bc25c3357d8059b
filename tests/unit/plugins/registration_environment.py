# SPDX-License-Identifier: Apache-2.0
"""A directory in which `import tensorrt` works without a GPU, to validate plugin registrations.

TensorRT's Python bindings load against the TensorRT-RTX libraries under TensorRT's own library
names. Registration and its validation work there; building or running engines with plugins does
not. For tests only.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

LIBRARIES = {
    "libnvinfer.so.11": "libtensorrt_rtx.so.1",
    "libnvonnxparser.so.11": "libtensorrt_onnxparser_rtx.so.1",
}
EMPTY_PLUGIN_LIBRARY = 'extern "C" bool initLibNvInferPlugins(void*, const char*) { return true; }'
PACKAGE = """
import numpy.typing
import tensorrt_bindings
from tensorrt_bindings import *
from tensorrt_bindings import __version__

__path__ = tensorrt_bindings.__path__
"""


def missing_parts() -> list[str]:
    """What this machine lacks for the environment; empty when it can be laid out."""
    missing = [
        f"{distribution} (module {module})"
        for module, distribution in (
            ("tensorrt_rtx_libs", "tensorrt-rtx-cu13-libs"),
            ("tensorrt_bindings", "tensorrt-cu13-bindings"),
        )
        if importlib.util.find_spec(module) is None
    ]
    return missing + ["g++"] * (shutil.which("g++") is None)


def lay_out_environment(folder: Path) -> dict[str, str]:
    """Fill the folder; returns the environment variables that a child Python needs."""
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("tensorrt_rtx_libs has no location: is tensorrt-rtx-cu13-libs whole?")
    libraries = Path(next(iter(spec.submodule_search_locations)))
    for name, source in LIBRARIES.items():
        (folder / name).symlink_to(libraries / source)
    target = folder / "libnvinfer_plugin.so.11"
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(target)],
        input=EMPTY_PLUGIN_LIBRARY,
        text=True,
        check=True,
    )
    package = folder / "py" / "tensorrt"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PACKAGE)
    return {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(folder / "py")}
