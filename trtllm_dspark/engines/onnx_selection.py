# SPDX-License-Identifier: Apache-2.0
"""ONNX function body of `select_drafts`: ranks by comparing all pairs, then gathers the rows.

Equal to the torch reference, ties by (position, request) included: a rank is the number of
survivals that go first, so that nothing depends on how a backend sorts. Like the kernel it does not
refuse rows beyond the rung: whoever sets the capacity sees to that.
"""

from __future__ import annotations

import onnx
import onnx.parser

from trtllm_dspark.engines.export_ops import DOMAIN
from trtllm_dspark.engines.onnx_functions import INT32, INT64, OPSET, ROW_OWNER

_SIGNATURE = (
    "select_drafts (survivals, capacity, caps, anchor_ids, anchor_positions, draft_ids) => "
    "(verify_lens, cu_query_lens, token_ids, positions, row_requests)"
)
_CHOOSE = """
zero = Constant <value_int = 0> ()
one = Constant <value_int = 1> ()
first = Constant <value_ints = [0]> ()
second = Constant <value_ints = [1]> ()
flat = Constant <value_ints = [-1]> ()
nothing = Constant <value_float = 0.0> ()
never = Constant <value_float = -1.0> ()
columns = Constant <value_ints = {columns}> ()
wide_caps = Cast <to = {int64}> (caps)
caps_column = Unsqueeze (wide_caps, second)
is_below_cap = Less (columns, caps_column)
is_positive = Greater (survivals, nothing)
is_admissible = And (is_below_cap, is_positive)
scores = Where (is_admissible, survivals, never)
position_major = Transpose <perm = [1, 0]> (scores)
by_position = Reshape (position_major, flat)
own = Unsqueeze (by_position, second)
others = Unsqueeze (by_position, first)
is_above = Greater (others, own)
is_equal = Equal (others, own)
size = Shape (by_position)
num_scores = Gather <axis = 0> (size, zero)
ids = Range (zero, num_scores, one)
own_ids = Unsqueeze (ids, second)
other_ids = Unsqueeze (ids, first)
is_earlier = Less (other_ids, own_ids)
is_earlier_tie = And (is_equal, is_earlier)
goes_first = Or (is_above, is_earlier_tie)
counted = Cast <to = {int64}> (goes_first)
rank = ReduceSum <keepdims = 0> (counted, second)
wide_capacity = Cast <to = {int64}> (capacity)
has_room = Less (rank, wide_capacity)
is_drafted = Greater (by_position, nothing)
is_chosen = And (has_room, is_drafted)
chosen = Cast <to = {int64}> (is_chosen)
table_shape = Constant <value_ints = [{num_drafts}, -1]> ()
chosen_table = Reshape (chosen, table_shape)
lens = ReduceSum <keepdims = 0> (chosen_table, first)
verify_lens = Cast <to = {int32}> (lens)
is_present = GreaterOrEqual (wide_caps, zero)
with_anchor = Add (lens, one)
query_lens = Where (is_present, with_anchor, zero)
ends = CumSum (query_lens, zero)
prefix_sums = Concat <axis = 0> (first, ends)
cu_query_lens = Cast <to = {int32}> (prefix_sums)
"""
_PACK = """
rung = Constant <value_int = {rung}> ()
row_ids = Range (zero, rung, one)
caps_shape = Shape (caps)
num_requests = Gather <axis = 0> (caps_shape, zero)
{row_owner}
starts = Sub (ends, query_lens)
own_start = Gather <axis = 0> (starts, request)
distance = Sub (row_ids, own_start)
last_offset = Constant <value_int = {num_drafts}> ()
offset = Min (distance, last_offset)
anchor_column = Unsqueeze (anchor_ids, second)
blocks = Concat <axis = 1> (anchor_column, draft_ids)
block_ids = Reshape (blocks, flat)
block_len = Constant <value_int = {block_len}> ()
block_start = Mul (request, block_len)
cell = Add (block_start, offset)
own_token = Gather <axis = 0> (block_ids, cell)
none = Cast <to = {int32}> (zero)
token_ids = Where (is_row, own_token, none)
own_anchor = Gather <axis = 0> (anchor_positions, request)
short_offset = Cast <to = {int32}> (offset)
own_position = Add (own_anchor, short_offset)
positions = Where (is_row, own_position, none)
own_request = Cast <to = {int32}> (request)
minus_one = Constant <value_int = -1> ()
padding = Cast <to = {int32}> (minus_one)
row_requests = Where (is_row, own_request, padding)
"""


def selection_function(num_drafts: int, rung: int) -> onnx.FunctionProto:
    """The body for blocks of γ drafts and a rung; requests are dynamic."""
    body = (_CHOOSE + _PACK).format(
        columns=list(range(num_drafts)),
        num_drafts=num_drafts,
        block_len=num_drafts + 1,
        rung=rung,
        int32=INT32,
        int64=INT64,
        row_owner=ROW_OWNER,
    )
    header = f'<domain: "{DOMAIN}", opset_import: ["" : {OPSET}]>\n'
    return onnx.parser.parse_function(f"{header}{_SIGNATURE} {{{body}}}")
