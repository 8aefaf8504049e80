"""Models fetched from a small Hub on loopback that misbehaves: what arrives is right, or nothing does."""

import errno
import hashlib
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from nightmill.jobs.errors import ModelFetchError
from nightmill.worker.model.hub import transfer
from nightmill.worker.model.hub.cached import cached_models
from nightmill.worker.model.hub.fetch import fetch
from nightmill.worker.model.hub.transfer import Progress
from tests.support.servers import wait_until
from tests.support.small_hub import COMMIT, SmallHub, serving

NAME = "hf:owner/repo:q8_0"
FILE = "model-Q8_0.gguf"


def get(name: str = NAME) -> Path:
    """Fetch a model of one file."""
    (path,) = fetch(name, lambda progress: None).files
    return path


def failing(name: str = NAME) -> str:
    """Fetch in vain; returns what is said."""
    with pytest.raises(ModelFetchError) as told:
        get(name)
    assert "\n" not in str(told.value)
    return str(told.value)


def content(hub: SmallHub, file: str = FILE) -> bytes:
    return hub.repos["owner/repo"][file]


def incomplete(cache: Path) -> list[Path]:
    return list(cache.rglob("*.incomplete"))


def test_a_model_lands_in_the_hubs_cache_and_is_asked_for_once(hub: SmallHub, cache: Path) -> None:
    path = get()
    assert path == cache / "models--owner--repo" / "snapshots" / COMMIT / FILE
    assert path.read_bytes() == content(hub)
    assert path.resolve().name == hashlib.sha256(content(hub)).hexdigest()
    assert get() == path
    assert len(hub.contents()) == 1
    assert not incomplete(cache)


def test_progress_is_told(hub: SmallHub) -> None:
    told: list[Progress] = []
    fetch("hf:owner/repo", told.append)
    assert told[0].note == "asking the Hub"
    assert told[-1] == Progress("owner/repo/model-Q4_K_M.gguf", 10240, 10240, "checking its sha256")
    done = [progress.done for progress in told]
    assert done == sorted(done) and len(done) > 10


def test_the_content_may_be_on_another_server_which_never_sees_the_token(
    hub: SmallHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    hub.token = "secret"
    with serving(SmallHub()) as store:
        hub.redirects_to = store
        assert get().read_bytes() == content(hub)
        assert [request.token for request in store.contents()] == [None]


@pytest.mark.parametrize("ignores_ranges", [False, True])
def test_a_connection_that_is_cut_is_taken_up_again(hub: SmallHub, ignores_ranges: bool) -> None:
    hub.cuts = [3000, 2000, 0, 0, 0]
    hub.ignores_ranges = ignores_ranges
    assert get().read_bytes() == content(hub)
    ranges = [request.range for request in hub.contents()]
    assert ranges[:2] == [None, "bytes=3000-"]
    assert len(ranges) == 6


def test_what_one_process_has_begun_the_next_one_finishes(hub: SmallHub, cache: Path) -> None:
    hub.cuts = [4000] + [0] * 10
    said = failing()
    assert "cannot be reached" in said
    (partial,) = incomplete(cache)
    assert partial.stat().st_size == 4000
    hub.cuts = []
    assert get().read_bytes() == content(hub)
    assert hub.contents()[-1].range == "bytes=4000-"


def test_a_partial_file_that_is_too_long_begins_anew(hub: SmallHub, cache: Path) -> None:
    hub.cuts = [4000] + [0] * 10
    failing()
    (partial,) = incomplete(cache)
    partial.write_bytes(b"x" * 20000)
    hub.cuts = []
    assert get().read_bytes() == content(hub)


def test_content_of_another_digest_is_never_used(hub: SmallHub, cache: Path) -> None:
    hub.digests[FILE] = "0" * 64
    found = hashlib.sha256(content(hub)).hexdigest()
    told = failing()
    assert told.startswith(f"owner/repo/{FILE} is damaged: its sha256 is {found}, and should be {'0' * 64}. ")
    assert told.endswith("It was removed: try again")
    assert not incomplete(cache)
    assert not list(cache.rglob("*.gguf"))


def test_a_partial_file_that_was_damaged_is_found_out(hub: SmallHub, cache: Path) -> None:
    hub.cuts = [4000] + [0] * 10
    failing()
    (partial,) = incomplete(cache)
    partial.write_bytes(b"x" * 4000)
    hub.cuts = []
    assert "is damaged" in failing()
    assert get().read_bytes() == content(hub)


@pytest.mark.parametrize(
    ("status", "headers", "token", "said"),
    [
        (
            401,
            {},
            None,
            "has no owner/repo (401); look at the spelling. Or it is private: for that, set HF_TOKEN",
        ),
        (
            401,
            {"X-Error-Message": "Invalid credentials in Authorization header"},
            "bad",
            "does not accept the token",
        ),
        (403, {"X-Error-Code": "GatedRepo"}, None, "it is gated (403): accept its terms at"),
        (403, {}, "weak", "forbids it (403): the token in HF_TOKEN lacks the permission"),
        (404, {"X-Error-Code": "RepoNotFound"}, None, "has no owner/repo (404); look at the spelling"),
        (
            429,
            {"Retry-After": "7"},
            None,
            "(429): try again in 7 s; with HF_TOKEN set, more requests are allowed",
        ),
        (500, {}, None, "has trouble of its own (500): try again later"),
        (418, {}, None, "refuses it (418)"),
    ],
)
def test_a_refusal_says_what_to_do(
    hub: SmallHub,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    headers: dict[str, str],
    token: str | None,
    said: str,
) -> None:
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    hub.refuses["/api/models/owner/repo"] = (status, headers)
    told = failing()
    assert told.startswith("hf:owner/repo:q8_0: ") and said in told


def test_a_server_that_is_busy_is_asked_again(hub: SmallHub) -> None:
    with serving(SmallHub(refuses={"/blobs/": (429, {"Retry-After": "0"})}, refusals=3)) as store:
        hub.redirects_to = store
        assert get().read_bytes() == content(hub)
        assert len(store.contents()) == 4


def test_a_server_that_stays_busy_is_named(hub: SmallHub) -> None:
    with serving(SmallHub(refuses={"/blobs/": (503, {"Retry-After": "0"})})) as store:
        hub.redirects_to = store
        assert "has trouble of its own (503)" in failing()


def test_what_is_not_there_is_told_with_what_is(hub: SmallHub) -> None:
    assert failing("hf:owner/repo:Q5_0") == "owner/repo has no Q5_0; there are Q8_0, Q4_K_M"


def test_without_a_network_the_cache_does(hub: SmallHub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = get()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert get() == path
    assert get("hf:owner/repo") == path  # the only one there is
    assert failing("hf:owner/repo:Q4_K_M") == "owner/repo has no Q4_K_M; there is Q8_0"
    assert "HF_HUB_OFFLINE forbids" in failing("hf:other/repo")


def test_a_hub_that_fails_leaves_what_is_in_the_cache(hub: SmallHub) -> None:
    path = get()
    for part in ("/api/", "/resolve/"):
        hub.refuses = {part: (503, {})}
        found = fetch(NAME, lambda progress: None)
        assert found.files == (path,)
        assert "(503)" in found.note and found.note.endswith("The copy in the cache is used")
    assert "(503)" in failing("hf:owner/repo")  # which is known to mean a file that is not here


def test_a_hub_that_is_not_there_is_named(hub: SmallHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert "http://127.0.0.1:1 cannot be reached" in failing()


def test_a_hub_cannot_choose_where_a_file_goes(hub: SmallHub, cache: Path) -> None:
    hub.digests[FILE] = "../../../outside"
    assert "does not answer as a Hub does" in failing()
    assert not list(cache.parent.rglob("*outside*"))


def test_what_is_no_hub_is_named(hub: SmallHub) -> None:
    hub.refuses["/api/"] = (200, {"Content-Type": "text/html"})
    assert "does not answer as a Hub does" in failing()


def test_a_second_process_waits_for_the_firsts_download(hub: SmallHub) -> None:
    hub.hold = threading.Event()
    found: list[Path] = []
    first = threading.Thread(target=lambda: found.append(get()))
    first.start()
    wait_until(hub.contents)
    told: list[Progress] = []
    second = threading.Thread(target=lambda: found.extend(fetch(NAME, told.append).files))
    second.start()
    wait_until(lambda: any(progress.note == "another process is fetching it" for progress in told))
    hub.hold.set()
    first.join()
    second.join()
    assert found[0] == found[1]
    assert len(hub.contents()) == 1


def test_a_full_disk_is_told_before_and_while_it_fills(
    hub: SmallHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(transfer, "_stream", full)
        assert failing().startswith(f"the disk is full: owner/repo/{FILE} needs 0.0 GB, and {cache}")
    with monkeypatch.context() as patch:
        patch.setattr(transfer, "_check_space", full)
        assert "set HF_HOME to a directory on a larger disk" in failing()
    assert not hub.contents()


def test_a_model_of_many_parts_must_fit_as_a_whole_before_the_first_is_fetched(
    hub: SmallHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {f"big-Q6_K-0000{part}-of-00003.gguf": bytes([part]) * 10_000_000 for part in (1, 2, 3)}
    hub.repos["owner/repo"] |= parts

    def room(free: int) -> None:
        monkeypatch.setattr(transfer.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))

    room(29_999_999)
    said = failing("hf:owner/repo:q6_k")
    assert said.startswith(f"the disk is full: hf:owner/repo:q6_k needs 0.0 GB, and {cache.parent} has 0.0")
    assert not hub.contents()
    room(30_000_000)
    hub.cuts = [10_000_000, 5_000_000] + [0] * 10
    assert "cannot be reached" in failing("hf:owner/repo:q6_k")
    hub.cuts = []
    room(14_999_999)  # one part is here, and half of the second
    assert "the disk is full" in failing("hf:owner/repo:q6_k")
    room(15_000_000)
    assert len(fetch("hf:owner/repo:q6_k", lambda progress: None).files) == 3


def test_a_cache_that_cannot_be_written_is_named(hub: SmallHub, cache: Path) -> None:
    cache.write_text("in the way")
    assert "set HF_HOME" in failing().replace("Set", "set")


def test_a_split_model_is_fetched_whole(hub: SmallHub) -> None:
    parts = {f"big-Q6_K-0000{part}-of-00002.gguf": bytes([part]) * 5000 for part in (1, 2)}
    hub.repos["owner/repo"] |= parts
    files = fetch("hf:owner/repo:q6_k", lambda progress: None).files
    assert [file.name for file in files] == list(parts)
    assert [file.read_bytes() for file in files] == list(parts.values())


def test_a_url_on_the_hub_is_a_name_on_the_hub(hub: SmallHub) -> None:
    path = get(f"{hub.url}/owner/repo/resolve/{COMMIT}/{FILE}?download=true")
    assert get(f"{hub.url}/owner/repo/blob/main/{FILE}") == path
    assert get() == path
    assert len(hub.contents()) == 1


@pytest.mark.parametrize("ignores_ranges", [False, True])
def test_a_url_is_fetched_once_and_taken_up_again(hub: SmallHub, ignores_ranges: bool) -> None:
    hub.files["/models/other.gguf"] = content(hub)
    hub.ignores_ranges = ignores_ranges
    url = f"{hub.url.replace('127.0.0.1', 'localhost')}/models/other.gguf?token=1"
    hub.cuts = [3000] + [0] * 10
    assert "token" not in failing(url)
    hub.cuts = []
    path = get(url)
    assert path.name == "other.gguf" and path.read_bytes() == content(hub)
    assert ignores_ranges or hub.contents()[-1].range == "bytes=3000-"
    asked = len(hub.asked)
    assert get(url) == path
    assert len(hub.asked) == asked
    assert "no such file (404)" in failing(f"{hub.url}/models/none.gguf")


def test_a_url_never_gets_the_token(hub: SmallHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    hub.files["/models/other.gguf"] = b"content"
    get(f"{hub.url.replace('127.0.0.1', 'localhost')}/models/other.gguf")
    assert {request.token for request in hub.asked} == {None}


def test_the_cache_lists_models_by_the_names_that_find_them(hub: SmallHub) -> None:
    hub.repos["owner/repo"] |= {"plain.gguf": b"1", "sub/model-Q8_0.gguf": b"22"}
    names = ["hf:owner/repo:Q8_0", "hf:owner/repo/plain.gguf", "hf:owner/repo/sub/model-Q8_0.gguf"]
    paths = {name: get(name) for name in names}
    found = {model.name: model for model in cached_models()}
    assert {name: model.files for name, model in found.items()} == {
        name: (path,) for name, path in paths.items()
    }
    assert found["hf:owner/repo/sub/model-Q8_0.gguf"].size == 2


def test_a_split_model_is_listed_once_all_of_it_is_here(hub: SmallHub) -> None:
    parts = [f"model-Q6_K-0000{part}-of-00002.gguf" for part in (1, 2)]
    hub.repos["owner/repo"] |= dict.fromkeys(parts, b"content")
    _, second = fetch("hf:owner/repo:Q6_K", lambda progress: None).files
    get()
    assert [model.name for model in cached_models()] == ["hf:owner/repo:Q6_K", "hf:owner/repo:Q8_0"]
    second.unlink()
    assert [model.name for model in cached_models()] == ["hf:owner/repo:Q8_0"]
