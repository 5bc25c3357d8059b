# SPDX-License-Identifier: Apache-2.0
"""q in the ONNX body of `accept_drafts`: of the drafts, and what p leaves of it after a rejection.

Text around it has made the names it reads (`onnx_acceptance`); a one-hot q costs no distribution.
"""

from __future__ import annotations

from trtllm_dspark.engines.onnx_functions import FLOAT
from trtllm_dspark.engines.onnx_noise import DOUBLE

ONE_HOT, AS_PROBS, AS_LOGITS = 0, 1, 2
"""How q is given: not at all, as probabilities, or as logits with (max, mass) and threshold."""

_Q_OF_DRAFTS = """
q_bases = Mul (block_slots, vocab)
q_cells = Add (q_bases, drafts)
wide_probs = Cast <to = {float}> (draft_probs)
flat_probs = Reshape (wide_probs, flat)
{found}
is_slot = Less (offsets, num_slots)
is_from_q = And (sampled_column, is_slot)
one_narrow = Constant <value_float = 1.0> ()
q_narrow = Where (is_from_q, cell_probs, one_narrow)
q = Cast <to = {double}> (q_narrow)
"""
_Q_FROM_LOGITS = """
pairs_shape = Constant <value_ints = [-1, 2]> ()
stat_pairs = Reshape (draft_stats, pairs_shape)
slot_tops = Gather <axis = 1> (stat_pairs, zero)
slot_masses = Gather <axis = 1> (stat_pairs, one)
slot_edges = Reshape (draft_thresholds, flat)
request_scales = Unsqueeze (scales, second)
cell_values = Gather <axis = 0> (flat_probs, q_cells)
cell_top = Gather <axis = 0> (slot_tops, block_slots)
cell_mass = Gather <axis = 0> (slot_masses, block_slots)
cell_edge = Gather <axis = 0> (slot_edges, block_slots)
"""
_RESIDUAL_FROM_Q = """
final_slots = GatherElements <axis = 1> (block_slots, accepted_column)
final_slot = Squeeze (final_slots, second)
vocab_size = Unsqueeze (vocab, first)
slot_shape = Concat <axis = 0> (flat, vocab_size)
slot_rows = Reshape (wide_probs, slot_shape)
slot_values = Gather <axis = 0> (slot_rows, final_slot)
{probs}
final_totals = Gather <axis = 0> (totals, final_rows)
total_column = Unsqueeze (final_totals, second)
slot_wide = Cast <to = {double}> (slot_probs)
q_mass = Mul (slot_wide, total_column)
final_wide = Cast <to = {double}> (final_weights)
difference = Sub (final_wide, q_mass)
excess = Max (difference, zero_wide)
from_q = Cast <to = {float}> (excess)
residual = Where (sampled_column, from_q, without_draft)
"""
_SLOT_PROBS = """
slot_top = Gather <axis = 0> (slot_tops, final_slots)
slot_mass = Gather <axis = 0> (slot_masses, final_slots)
slot_edge = Gather <axis = 0> (slot_edges, final_slots)
"""
_PROBS_OF_LOGITS = """
{p}_shifted = Sub ({p}_values, {p}_top)
{p}_scaled = Mul ({p}_shifted, request_scales)
{p}_weights = Exp ({p}_scaled)
{p}_shares = Div ({p}_weights, {p}_mass)
{p}_is_cut = Less ({p}_values, {p}_edge)
{p}_probs = Where ({p}_is_cut, nothing, {p}_shares)
"""
_NO_Q = """
starts_wide = Cast <to = {double}> (rows)
nothing_wide = Mul (starts_wide, zero_wide)
q = Add (nothing_wide, one_wide)
"""


def q_lines(draft_form: int) -> str:
    """Nodes that make `q` [R, γ+1] float64 of the drafts; 1 where q is one-hot."""
    if draft_form == ONE_HOT:
        return _format(_NO_Q)
    found = "cell_probs = Gather <axis = 0> (flat_probs, q_cells)"
    if draft_form == AS_LOGITS:
        found = _Q_FROM_LOGITS + _PROBS_OF_LOGITS.format(p="cell")
    return _format(_Q_OF_DRAFTS, found=found)


def residual_lines(draft_form: int) -> str:
    """Nodes that make `residual` [R, V]: max(p − q, 0) times p's total, at each request's row."""
    if draft_form == ONE_HOT:
        return "residual = Identity (without_draft)"
    probs = "slot_probs = Identity (slot_values)"
    if draft_form == AS_LOGITS:
        probs = _SLOT_PROBS + _PROBS_OF_LOGITS.format(p="slot")
    return _format(_RESIDUAL_FROM_Q, probs=probs)


def _format(text: str, **parts: str) -> str:
    return text.format(float=FLOAT, double=DOUBLE, **parts)
