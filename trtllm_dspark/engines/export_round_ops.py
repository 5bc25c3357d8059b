# SPDX-License-Identifier: Apache-2.0
"""`select_drafts` and `accept_drafts` as ONNX graphs of their own: one node, with or without body.

They stand between the drafter's and the target's graphs (design §3), where today the step loop does
their work on the host: no engine directory holds them. The nodes are what TensorRT makes the
plugins of; with their bodies the files run in ONNX Runtime.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import helper

from trtllm_dspark.engines.export_ops import DOMAIN, DOMAIN_VERSION, SCHEMAS, register_schemas
from trtllm_dspark.engines.onnx_acceptance import AcceptanceForm, acceptance_function
from trtllm_dspark.engines.onnx_draft_probs import AS_LOGITS, ONE_HOT
from trtllm_dspark.engines.onnx_functions import FLOAT, INT32, INT64, OPSET
from trtllm_dspark.engines.onnx_selection import selection_function

IR_VERSION = 9
Tensors = dict[str, tuple[int, tuple[int | str, ...]]]
"""Name → (element type, shape; names are dynamic)."""


def export_selection(
    path: Path, *, num_drafts: int, max_requests: int, rung: int, with_functions: bool = True
) -> Path:
    """Write the graph of one rung: survivals, capacity and caps in, packed rows out."""
    block, request = ("num_requests", num_drafts), ("num_requests",)
    inputs: Tensors = {
        "survivals": (FLOAT, block),
        "capacity": (INT32, (1,)),
        "caps": (INT32, request),
        "anchor_ids": (INT32, request),
        "anchor_positions": (INT32, request),
        "draft_ids": (INT32, block),
    }
    outputs: Tensors = {
        "verify_lens": (INT32, request),
        "cu_query_lens": (INT32, ("num_prefix_sums",)),
        **{name: (INT32, (rung,)) for name in ("token_ids", "positions", "row_requests")},
    }
    attributes = {"num_drafts": num_drafts, "max_requests": max_requests, "rung": rung}
    body = selection_function(num_drafts, rung) if with_functions else None
    return _write(path, "select_drafts", inputs, outputs, attributes, body)


def export_acceptance(
    path: Path, form: AcceptanceForm, *, vocab_size: int, with_functions: bool = True
) -> Path:
    """Write the graph of one form of acceptance: logits and drafts in, lengths and tokens out.

    Inputs that the form never reads still are inputs, of any size.
    """
    request, block = ("num_requests",), ("num_requests", form.num_drafts)
    gives_q, gives_stats = form.draft_form != ONE_HOT, form.draft_form == AS_LOGITS
    inputs: Tensors = {
        "logits": (FLOAT, ("num_rows", vocab_size)),
        "thresholds": (FLOAT, ("num_rows" if form.has_thresholds else "unread_thresholds",)),
        "scales": (FLOAT, request),
        "cu_rows": (INT32, ("num_prefix_sums",)),
        "draft_ids": (INT32, block),
        "draft_lens": (INT32, request),
        "draft_probs": (FLOAT, (*block, vocab_size) if gives_q else ("unread_probs",)),
        "draft_stats": (FLOAT, (*block, 2) if gives_stats else ("unread_stats",)),
        "draft_thresholds": (FLOAT, block if gives_stats else ("unread_edges",)),
        "sampled": (onnx.TensorProto.BOOL, request),
        "rules": (INT32, request),
        "accept_uniforms": (INT64, block),
        "final_uniforms": (INT64, request),
        "seeds": (INT64, request),
        "anchor_positions": (INT64, request),
    }
    outputs: Tensors = {
        "accepted_lens": (INT32, request),
        "next_token_ids": (INT32, request),
        "dropped_accept_probs": (FLOAT, request),
    }
    attributes = {
        "vocab_size": vocab_size,
        "num_drafts": form.num_drafts,
        "draft_form": form.draft_form,
        "has_thresholds": int(form.has_thresholds),
        "has_coupled": int(form.has_coupled),
    }
    body = acceptance_function(form) if with_functions else None
    return _write(path, "accept_drafts", inputs, outputs, attributes, body)


def _write(
    path: Path,
    op: str,
    inputs: Tensors,
    outputs: Tensors,
    attributes: dict[str, int],
    body: onnx.FunctionProto | None,
) -> Path:
    """One node of the domain between graph inputs and outputs of the schema's names."""
    register_schemas()
    wanted = [[entry.split(":")[0] for entry in part.split()] for part in SCHEMAS[op][:2]]
    assert [list(inputs), list(outputs)] == wanted, "the graph is not the schema's"
    node = helper.make_node(op, list(inputs), list(outputs), domain=DOMAIN)
    node.attribute.extend(helper.make_attribute(k, v) for k, v in attributes.items())
    model = helper.make_model(
        helper.make_graph([node], op, _values(inputs), _values(outputs)),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, DOMAIN_VERSION)],
        functions=[] if body is None else [body],
        ir_version=IR_VERSION,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())
    return path


def _values(tensors: Tensors) -> list[onnx.ValueInfoProto]:
    return [helper.make_tensor_value_info(name, *kind) for name, kind in tensors.items()]
