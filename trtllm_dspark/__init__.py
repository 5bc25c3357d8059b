# SPDX-License-Identifier: Apache-2.0
"""Lossless, load-aware speculative decoding on TensorRT engines behind Triton Inference Server."""

import os

from trtllm_dspark._version import __version__

# torch reads it at its first allocation: large buffers on huge pages (docs/cpu.md).
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

__all__ = ["__version__"]
