#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fill a config.pbtxt: `fill_template.py -i FILE "key:value,key:value"`, as upstream's tool."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trtllm_dspark.serving.template import main

if __name__ == "__main__":
    sys.exit(main())
