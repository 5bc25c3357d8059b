# SPDX-License-Identifier: Apache-2.0
"""Parts of `gpu_check.py`: correctness, timings and a decode loop of the kernels on one GPU."""
