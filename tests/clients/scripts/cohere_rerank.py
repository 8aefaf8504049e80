"""The cases of Cohere's Python client, whose reranker is asked."""

import cohere
from reporting import KEY, MODEL, URL, case, run_cases

QUERY = "What grinds grain?"
DOCUMENTS = ["a mill by the river", "a mountain", "a mill by the river"]
client = cohere.ClientV2(api_key=KEY, base_url=URL)


@case
def rerank() -> None:
    answer = client.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS)
    scores = {one.index: one.relevance_score for one in answer.results}
    assert scores.keys() == {0, 1, 2} and scores[0] == scores[2] != scores[1]
    assert all(0 <= score <= 1 for score in scores.values())
    assert list(scores.values()) == sorted(scores.values(), reverse=True)


@case
def first_only() -> None:
    whole = client.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS)
    first = client.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS, top_n=1)
    assert first.results == whole.results[:1]


@case
def rerank_of_version_1_with_texts() -> None:
    older = cohere.Client(api_key=KEY, base_url=URL)
    answer = older.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS, return_documents=True)
    assert [one.document.text for one in answer.results] == [DOCUMENTS[one.index] for one in answer.results]


@case
async def rerank_async() -> None:
    async with cohere.AsyncClientV2(api_key=KEY, base_url=URL) as asking:
        answer = await asking.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS)
    assert answer.results == client.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS).results


@case
def errors_have_their_classes() -> None:
    try:
        client.rerank(model="no-such-model", query=QUERY, documents=DOCUMENTS)
    except cohere.NotFoundError as error:
        assert "no-such-model" in str(error.body)
    else:
        raise AssertionError("it was not refused")
    try:
        client.rerank(model=MODEL, query="", documents=DOCUMENTS)
    except cohere.BadRequestError as error:
        assert "query: must be a text" in str(error.body)
    else:
        raise AssertionError("it was not refused")


if __name__ == "__main__":
    run_cases()
