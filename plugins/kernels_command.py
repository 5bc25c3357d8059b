# SPDX-License-Identifier: Apache-2.0
"""`dspark kernels compile`: every kernel to PTX and cubin without a GPU, and the resource table.

Exit codes: 0 ok, 1 a kernel spills or needs too much shared memory, 2 a bad request.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dspark_plugins.compile import CompiledKernel

EXAMPLE = """example:
  dspark kernels compile --targets 90 120 --out kernels
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="dspark kernels",
        description="Work on the GPU kernels; needs no GPU.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    compiler = commands.add_parser(
        "compile",
        help="compile every kernel and print its resources",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    compiler.add_argument(
        "--targets",
        type=int,
        nargs="+",
        default=[80, 90, 100, 120],
        help="compute capabilities (default: %(default)s)",
    )
    compiler.add_argument("--ops", nargs="+", default=None, help="only these ops (default: all)")
    compiler.add_argument("--out", type=Path, default=None, help="folder for PTX, cubins and table")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, print the table, fail on spills."""
    args = build_parser().parse_args(argv)
    try:
        from dspark_plugins.compile import compile_kernels, find_problems, format_table
    except ModuleNotFoundError as error:
        print(f"dspark kernels: {error}; install triton to compile kernels", file=sys.stderr)
        return 2
    try:
        table = compile_kernels(args.targets, ops=args.ops, out_dir=args.out, report=_show_progress)
    except (ValueError, RuntimeError) as error:
        print(f"dspark kernels: {error}", file=sys.stderr)
        return 2
    print(format_table(table))
    problems = find_problems(table)
    for problem in problems:
        print(f"FAILED {problem}", file=sys.stderr)
    return 1 if problems else 0


def _show_progress(row: CompiledKernel) -> None:
    print(f"compiled {row.op}/{row.variant} for sm_{row.capability}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
