"""The cases of DSPy: the language model itself, and programs over signatures."""

from typing import Any, Literal

import dspy
from reporting import BASE_URL, KEY, MODEL, case, run_cases


class Judge(dspy.Signature):
    """Judge the mood of a text."""

    text: str = dspy.InputField()
    mood: Literal["good", "bad"] = dspy.OutputField()


# What a model of no public list can do, DSPy has to be told.
dspy.lm15.register_provider(
    dspy.lm15.ProviderDefinition.chat(
        dspy.lm15.AccessPolicy(provider="nightmill", base_url=BASE_URL), compat=dspy.lm15.OpenAIChatCompat()
    ),
    supports=dspy.lm15.ModelSupport(response_schema=True, function_calling=True),
)


def schema_model() -> dspy.LM:
    return dspy.LM(f"nightmill/{MODEL}", api_base=BASE_URL, api_key=KEY, cache=False, max_tokens=100)


# The seed: a model this small may end at once, and that a text is empty is no fault of the server.
def language_model(**more: Any) -> dspy.LM:
    return dspy.LM(f"openai/{MODEL}", api_base=BASE_URL, api_key=KEY, cache=False, seed=7, **more)


@case
def model_alone() -> None:
    assert language_model(max_tokens=8)("Say hello.")
    (answer,) = language_model(max_tokens=8)(messages=[{"role": "user", "content": "Say hello."}])
    assert answer


@case
def several_answers() -> None:
    assert len(language_model(max_tokens=8, temperature=1.0)("Say hello.", n=2)) == 2


@case
def text_completion() -> None:
    assert language_model(model_type="text", max_tokens=8)("Once upon a time")


def _responses_model() -> dspy.LM:
    return dspy.LM(
        f"openai/{MODEL}", model_type="responses", api_base=BASE_URL, api_key=KEY, cache=False, max_tokens=16
    )


@case
def responses() -> None:
    assert _responses_model()("Say hello.")


@case
def predict_by_schema() -> None:
    with dspy.context(lm=schema_model(), adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Judge)(text="I am glad.").mood in ("good", "bad")


@case
def predict_with_defaults() -> None:
    """The form is asked for in words, which a model this small need not follow; its answers are looked at."""
    model = language_model(max_tokens=100)
    with dspy.context(lm=model):
        try:
            assert dspy.Predict(Judge)(text="I am glad.").mood in ("good", "bad")
        except dspy.utils.exceptions.AdapterParseError:
            assert all(entry["outputs"] for entry in model.history)
    assert model.history


@case
def many_in_parallel() -> None:
    program = dspy.Predict(Judge)
    with dspy.context(lm=schema_model(), adapter=dspy.JSONAdapter()):
        examples = [dspy.Example(text=f"Day {day}").with_inputs("text") for day in range(4)]
        answers = program.batch(examples, num_threads=4, disable_progress_bar=True)
    assert all(answer.mood in ("good", "bad") for answer in answers)


@case
def usage_is_tracked() -> None:
    with dspy.context(lm=schema_model(), adapter=dspy.JSONAdapter(), track_usage=True):
        usage = dspy.Predict(Judge)(text="I am glad.").get_lm_usage()
    assert usage[f"nightmill/{MODEL}"]["total_tokens"] > 0


if __name__ == "__main__":
    run_cases()
