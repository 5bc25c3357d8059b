# SPDX-License-Identifier: Apache-2.0
"""Fills ${key} in config.pbtxt templates, as upstream's fill_template.py does: same arguments, same
escapes, same two defaults; keys that are not given stay as they are. Standard library only.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from trtllm_dspark.errors import ConfigError

DEFAULTS = {"max_queue_size": "0", "max_queue_delay_microseconds": "0"}
"""Filled even when not given, as upstream does."""


def template_keys(text: str) -> tuple[str, ...]:
    """The keys of a template, sorted."""
    return tuple(sorted(set(re.findall(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}", text))))


def parse_substitutions(text: str) -> dict[str, str]:
    """'key:value,key:value' as a dictionary; a backslash takes the next character literally."""
    result: dict[str, str] = {}
    for item in _split(text, ","):
        parts = _split(item, ":")
        if len(parts) != 2:
            raise ConfigError(
                f"substitution {item!r} is not key:value: write ':' and ',' inside values as "
                "'\\:' and '\\,'"
            )
        key, value = (_unescape(part) for part in parts)
        result[key] = value
    return result


def fill_template(text: str, values: Mapping[str, str], where: str = "the template") -> str:
    """`text` with the given keys filled; a key that the template does not have is refused."""
    keys = template_keys(text)
    unknown = sorted(set(values) - set(keys))
    if unknown:
        raise ConfigError(
            f"{where} has no key {unknown[0]!r} (or it is filled already); unfilled keys are "
            f"{', '.join(keys) or 'none'}"
        )
    return Template(text).safe_substitute({**DEFAULTS, **values})


def main(argv: Sequence[str] | None = None) -> int:
    """The command line: `dspark fill-template [-i] FILE "key:value,key:value"`."""
    parser = argparse.ArgumentParser(
        prog="dspark fill-template",
        description="Fill ${key} placeholders of a config.pbtxt.",
        epilog="example: dspark fill-template -i triton_repo/tensorrt_llm/config.pbtxt "
        "'triton_max_batch_size:8,decoupled_mode:true,engine_dir:/models/smollm2'",
    )
    parser.add_argument("file_path", help="the .pbtxt to fill")
    parser.add_argument("substitutions", help="key:value,key:value,…")
    parser.add_argument(
        "-i", "--in_place", action="store_true", help="change the file instead of printing"
    )
    args = parser.parse_args(argv)
    path = Path(args.file_path)
    try:
        text = fill_template(
            path.read_text(encoding="utf-8"), parse_substitutions(args.substitutions), str(path)
        )
        if args.in_place:
            path.write_text(text, encoding="utf-8")
        else:
            print(text)
    except (ConfigError, OSError) as error:
        print(f"dspark fill-template: {error}", file=sys.stderr)
        return 2
    return 0


def _split(text: str, delimiter: str) -> list[str]:
    """Split at unescaped delimiters; escapes stay in place."""
    parts, escaped = [""], False
    for character in text:
        if character == delimiter and not escaped:
            parts.append("")
            continue
        parts[-1] += character
        escaped = character == "\\" and not escaped
    return parts


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)
