"""OpenAI's Python client of the server that is tried, and what its cases ask."""

from typing import Any, Literal

from openai import OpenAI
from pydantic import BaseModel
from reporting import BASE_URL, KEY, WEATHER

client = OpenAI(base_url=BASE_URL, api_key=KEY)
HELLO: list[Any] = [{"role": "user", "content": "Say hello."}]
ASK_WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
FUNCTION: dict[str, Any] = {"type": "function", **WEATHER["function"]}


class Verdict(BaseModel):
    mood: Literal["good", "bad"]
    sure: bool
