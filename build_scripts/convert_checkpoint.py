#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A model as a TensorRT-LLM checkpoint, or back; the same as `dspark convert-checkpoint`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trtllm_dspark.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert-checkpoint", *sys.argv[1:]]))
