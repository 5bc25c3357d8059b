# SPDX-License-Identifier: Apache-2.0
"""Lossless, load-aware speculative decoding on TensorRT engines behind Triton Inference Server."""

from trtllm_dspark._version import __version__

__all__ = ["__version__"]
