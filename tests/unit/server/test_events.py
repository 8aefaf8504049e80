"""Items of several sources in one stream: as they come, and not before all have begun."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from nightmill.jobs.server.errors import HttpError
from nightmill.jobs.server.events import begun, merged, together

LONG = 60.0


class Source:
    """Gives what it is fed; knows whether it has been let go."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[str | Exception | None] = asyncio.Queue()
        self.left = False

    async def items(self) -> AsyncIterator[str]:
        try:
            while (item := await self.queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.left = True


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_merged_sources_come_as_they_are_fed_and_end_with_the_last() -> None:
    async def program() -> list[tuple[int, str]]:
        one, other = Source(), Source()
        found: list[tuple[int, str]] = []

        async def read() -> None:
            found.extend([item async for item in merged([one.items(), other.items()])])

        reading = asyncio.ensure_future(read())
        for source, item in ((one, "a"), (other, "b"), (one, "c"), (one, None), (other, "d"), (other, None)):
            await source.queue.put(item)
            await settled()
        await reading
        assert one.left and other.left
        return found

    assert asyncio.run(program()) == [(0, "a"), (1, "b"), (0, "c"), (1, "d")]


def test_what_one_source_raises_ends_the_others() -> None:
    async def program() -> None:
        one, other = Source(), Source()
        items = merged([one.items(), other.items()])
        await one.queue.put("a")
        assert await anext(items) == (0, "a")
        await other.queue.put(ValueError("broken"))
        with pytest.raises(ValueError, match="broken"):
            await anext(items)
        await settled()
        assert one.left and other.left

    asyncio.run(program())


def test_sources_are_let_go_if_their_reader_is_cancelled() -> None:
    async def program() -> None:
        sources = [Source(), Source()]
        items = merged([source.items() for source in sources])
        reading = asyncio.ensure_future(anext(items))
        await settled()
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
        await settled()
        assert all(source.left for source in sources)

    asyncio.run(program())


def test_first_items_are_held_until_each_source_has_one() -> None:
    async def program() -> None:
        one, other = Source(), Source()
        items = together(merged([one.items(), other.items()]), 2, LONG)
        reading = asyncio.ensure_future(anext(items))
        for item in ("a", "b"):
            await one.queue.put(item)
        await settled()
        assert not reading.done()
        await other.queue.put("c")
        assert [await reading, await anext(items), await anext(items)] == [(0, "a"), (0, "b"), (1, "c")]
        await one.queue.put("d")
        assert await anext(items) == (0, "d")
        await items.aclose()  # type: ignore[attr-defined]

    asyncio.run(program())


def test_items_are_not_held_for_a_source_that_is_late() -> None:
    async def program() -> None:
        one, other = Source(), Source()
        items = together(merged([one.items(), other.items()]), 2, 0.01)
        await one.queue.put("a")
        assert await anext(items) == (0, "a")
        await one.queue.put("b")
        assert await anext(items) == (0, "b")
        await items.aclose()  # type: ignore[attr-defined]

    asyncio.run(program())


def test_what_goes_wrong_before_the_first_event_is_raised_and_later_it_is_an_event() -> None:
    async def program() -> None:
        source, refusal = Source(), HttpError(400, "too long", param="prompt")
        await source.queue.put(refusal)
        with pytest.raises(HttpError) as caught:
            await begun(source.items())
        assert caught.value is refusal
        source = Source()
        for item in ("one", "two", refusal):
            await source.queue.put(item)
        *events, last = [one async for one in await begun(source.items())]
        assert events == ["one", "two"]
        assert '"message": "too long"' in last and last.startswith("data: ")
        source = Source()
        await source.queue.put(None)
        assert [one async for one in await begun(source.items())] == []

    asyncio.run(program())
