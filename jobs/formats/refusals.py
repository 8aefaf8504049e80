"""Unsupported keys of OpenAI's, vLLM's and llama.cpp's bodies, with reasons and remedies.

docs/http.md lists them in a table, in the same words.
"""

from typing import Any, NamedTuple


class Refusal(NamedTuple):
    """The reason for refusing a key. `neutral`: values that have no effect and are accepted, like null."""

    why: str
    neutral: tuple[Any, ...] = ()


_READS = "models here read and write text; remove it"
_ALONE = "a text is the text alone, without the tokens that end it; remove it"
_NO_CODE = "no code from a request is run; say what the answer must be, or give logit_bias or bad_words"
_COUNTERS = "it is llama.cpp's; GET /metrics has the numbers; remove it"
_FILTERS = "answers are drawn by other filters here; give top_k or min_p"
_THINKING = "it is for the model's template; give it in chat_template_kwargs, as enable_thinking for Qwen3"

REFUSED: dict[str, Refusal] = {
    "suffix": Refusal(
        "models here continue a prompt, and do not fill in what stands before a suffix; remove it, or "
        "describe it in the prompt",
        ("",),
    ),
    "functions": Refusal("it is OpenAI's older word for tools; give these", ([],)),
    "function_call": Refusal("it is OpenAI's older word for tool_choice; give that", ("none", "auto")),
    "modalities": Refusal(_READS, (["text"],)),
    "audio": Refusal(_READS),
    "mm_processor_kwargs": Refusal(_READS, ({},)),
    "prediction": Refusal("a text is computed from its beginning; remove it"),
    "thinking": Refusal(_THINKING),
    "enable_thinking": Refusal(_THINKING),
    "verbosity": Refusal("it is for OpenAI's own models; say in a message how long the answer is to be"),
    "web_search_options": Refusal("a worker looks nothing up; give a function in tools that does"),
    "documents": Refusal("templates are given messages; put the documents into one", ([],)),
    "chat_template": Refusal(
        "no code from a request is run, and the model's own template is; give what that reads in "
        "chat_template_kwargs"
    ),
    "use_beam_search": Refusal("answers are drawn token by token; give n for several", (False,)),
    "length_penalty": Refusal("it is for beam search; give max_tokens, or frequency_penalty", (1,)),
    "skip_special_tokens": Refusal(_ALONE, (True,)),
    "spaces_between_special_tokens": Refusal(_ALONE, (True,)),
    "include_reasoning": Refusal(
        "thoughts come apart, as reasoning_content; pass over it, or tell the template not to think in "
        "chat_template_kwargs",
        (True,),
    ),
    "return_tokens_as_token_ids": Refusal("tokens have their texts; give return_token_ids", (False,)),
    "allowed_token_ids": Refusal("say what the answer must be, with choice, regex or grammar"),
    "logits_processors": Refusal(_NO_CODE, ([],)),
    "vllm_xargs": Refusal(_NO_CODE, ({},)),
    "priority": Refusal(
        "vLLM's is lower the sooner, ours is higher; give ours to /v1/generate or in a plain row", (0,)
    ),
    "guided_whitespace_pattern": Refusal("white space in JSON is bounded, and is not chosen; remove it"),
    "n_predict": Refusal("it is llama.cpp's word for max_tokens; give that"),
    "n_probs": Refusal("it is llama.cpp's word for logprobs; give that", (0,)),
    "repeat_penalty": Refusal("it is llama.cpp's word for repetition_penalty; give that", (1,)),
    "typical_p": Refusal(_FILTERS, (1,)),
    "mirostat": Refusal(_FILTERS, (0,)),
    "return_progress": Refusal(_COUNTERS, (False,)),
    "timings_per_token": Refusal(_COUNTERS, (False,)),
}
"""Refusals by key."""
OF_ROWS: dict[str, Refusal] = {"stream": Refusal("results are written as they finish; remove it", (False,))}
"""Refusals for rows of files of keys that requests may have."""
