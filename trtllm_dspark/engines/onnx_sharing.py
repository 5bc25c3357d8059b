# SPDX-License-Identifier: Apache-2.0
"""Computes once what every layer of an exported graph computes alike: masks, row maps, offsets.

Function bodies are inlined per layer, which multiplies nodes to compile and run. The result gives
the same bits. Knows ONNX graphs, not models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

Key = tuple[Any, ...]


def share_common_nodes(source: Path, output: Path) -> Path:
    """Write `output` beside `source` (they share external weights): inlined, equal nodes merged."""
    import onnx
    from onnx import inliner

    model = onnx.load(str(source), load_external_data=False)
    model = inliner.inline_local_functions(model)
    merge_equal_nodes(model.graph)
    output.write_bytes(model.SerializeToString())
    return output


def merge_equal_nodes(graph: Any) -> int:
    """Drop nodes with the same operator, inputs and attributes as an earlier one; how many.

    Example: Cast(x) → a, Cast(x) → b, Add(b, y) becomes Cast(x) → a, Add(a, y).
    """
    named = {value.name for value in graph.output}
    renamed: dict[str, str] = {}
    first: dict[Key, Any] = {}
    kept = []
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = renamed.get(name, name)
        twin = first.setdefault(_key(node), node)
        if twin is node or named.intersection(node.output):
            kept.append(node)
        else:
            renamed.update(zip(node.output, twin.output, strict=True))
    dropped = len(graph.node) - len(kept)
    kept = [type(node).FromString(node.SerializeToString()) for node in kept]
    del graph.node[:]
    graph.node.extend(kept)
    return dropped


def _key(node: Any) -> Key:
    """Equal for nodes that give equal values; nodes with subgraphs equal nobody."""
    if any(a.HasField("g") or a.graphs for a in node.attribute):
        return (id(node),)
    attributes = sorted(a.SerializeToString(deterministic=True) for a in node.attribute)
    return node.domain, node.op_type, tuple(node.input), len(node.output), tuple(attributes)
