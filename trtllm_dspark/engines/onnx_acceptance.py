# SPDX-License-Identifier: Apache-2.0
"""ONNX function body of `accept_drafts`: all three rules, all columns at once.

Equal to the torch reference: weights float32, sums and comparisons float64, the coupled rule's
noise made from its keys. For ONNX Runtime only: TensorRT knows neither float64 (TensorRT-RTX's
parser takes float32 without a word, which is not exact) nor bitwise operators on int64; there the
plugin of the same name takes the same inputs. Rows, requests and vocabulary are dynamic.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx
import onnx.parser

from trtllm_dspark.config import require
from trtllm_dspark.engines.export_ops import DOMAIN
from trtllm_dspark.engines.onnx_draft_probs import (
    AS_LOGITS,
    AS_PROBS,
    ONE_HOT,
    q_lines,
    residual_lines,
)
from trtllm_dspark.engines.onnx_functions import FLOAT, INT32, INT64, OPSET, ROW_OWNER
from trtllm_dspark.engines.onnx_noise import DOUBLE, gumbel_lines


@dataclass(frozen=True)
class AcceptanceForm:
    """What one node is specialised to; the plugin's attributes but the vocabulary's size."""

    num_drafts: int
    draft_form: int = AS_PROBS
    has_thresholds: bool = True
    has_coupled: bool = True

    def __post_init__(self) -> None:
        require(self.num_drafts >= 1, "num_drafts", self.num_drafts, "≥ 1")
        forms = (ONE_HOT, AS_PROBS, AS_LOGITS)
        require(self.draft_form in forms, "draft_form", self.draft_form, f"one of {forms}")


_SIGNATURE = (
    "accept_drafts (logits, thresholds, scales, cu_rows, draft_ids, draft_lens, draft_probs, "
    "draft_stats, draft_thresholds, sampled, rules, accept_uniforms, final_uniforms, seeds, "
    "anchor_positions) => (accepted_lens, next_token_ids, dropped_accept_probs)"
)
_CONSTANTS = """
zero = Constant <value_int = 0> ()
one = Constant <value_int = 1> ()
two = Constant <value_int = 2> ()
minus_one = Constant <value_int = -1> ()
first = Constant <value_ints = [0]> ()
second = Constant <value_ints = [1]> ()
before_last = Constant <value_ints = [-1]> ()
far = Constant <value_ints = [9223372036854775807]> ()
flat = Constant <value_ints = [-1]> ()
offsets = Constant <value_ints = {offsets}> ()
num_slots = Constant <value_int = {num_drafts}> ()
last_slot = Constant <value_int = {last_slot}> ()
nothing = Constant <value_float = 0.0> ()
zero_wide = Cast <to = {double}> (zero)
one_wide = Cast <to = {double}> (one)
nan = Div (nothing, nothing)
bit_narrow = Constant <value_float = {bit}> ()
bit = Cast <to = {double}> (bit_narrow)
"""
_ROWS = """
cu = Cast <to = {int64}> (cu_rows)
starts = Slice (cu, first, before_last, first)
ends = Slice (cu, second, far, first)
row_counts = Sub (ends, starts)
lens = Sub (row_counts, one)
starts_column = Unsqueeze (starts, second)
lens_column = Unsqueeze (lens, second)
logits_shape = Shape (logits)
num_rows = Gather <axis = 0> (logits_shape, zero)
vocab = Gather <axis = 0> (logits_shape, one)
row_ids = Range (zero, num_rows, one)
rules_shape = Shape (rules)
num_requests = Gather <axis = 0> (rules_shape, zero)
{row_owner}
row_scales = Gather <axis = 0> (scales, request)
scale_column = Unsqueeze (row_scales, second)
wide_logits = Cast <to = {float}> (logits)
top = ReduceMax <keepdims = 1> (wide_logits, second)
shifted = Sub (wide_logits, top)
scaled = Mul (shifted, scale_column)
all_weights = Exp (scaled)
{filter}
weights_wide = Cast <to = {double}> (weights)
totals = ReduceSum <keepdims = 0> (weights_wide, second)
best = ArgMax <axis = 1, keepdims = 0> (wide_logits)
"""
_FILTER = """threshold_column = Unsqueeze (thresholds, second)
is_cut = Less (wide_logits, threshold_column)
weights = Where (is_cut, nothing, all_weights)"""
_COUPLED = """
own_start = Gather <axis = 0> (starts, request)
own_offset = Sub (row_ids, own_start)
own_anchor = Gather <axis = 0> (anchor_positions, request)
anchored = Add (own_anchor, own_offset)
noise_positions = Add (anchored, one)
row_seeds = Gather <axis = 0> (seeds, request)
{noise}
{filter}
logits_double = Cast <to = {double}> (candidates)
scale_double = Cast <to = {double}> (scale_column)
energies = Mul (logits_double, scale_double)
perturbed = Add (energies, gumbels)
coupled_best = ArgMax <axis = 1, keepdims = 0> (perturbed)
"""
_COUPLED_FILTER = """low = Constant <value_float = -3.0e38> ()
candidates = Where (is_cut, low, wide_logits)"""
_CELLS = """
verified_offsets = Min (offsets, lens_column)
known_offsets = Max (verified_offsets, zero)
wanted_rows = Add (starts_column, known_offsets)
last_row = Sub (num_rows, one)
rows = Min (wanted_rows, last_row)
blank = Mul (starts_column, zero)
wide_ids = Cast <to = {int64}> (draft_ids)
padded_ids = Concat <axis = 1> (wide_ids, blank)
drafts = Max (padded_ids, zero)
row_bases = Mul (rows, vocab)
weight_cells = Add (row_bases, drafts)
flat_weights = Reshape (weights_wide, flat)
draft_weights = Gather <axis = 0> (flat_weights, weight_cells)
cell_totals = Gather <axis = 0> (totals, rows)
p = Div (draft_weights, cell_totals)
sampled_column = Unsqueeze (sampled, second)
slots = Min (offsets, last_slot)
request_ids = Range (zero, num_requests, one)
block_starts = Mul (request_ids, num_slots)
block_column = Unsqueeze (block_starts, second)
block_slots = Add (block_column, slots)
"""
_ACCEPT = """
rules_wide = Cast <to = {int64}> (rules)
is_rejection = Equal (rules_wide, one)
rejection_column = Unsqueeze (is_rejection, second)
best_choice = Gather <axis = 0> (best, rows)
{choice}
matches = Equal (drafts, choice)
uniform_bits = Cast <to = {double}> (accept_uniforms)
uniforms = Mul (uniform_bits, bit)
blank_wide = Cast <to = {double}> (blank)
padded_uniforms = Concat <axis = 1> (uniforms, blank_wide)
bounds = Mul (padded_uniforms, q)
passes = Less (bounds, p)
by_chance = And (rejection_column, passes)
chooses = Not (rejection_column)
by_choice = And (chooses, matches)
is_good = Or (by_chance, by_choice)
is_verified = Less (offsets, lens_column)
is_kept = And (is_good, is_verified)
is_lost = Not (is_kept)
lost = Cast <to = {int64}> (is_lost)
lost_so_far = CumSum (lost, one)
is_accepted = Equal (lost_so_far, zero)
accepted_flags = Cast <to = {int64}> (is_accepted)
accepted = ReduceSum <keepdims = 0> (accepted_flags, second)
accepted_lens = Cast <to = {int32}> (accepted)
accepted_column = Unsqueeze (accepted, second)
"""
_COUPLED_CHOICE = """coupled_choice = Gather <axis = 0> (coupled_best, rows)
is_coupled = Equal (rules_wide, two)
coupled_column = Unsqueeze (is_coupled, second)
choice = Where (coupled_column, coupled_choice, best_choice)"""
_RESIDUAL = """
last_rows = GatherElements <axis = 1> (rows, accepted_column)
final_rows = Squeeze (last_rows, second)
final_weights = Gather <axis = 0> (weights, final_rows)
token_ids = Range (zero, vocab, one)
rejected_ids = GatherElements <axis = 1> (drafts, accepted_column)
is_rejected_id = Equal (token_ids, rejected_ids)
without_draft = Where (is_rejected_id, nothing, final_weights)
{residual}
residual_top = ReduceMax <keepdims = 1> (residual, second)
is_usable = Greater (residual_top, nothing)
is_rejected = Less (accepted, lens)
rejected_column = Unsqueeze (is_rejected, second)
is_residual = And (rejected_column, is_usable)
drawn_from = Where (is_residual, residual, final_weights)
"""
_DRAW = """
drawn_wide = Cast <to = {double}> (drawn_from)
steps = CumSum (drawn_wide, one)
whole = Slice (steps, before_last, far, second)
final_bits = Cast <to = {double}> (final_uniforms)
final_flat = Mul (final_bits, bit)
final_column = Unsqueeze (final_flat, second)
target = Mul (final_column, whole)
is_below = LessOrEqual (steps, target)
below = Cast <to = {int64}> (is_below)
crossing = ReduceSum <keepdims = 0> (below, second)
has_weight = Greater (drawn_from, nothing)
weighted_ids = Where (has_weight, token_ids, zero)
last_weighted = ReduceMax <keepdims = 0> (weighted_ids, second)
drawn = Min (crossing, last_weighted)
own_choices = GatherElements <axis = 1> (choice, accepted_column)
own_choice = Squeeze (own_choices, second)
next_present = Where (is_rejection, drawn, own_choice)
is_absent = Less (lens, zero)
next_ids = Where (is_absent, minus_one, next_present)
next_token_ids = Cast <to = {int32}> (next_ids)
dropped_column = Max (lens_column, zero)
dropped_p = GatherElements <axis = 1> (p, dropped_column)
dropped_q = GatherElements <axis = 1> (q, dropped_column)
dropped_ratio = Div (dropped_p, dropped_q)
dropped_capped = Min (dropped_ratio, one_wide)
dropped_prob = Cast <to = {float}> (dropped_capped)
match_values = Cast <to = {float}> (matches)
dropped_match = GatherElements <axis = 1> (match_values, dropped_column)
dropped_either = Where (rejection_column, dropped_prob, dropped_match)
dropped_value = Squeeze (dropped_either, second)
wide_draft_lens = Cast <to = {int64}> (draft_lens)
is_all = Equal (accepted, lens)
is_more = Less (lens, wide_draft_lens)
has_dropped = And (is_all, is_more)
dropped_accept_probs = Where (has_dropped, dropped_value, nan)
"""


def acceptance_function(form: AcceptanceForm) -> onnx.FunctionProto:
    """The body of nodes of one form. A request without rows is absent: 0, −1, NaN."""
    types = {"float": FLOAT, "double": DOUBLE, "int32": INT32, "int64": INT64}
    parts = [
        _CONSTANTS.format(
            offsets=list(range(form.num_drafts + 1)),
            num_drafts=form.num_drafts,
            last_slot=form.num_drafts - 1,
            bit=2.0**-53,
            **types,
        ),
        _ROWS.format(
            filter=_FILTER if form.has_thresholds else "weights = Identity (all_weights)",
            row_owner=ROW_OWNER,
            **types,
        ),
    ]
    if form.has_coupled:
        parts.append(_coupled_lines(form, types))
    coupled = _COUPLED_CHOICE if form.has_coupled else "choice = Identity (best_choice)"
    parts += [
        _CELLS.format(**types),
        q_lines(form.draft_form),
        _ACCEPT.format(choice=coupled, **types),
        _RESIDUAL.format(residual=residual_lines(form.draft_form), **types),
        _DRAW.format(**types),
    ]
    header = f'<domain: "{DOMAIN}", opset_import: ["" : {OPSET}]>\n'
    return onnx.parser.parse_function(f"{header}{_SIGNATURE} {{{''.join(parts)}}}")


def _coupled_lines(form: AcceptanceForm, types: dict[str, int]) -> str:
    return _COUPLED.format(
        noise=gumbel_lines("row_seeds", "noise_positions", "vocab"),
        filter=_COUPLED_FILTER if form.has_thresholds else "candidates = Identity (wide_logits)",
        **types,
    )
