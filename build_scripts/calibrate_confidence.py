#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fit calibration.json on held-out prompts; the same as `dspark calibrate`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trtllm_dspark.cli import main

if __name__ == "__main__":
    sys.exit(main(["calibrate", *sys.argv[1:]]))
