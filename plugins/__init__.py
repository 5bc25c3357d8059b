# SPDX-License-Identifier: Apache-2.0
"""Triton-language kernels and TensorRT plugin registration; imports nothing of trtllm_dspark."""
