#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fill a config.pbtxt as upstream's tool does; the same as `dspark fill-template`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trtllm_dspark.cli import main

if __name__ == "__main__":
    sys.exit(main(["fill-template", *sys.argv[1:]]))
