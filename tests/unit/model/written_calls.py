"""Real chat templates, and how their models write calls."""

import re

from nightmill.jobs.base.contract import CallFormat

HERMES, LLAMA, MISTRAL, NAMED = (
    CallFormat.HERMES, CallFormat.LLAMA, CallFormat.MISTRAL, CallFormat.MISTRAL_NAMED
)  # fmt: skip
WRITTEN = {
    "Bielik-11B-v3.0-Instruct": HERMES,
    "MiMo-VL": HERMES,
    "Mistral-Small-3.2-24B-Instruct-2506": NAMED,
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": HERMES,
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": HERMES,
    "Qwen-QwQ-32B": HERMES,
    "Qwen-Qwen2.5-7B-Instruct": HERMES,
    "Qwen-Qwen3-0.6B": HERMES,
    "Reka-Edge": HERMES,
    "ibm-granite-granite-4.0": HERMES,
    "ibm-granite-granite-4.1": HERMES,
    "meta-llama-Llama-3.1-8B-Instruct": LLAMA,
    "meta-llama-Llama-3.2-3B-Instruct": LLAMA,
    "meta-llama-Llama-3.3-70B-Instruct": LLAMA,
    "mistralai-Ministral-3-14B-Reasoning-2512": NAMED,
    "mistralai-Mistral-Nemo-Instruct-2407": MISTRAL,
    "unsloth-mistral-Devstral-Small-2507": NAMED,
    "Apriel-1.6-15b-Thinker-fixed": CallFormat.TOOL_CALLS,
    "GigaChat3.1-10B-A1.8B": CallFormat.GIGACHAT,
    "GLM-4.6": CallFormat.GLM_XML,
    "GLM-4.7-Flash": CallFormat.GLM_XML,
    "LFM2-8B-A1B": CallFormat.LFM2,
    "LFM2.5-8B-A1B": CallFormat.LFM2,
    "LFM2.5-Instruct": CallFormat.LFM2,
    "MiniMax-M1": CallFormat.TOOL_CALLS,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": CallFormat.QWEN_XML,
    "NVIDIA-Nemotron-Nano-v2": CallFormat.NEMOTRON,
    "Qwen3-Coder": CallFormat.QWEN_XML,
    "Qwen3.5-4B": CallFormat.QWEN_XML,
    "Spark2.5": CallFormat.GLM_XML,
    "StepFun3.5-Flash": CallFormat.QWEN_XML,
    "google-gemma-4-31B-it-interleaved": CallFormat.GEMMA,
    "google-gemma-4-31B-it": CallFormat.GEMMA,
    "ibm-granite-granite-3.3-2B-Instruct": CallFormat.GRANITE,
    "inclusionai-ling-3.0-flash": CallFormat.GLM_XML,
    "openai-gpt-oss-120b": CallFormat.HARMONY,
    "poolside-Laguna-S-2.1": CallFormat.GLM_XML,
    "poolside-Laguna-XS-2.1": CallFormat.GLM_XML,
    "poolside-Laguna-XS.2": CallFormat.GLM_XML,
    "unsloth-Apriel-1.5": CallFormat.TOOL_CALLS,
    "ByteDance-Seed-OSS": CallFormat.SEED,
    "Cohere2MoE": CallFormat.COHERE,
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": CallFormat.COHERE,
    "MiniMax-M2": CallFormat.MINIMAX,
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": CallFormat.DEEPSEEK_R1,
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": CallFormat.DEEPSEEK_R1,
    "deepseek-ai-DeepSeek-V3.1": CallFormat.DEEPSEEK,
    "llama-cpp-deepseek-r1": CallFormat.DEEPSEEK_R1,
    "moonshotai-Kimi-K2": CallFormat.KIMI,
}
"""The real templates whose calls are known; of the others, some know no tools."""
TURN_END = re.compile(
    r"\s*(</s>|<\|(im_end|eot_id|eom_id|end_of_text|endoftext|end|role_end)\|>|<turn\|>|</assistant>"
    r"|<SPECIAL_1\d>|<sep>|\[e~\[|<｜end▁of▁sentence｜>|<end_of_sentence>|<seed:eos>|<\|END_OF_TURN_TOKEN\|>|<\|message_sep\|>)\s*$"
)
"""What ends the model's turn, which its texts do not hold."""
