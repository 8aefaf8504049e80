"""The clients that are tried: what to install for each, and which script has its cases."""

from dataclasses import dataclass

ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "openai": ("openai>=2,<4", "anthropic>=0.80,<1"),
    "cohere": ("cohere>=5.13,<8",),
    "litellm": ("litellm>=1.80,<2", "dspy>=3.4,<4"),
    "langchain": ("langchain-openai>=1,<2", "langchain-anthropic>=1,<2"),
    "llama-index": ("llama-index-llms-openai-like>=0.5,<1",),
    "instructor": ("instructor>=1.13,<2",),
    "lm-eval": ("lm_eval[api]>=0.4.9,<0.5", "transformers>=4.57,<6"),
    "llm": ("llm>=0.27,<1",),
    "prefect": ("prefect>=3,<4", "httpx>=0.27,<1"),
    "pydantic-ai": ("pydantic-ai-slim[openai,anthropic]>=1,<3",),
}
"""By name of a virtual environment, the ranges of Python packages in it."""
NODE_ENVIRONMENTS: dict[str, tuple[str, ...]] = {"openai-npm": ("openai@^6",)}
"""The same for npm."""


@dataclass(frozen=True)
class ClientLibrary:
    """A library whose cases one script has. `distribution` is the package whose version is shown."""

    name: str
    environment: str
    distribution: str
    script: str

    @property
    def needs_node(self) -> bool:
        """True for a library of npm."""
        return self.environment in NODE_ENVIRONMENTS


RECIPE_ENVIRONMENTS = {"langchain.md": "langchain", "dspy.md": "litellm", "prefect.md": "prefect"}
"""The environment in which the Python blocks of a page of docs/recipes run."""

CLIENTS = (
    ClientLibrary("openai", "openai", "openai", "openai_python.py"),
    ClientLibrary("openai (npm)", "openai-npm", "openai", "openai_npm.mjs"),
    ClientLibrary("anthropic", "openai", "anthropic", "anthropic_python.py"),
    ClientLibrary("Cohere", "cohere", "cohere", "cohere_rerank.py"),
    ClientLibrary("LiteLLM", "litellm", "litellm", "litellm_sdk.py"),
    ClientLibrary("DSPy", "litellm", "dspy", "dspy_programs.py"),
    ClientLibrary("LangChain", "langchain", "langchain-openai", "langchain_models.py"),
    ClientLibrary("LlamaIndex", "llama-index", "llama-index-llms-openai-like", "llama_index_llms.py"),
    ClientLibrary("Instructor", "instructor", "instructor", "instructor_modes.py"),
    ClientLibrary("lm-eval", "lm-eval", "lm_eval", "lm_eval_tasks.py"),
    ClientLibrary("llm", "llm", "llm", "llm_tool.py"),
    ClientLibrary("pydantic-ai", "pydantic-ai", "pydantic-ai-slim", "pydantic_ai_agents.py"),
)
