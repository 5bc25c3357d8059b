# SPDX-License-Identifier: Apache-2.0
"""The tensor names of the model repository: what each model takes and gives, and what is supported.

Names, types and shapes are those of TensorRT-LLM's `inflight_batcher_llm`; tests hold the
config.pbtxt templates and docs/support.md against these tables. Knows no values and no server.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Support(str, enum.Enum):
    """What happens to an input."""

    YES = "implemented"
    NO_EFFECT = "accepted, no effect"
    NEUTRAL_ONLY = "refused unless neutral"
    REFUSED = "refused"


@dataclass(frozen=True)
class InputSpec:
    """One input tensor of a model; dims are those of the config, without the batch dimension."""

    name: str
    datatype: str
    dims: tuple[int, ...] = (1,)
    support: Support = Support.YES
    note: str = ""
    """For refused inputs: what the feature is called. For others: what is worth knowing."""
    neutral: tuple[float, ...] = ()
    """NEUTRAL_ONLY: values that ask for nothing."""
    required: bool = False
    text_name: str = ""
    """Name of the same option on the text models (`ensemble`, `tensorrt_llm_bls`), if any."""
    is_extension: bool = False
    """Not an upstream name."""


@dataclass(frozen=True)
class OutputSpec:
    """One output tensor of a model."""

    name: str
    datatype: str
    dims: tuple[int, ...] = (1,)
    note: str = ""
    is_extension: bool = False


def _refused(
    name: str, datatype: str, dims: tuple[int, ...], feature: str, text: str = ""
) -> InputSpec:
    return InputSpec(name, datatype, dims, Support.REFUSED, feature, text_name=text)


def _neutral(
    name: str, datatype: str, neutral: tuple[float, ...], feature: str, text: str = ""
) -> InputSpec:
    return InputSpec(name, datatype, (1,), Support.NEUTRAL_ONLY, feature, neutral, text_name=text)


def _same(name: str, datatype: str, note: str = "", extension: bool = False) -> InputSpec:
    return InputSpec(name, datatype, note=note, text_name=name, is_extension=extension)


ENGINE_INPUTS: tuple[InputSpec, ...] = (
    InputSpec("input_ids", "INT32", (-1,), note="the prompt; missing or empty is an error"),
    InputSpec("input_lengths", "INT32", required=True, note="cuts padding off input_ids"),
    InputSpec("request_output_len", "INT32", required=True, text_name="max_tokens"),
    _same("end_id", "INT32", "one end token instead of the model's own; −1 means none"),
    _same("pad_id", "INT32", "checked; outputs are never padded"),
    InputSpec("stop_words_list", "INT32", (2, -1), note="token ids and end offsets"),
    InputSpec("bad_words_list", "INT32", (2, -1), note="token ids and end offsets"),
    InputSpec("embedding_bias", "FP32", (-1,), note="one bias per vocabulary entry"),
    _same("temperature", "FP32", "0 is greedy; see the rules"),
    InputSpec("runtime_top_k", "INT32", text_name="top_k"),
    InputSpec("runtime_top_p", "FP32", text_name="top_p"),
    _same("min_p", "FP32", extension=True),
    _same("repetition_penalty", "FP32"),
    _same("presence_penalty", "FP32"),
    _same("frequency_penalty", "FP32"),
    _same("min_tokens", "INT32", "the other spelling of min_length"),
    _same("min_length", "INT32", "the other spelling of min_tokens"),
    _same("seed", "UINT64", "the other spelling of random_seed; makes the output reproducible"),
    _same("random_seed", "UINT64", "the other spelling of seed"),
    _same("return_log_probs", "BOOL"),
    _same("return_perf_metrics", "BOOL", "fills the *_time_ns and kv_cache_* outputs"),
    _same("return_num_input_tokens", "BOOL", "the outputs are always filled"),
    _same("return_num_output_tokens", "BOOL", "the outputs are always filled"),
    _same("exclude_input_in_output", "BOOL", "streaming never repeats the input"),
    InputSpec("streaming", "BOOL", text_name="stream"),
    InputSpec("stop", "BOOL", note="ends the running requests with this request's id"),
    _same("num_draft_tokens", "INT32", "at most so many verified drafts a step; 0 = none", True),
    InputSpec(
        "stop_strings",
        "STRING",
        (-1,),
        note="stop words as text, found inside and across tokens",
        text_name="stop_words",
        is_extension=True,
    ),
    InputSpec(
        "len_penalty",
        "FP32",
        support=Support.NO_EFFECT,
        note="beam search only",
        text_name="length_penalty",
    ),
    InputSpec("early_stopping", "BOOL", support=Support.NO_EFFECT, note="beam search only"),
    InputSpec(
        "beam_search_diversity_rate", "FP32", support=Support.NO_EFFECT, note="beam search only"
    ),
    _neutral("beam_width", "INT32", (1,), "beam search", "beam_width"),
    _neutral(
        "num_return_sequences",
        "INT32",
        (1,),
        "several sequences per request",
        "num_return_sequences",
    ),
    _neutral("return_context_logits", "BOOL", (0,), "context logits", "return_context_logits"),
    _neutral(
        "return_generation_logits", "BOOL", (0,), "generation logits", "return_generation_logits"
    ),
    _neutral("runtime_top_p_min", "FP32", (0.0,), "top-p decay"),
    _neutral("runtime_top_p_decay", "FP32", (0.0, 1.0), "top-p decay"),
    _neutral("runtime_top_p_reset_ids", "INT32", (-1,), "top-p decay"),
    _neutral("draft_acceptance_threshold", "FP32", (0.0,), "drafts given by the client"),
    _neutral("prompt_vocab_size", "INT32", (0,), "prompt tables", "prompt_vocab_size"),
    _refused("draft_input_ids", "INT32", (-1,), "drafts given by the client"),
    _refused("draft_logits", "${logits_datatype}", (-1, -1), "drafts given by the client"),
    _refused(
        "encoder_input_features", "${encoder_input_features_data_type}", (-1, -1), "encoder models"
    ),
    _refused("encoder_output_lengths", "INT32", (1,), "encoder models"),
    _refused("decoder_input_ids", "INT32", (-1,), "encoder models"),
    _neutral("decoder_input_lengths", "INT32", (0,), "encoder models"),
    _refused(
        "prompt_embedding_table",
        "${prompt_embedding_table_data_type}",
        (-1, -1),
        "prompt tables",
        "prompt_embedding_table",
    ),
    _refused("prompt_table_extra_ids", "UINT64", (-1,), "prompt tables", "prompt_table_extra_id"),
    _refused("cross_attention_mask", "BOOL", (-1, -1), "cross attention"),
    _refused("skip_cross_attn_blocks", "BOOL", (1,), "cross attention"),
    _refused("mrope_rotary_cos_sin", "FP32", (-1,), "multimodal rotary embeddings"),
    _refused("mrope_position_deltas", "INT64", (1,), "multimodal rotary embeddings"),
    _refused("lora_task_id", "UINT64", (1,), "LoRA", "lora_task_id"),
    _refused("lora_weights", "FP16", (-1, -1), "LoRA", "lora_weights"),
    _refused("lora_config", "INT32", (-1, 3), "LoRA", "lora_config"),
    _refused("context_phase_params", "UINT8", (-1,), "disaggregated serving"),
    _refused("retention_token_range_starts", "INT32", (-1,), "K/V retention priorities"),
    _refused("retention_token_range_ends", "INT32", (-1,), "K/V retention priorities"),
    _refused("retention_token_range_priorities", "INT32", (-1,), "K/V retention priorities"),
    _refused("retention_token_range_durations_ms", "INT32", (-1,), "K/V retention priorities"),
    _refused("retention_decode_priority", "INT32", (1,), "K/V retention priorities"),
    _refused("retention_decode_duration_ms", "INT32", (1,), "K/V retention priorities"),
    _refused(
        "guided_decoding_guide_type",
        "STRING",
        (1,),
        "guided decoding",
        "guided_decoding_guide_type",
    ),
    _refused("guided_decoding_guide", "STRING", (1,), "guided decoding", "guided_decoding_guide"),
    _refused("lookahead_window_size", "INT32", (1,), "lookahead decoding"),
    _refused("lookahead_ngram_size", "INT32", (1,), "lookahead decoding"),
    _refused("lookahead_verification_set_size", "INT32", (1,), "lookahead decoding"),
)

_TEXT_ONLY_INPUTS: tuple[InputSpec, ...] = (
    InputSpec("text_input", "STRING", required=True, note="the prompt, UTF-8"),
    InputSpec("bad_words", "STRING", (-1,), note="never generated, with or without a space before"),
    InputSpec("embedding_bias_words", "STRING", (-1,), note="every token of a word gets its bias"),
    InputSpec("embedding_bias_weights", "FP32", (-1,), note="one bias per word"),
    InputSpec(
        "apply_chat_template",
        "BOOL",
        note="overrides the server's default",
        is_extension=True,
    ),
    InputSpec(
        "use_draft_logits",
        "BOOL",
        support=Support.NO_EFFECT,
        note="acceptance is always exact",
    ),
    _refused("decoder_text_input", "STRING", (1,), "encoder models"),
)

_BLS_ONLY_INPUTS: tuple[InputSpec, ...] = (
    _refused("image_input", "FP16", (-1, 3, -1, -1), "multimodal models"),
    _refused("image_bytes_input", "UINT8", (-1, -1, -1, -1), "multimodal models"),
    _refused("image_url_input", "STRING", (1,), "multimodal models"),
    _refused("video_bytes_input", "UINT8", (-1, -1, -1, -1), "multimodal models"),
)


def _text_input(spec: InputSpec) -> InputSpec:
    """The text models' form of an option that the engine model takes too."""
    dims = (1,) if spec.text_name == "prompt_table_extra_id" else spec.dims
    datatype = "FP16" if spec.name == "prompt_embedding_table" else spec.datatype
    extension = spec.is_extension and spec.name != "stop_strings"
    return InputSpec(
        spec.text_name, datatype, dims, spec.support, spec.note, spec.neutral, spec.required,
        spec.name, extension,
    )  # fmt: skip


TEXT_INPUTS: tuple[InputSpec, ...] = (
    *_TEXT_ONLY_INPUTS,
    *(_text_input(spec) for spec in ENGINE_INPUTS if spec.text_name),
)
"""Inputs of `ensemble`; here `text_name` is the engine's name of the option ("" if none)."""

BLS_INPUTS: tuple[InputSpec, ...] = (*TEXT_INPUTS, *_BLS_ONLY_INPUTS)

_COMMON_OUTPUTS: tuple[OutputSpec, ...] = (
    OutputSpec("cum_log_probs", "FP32", (-1,), "0 unless return_log_probs"),
    OutputSpec("output_log_probs", "FP32", (-1, -1), "0 unless return_log_probs"),
    OutputSpec("context_logits", "${logits_datatype}", (-1, -1), "a placeholder, always 0"),
    OutputSpec("generation_logits", "${logits_datatype}", (-1, -1, -1), "a placeholder, always 0"),
    OutputSpec("batch_index", "INT32", note="always 0"),
    OutputSpec("sequence_index", "INT32", note="always 0"),
    OutputSpec("kv_cache_alloc_new_blocks", "INT32", note="0 unless return_perf_metrics"),
    OutputSpec("kv_cache_reused_blocks", "INT32", note="not recorded, always 0"),
    OutputSpec("kv_cache_alloc_total_blocks", "INT32", note="0 unless return_perf_metrics"),
    OutputSpec("arrival_time_ns", "INT64", note="0 unless return_perf_metrics"),
    OutputSpec("first_scheduled_time_ns", "INT64", note="0 unless return_perf_metrics"),
    OutputSpec("first_token_time_ns", "INT64", note="0 unless return_perf_metrics"),
    OutputSpec("last_token_time_ns", "INT64", note="0 unless return_perf_metrics"),
    OutputSpec("acceptance_rate", "FP32", note="accepted / verified drafts so far"),
    OutputSpec("total_accepted_draft_tokens", "INT32", note="accepted drafts so far"),
    OutputSpec("total_draft_tokens", "INT32", note="verified drafts so far"),
    OutputSpec("num_input_tokens", "INT32"),
    OutputSpec("num_output_tokens", "INT32", note="tokens sent so far"),
    OutputSpec("num_decode_steps", "INT32", note="decode steps so far", is_extension=True),
    OutputSpec(
        "finish_reason",
        "STRING",
        note="eos, stop or length on the last response, else empty",
        is_extension=True,
    ),
)  # fmt: skip

ENGINE_OUTPUTS: tuple[OutputSpec, ...] = (
    OutputSpec("output_ids", "INT32", (-1, -1)),
    OutputSpec("sequence_length", "INT32", (-1,)),
    OutputSpec("context_phase_params", "UINT8", (-1,), "never sent"),
    OutputSpec("output_text", "STRING", note="text of output_ids", is_extension=True),
    *_COMMON_OUTPUTS,
)
TEXT_OUTPUTS: tuple[OutputSpec, ...] = (
    OutputSpec("text_output", "STRING", (-1,)),
    *_COMMON_OUTPUTS,
)

PREPROCESSING_INPUTS: tuple[InputSpec, ...] = (
    InputSpec("QUERY", "STRING", required=True),
    InputSpec("REQUEST_OUTPUT_LEN", "INT32", required=True),
    InputSpec("BAD_WORDS_DICT", "STRING", (-1,)),
    InputSpec("STOP_WORDS_DICT", "STRING", (-1,)),
    InputSpec("EMBEDDING_BIAS_WORDS", "STRING", (-1,)),
    InputSpec("EMBEDDING_BIAS_WEIGHTS", "FP32", (-1,)),
    InputSpec("END_ID", "INT32"),
    InputSpec("PAD_ID", "INT32"),
    InputSpec("APPLY_CHAT_TEMPLATE", "BOOL", is_extension=True),
    _refused("PROMPT_TABLE_EXTRA_ID", "UINT64", (1,), "prompt tables"),
    _refused("DECODER_QUERY", "STRING", (1,), "encoder models"),
    _refused("IMAGE_BYTES", "UINT8", (-1, -1, -1, -1), "multimodal models"),
    _refused("IMAGE_URL", "STRING", (1,), "multimodal models"),
    _refused("IMAGES", "STRING", (-1,), "multimodal models"),
    _refused("VIDEO_BYTES", "UINT8", (-1, -1, -1, -1), "multimodal models"),
)
PREPROCESSING_OUTPUTS: tuple[OutputSpec, ...] = (
    OutputSpec("INPUT_ID", "INT32", (-1,)),
    OutputSpec("REQUEST_INPUT_LEN", "INT32"),
    OutputSpec("DECODER_INPUT_ID", "INT32", (-1,), "empty"),
    OutputSpec("REQUEST_DECODER_INPUT_LEN", "INT32", (1,), "0"),
    OutputSpec("BAD_WORDS_IDS", "INT32", (2, -1)),
    OutputSpec("STOP_WORDS_IDS", "INT32", (2, -1)),
    OutputSpec("EMBEDDING_BIAS", "FP32", (-1,), "empty without bias words"),
    OutputSpec("REQUEST_OUTPUT_LEN", "INT32", (-1,)),
    OutputSpec("OUT_END_ID", "INT32"),
    OutputSpec("OUT_PAD_ID", "INT32"),
    OutputSpec("OUT_PROMPT_TABLE_EXTRA_IDS", "UINT64", (-1,), "0"),
    OutputSpec("PIXEL_VALUES", "FP16", (-1, -1, -1, -1), "never sent"),
    OutputSpec("ASPECT_RATIO_IDS", "INT64", (-1,), "never sent"),
    OutputSpec("ASPECT_RATIO_MASK", "INT64", (-1, -1), "never sent"),
    OutputSpec("CROSS_ATTENTION_MASK", "INT64", (-1, -1, -1), "never sent"),
    OutputSpec("IMAGE_SIZES", "INT64", (-1, 2), "never sent"),
    OutputSpec("IS_VIDEO_INPUT", "BOOL", (1,), "never sent"),
    OutputSpec("ATTENTION_MASK", "INT64", (-1,), "never sent"),
    OutputSpec("IMAGE_GRID_THW", "INT64", (3,), "never sent"),
    OutputSpec("VISION_INPUT_ID", "INT32", (-1,), "never sent"),
)

POSTPROCESSING_INPUTS: tuple[InputSpec, ...] = (
    InputSpec("TOKENS_BATCH", "INT32", (-1, -1), required=True),
    InputSpec("SEQUENCE_LENGTH", "INT32", (-1,), required=True),
)
POSTPROCESSING_OUTPUTS: tuple[OutputSpec, ...] = (OutputSpec("OUTPUT", "STRING", (-1,)),)


def find_refused(specs: tuple[InputSpec, ...]) -> dict[str, InputSpec]:
    """The inputs of `specs` that are refused, always or unless neutral, by name."""
    kinds = (Support.REFUSED, Support.NEUTRAL_ONLY)
    return {spec.name: spec for spec in specs if spec.support in kinds}
