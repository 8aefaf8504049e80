"""`nightmill check --model`: what it says of a file, and how much of it fits a GPU."""

import bisect
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGMLQuantizationType, TokenType

from nightmill.jobs.base.contract import CallFormat
from nightmill.jobs.base.settings import Settings
from nightmill.jobs.commands.main import main
from nightmill.jobs.errors import RunnerError
from nightmill.jobs.messages.embedded import EmbeddedRedis
from nightmill.worker.assembly.forecast import CARDS, Card, forecast
from nightmill.worker.assembly.model import demo_model
from nightmill.worker.assembly.options import KV, WEIGHTS
from nightmill.worker.commands.inspection import Shown, quantisation_of, shares
from nightmill.worker.model.families import read_spec
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.spec import ModelSpec
from nightmill.worker.runners.gpu.catalogue import workspace_bytes
from nightmill.worker.runners.gpu.device.known_cards import KNOWN_CARDS
from nightmill.worker.runners.gpu.device.peaks import peaks_of
from nightmill.worker.runners.gpu.kv_cache import page_bytes
from nightmill.worker.runners.gpu.precision import HALF
from tests.support.ggufs import CHATML, byte_vocabulary, write_model
from tests.unit.runners.recorded_cuda import RecordedDriver

pytestmark = pytest.mark.heavy  # each opens a model, with a process for its template

Values = dict[str, Any]
H200 = peaks_of((9, 0), 132, clock_khz=1_980_000, memory_khz=3_201_000, bus_bits=6144)
LARGE = Card("large", 76 << 30, 132, H200, hopper=True)
SMALL = Card("small", 200 << 20, 132, H200, hopper=True)
"""So small that steps have as few tokens as they may."""


def check(path: Path, directory: Path, *options: str) -> dict[str, list[Values]]:
    """The findings, by their parts."""
    env = {"NIGHTMILL_DATA_DIR": str(directory)}
    command = ["check", str(path), "--json", *(options or ["--no-generate"])]
    done = CliRunner().invoke(main, command, env=env)
    assert done.exit_code == 0, done.output
    found: dict[str, list[Values]] = {}
    for finding in json.loads(done.stdout):
        found.setdefault(finding["part"], []).append(finding)
    return found


@pytest.fixture
def spec() -> ModelSpec:
    with GgufFile.open(demo_model()) as file:
        return read_spec(file)


def test_a_file_is_told_apart_from_others(tmp_path: Path, directory: Path) -> None:
    path = write_model(tmp_path / "m.gguf", kind=GGMLQuantizationType.Q8_0, tied=False)
    found = check(path, directory)
    (model,) = found["model"]
    with GgufFile.open(path) as file:
        numbers = sum(math.prod(info.shape) for info in file.tensors.values())
    assert (model["ok"], model["family"], model["parameters"]) == (True, "qwen2", numbers)
    assert (model["files"], model["size"], model["context"]) == ([str(path)], path.stat().st_size, 512)
    assert list(model["quantisation"]) == ["Q8_0", "F32"] and sum(model["quantisation"].values()) == 1
    assert sorted(model["ends"].values()) == ["<|endoftext|>", "<|im_end|>"]
    assert model["chat"] == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert "2 layers of width 64, FFN 160, 4 heads on 2 KV heads of 16" in model["found"]
    assert "in 1 file: Q8_0 " in found["file"][0]["found"]
    assert "tokenizer gpt2 qwen2" in found["text"][0]["found"]
    for token, text in model["ends"].items():
        assert f"{text} ({token})" in found["text"][0]["found"]


def test_a_split_model_is_shown_as_one(tmp_path: Path, directory: Path) -> None:
    whole = check(write_model(tmp_path / "whole.gguf"), directory)["model"][0]
    first = write_model(tmp_path / "m.gguf", split=9)
    found = check(first, directory)
    model = found["model"][0]
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert model["files"] == list(map(str, parts)) and len(parts) > 2
    assert model["size"] == sum(part.stat().st_size for part in parts)
    assert model["found"] == whole["found"].replace("whole: ", "m: ")
    assert f" in {len(parts)} parts: F32 100%" in found["file"][0]["found"]


def test_a_model_without_a_template_takes_plain_prompts(tmp_path: Path, directory: Path) -> None:
    found = check(write_model(tmp_path / "m.gguf", chat_template=None), directory)
    assert found["model"][0]["chat"] is None
    assert "has no chat template" in found["model"][0]["no_chat"]
    (chat,) = found["chat"]
    assert chat["ok"] is None and chat["found"].startswith("plain prompts only (")


def test_a_conversation_is_shown_as_the_model_sees_it(tmp_path: Path, directory: Path) -> None:
    """Special tokens have marks, and what only looks like one has none."""
    source = CHATML.replace("{% for", "<|turn|><|strange|>{% for", 1) + "<think>{# </think> #}"
    vocabulary = byte_vocabulary(extra=[("<|turn|>", TokenType.NORMAL)])
    found = check(write_model(tmp_path / "m.gguf", chat_template=source, vocabulary=vocabulary), directory)
    (prompt,) = found["prompt"]
    for turn in ("system\\nBe brief.", "user\\nHello", "assistant\\nGood evening."):
        assert f"‹<|im_start|>›{turn}‹<|im_end|>›" in prompt["found"]
    assert "sees it: <|turn|><|strange|>‹<|im_start|>›system" in prompt["found"]
    (tokens,) = found["tokens"]
    assert tokens["ok"] is None
    assert "writes <|turn|>, which the file types as ordinary text" in tokens["found"]
    assert "writes <|strange|>, which the vocabulary lacks" in tokens["found"]
    (thoughts,), (tools,) = found["thoughts"], found["tools"]
    assert thoughts["found"] == "between <think> and </think>, which the prompt opens"
    assert tools["ok"] is None and "serve the model with --tool-format json" in tools["found"]
    assert "roles" not in found and "sentence" not in found
    shown = found["model"][0]["shown"]
    assert (shown["calls"], shown["thoughts"], shown["opened"]) == (None, ["<think>", "</think>"], True)


def test_roles_that_the_template_refuses_and_calls_that_it_knows_are_said(
    tmp_path: Path, directory: Path
) -> None:
    source = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no orders') }}{% endif %}{{ tools }}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls %}"
        "<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    )
    found = check(write_model(tmp_path / "m.gguf", chat_template=source), directory)
    assert found["roles"][0]["found"].endswith(
        "system: the model's chat template refuses these messages: no orders"
    )
    assert found["tools"][0]["found"].endswith("(hermes)") and found["tools"][0]["ok"]
    assert '{"name": "weather", "arguments": {"place": "Rome"}}' in found["prompt"][0]["found"]
    assert "31 degrees" in found["prompt"][0]["found"]


def test_the_model_writes_a_sentence(tmp_path: Path, directory: Path) -> None:
    (sentence,) = check(demo_model(), directory, "--generate")["sentence"]
    assert sentence["ok"] and f"“{sentence['text'].strip()}”" in sentence["found"]
    plain = check(write_model(tmp_path / "m.gguf", chat_template=None), directory, "--generate")["sentence"]
    assert plain[0]["found"].startswith('goes on with "The sea is" by ')
    broken = write_model(tmp_path / "n.gguf", tensors={"output_norm.weight": np.full(64, np.nan, np.float32)})
    env = {"NIGHTMILL_DATA_DIR": str(directory)}
    done = CliRunner().invoke(main, ["check", "--model", str(broken)], env=env)
    assert done.exit_code == 1 and "FAIL model" in done.output and "--dtype bf16" in done.output


def test_a_file_and_a_model_are_one_too_many(directory: Path) -> None:
    done = CliRunner().invoke(main, ["check", "a.gguf", "--model", "b.gguf"])
    assert done.exit_code == 2 and "give one of them" in done.output


def test_an_embedded_redis_that_check_has_started_ends_with_it(directory: Path) -> None:
    server = EmbeddedRedis(directory)
    check(demo_model(), directory)
    assert not server.alive()
    server.ensure()
    try:
        check(demo_model(), directory)
        assert server.running()
    finally:
        server.stop()


def test_without_a_gpu_it_is_computed_for_cards_of_usual_sizes(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pycuda", None)
    assert "memory" not in check(demo_model(), directory)
    found = check(demo_model(), directory, "--cards")["memory"]
    assert [one["card"] for one in found] == [card.name for card in CARDS]
    assert all(one["found"].startswith(f"no GPU here; computed for {one['card']}, in F16 (") for one in found)
    assert all(one["computed"] for one in found)


def test_without_a_gpu_a_card_is_pretended(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fits, what it would be computed by, and what the forecast rests on; the sentence is NumPy's."""
    monkeypatch.setitem(sys.modules, "pycuda", None)
    for key in ("rtx4090", "h100"):
        card = KNOWN_CARDS[key]
        found = check(demo_model(), directory, "--pretend", key, "--weights", "file")
        (memory,), (kernels,), (basis,) = (found[part] for part in ("memory", "kernels", "basis"))
        assert memory["found"].startswith(f"no GPU here; computed for {card.name}, in F16 (")
        assert (memory["card"], memory["free"], memory["computed"]) == (card.name, card.free, True)
        assert ("wgmma" in kernels["found"]) is (key == "h100")
        assert ("mma.sync" in kernels["kernels"]["prompts"]) is (key != "h100")
        assert "Q8_0" in kernels["kernels"]["products"]
        assert f"{card.peaks.bytes / 1e9:,.0f} GB/s" in basis["found"] and "forecast" in basis["found"]
        steps = found["step"]
        assert [step["sequences"] for step in steps[:3]] == [1, 16, 64]
        assert "a step of 1 sequence of 512 tokens: 0.01 GB of weights" in steps[0]["found"]
        fp8 = next(one for one in found["formats"] if one["weights_in"] == "fp8")
        assert "cache_tokens" in fp8, "both multiply FP8"
        assert found["sentence"][0]["ok"]
    done = CliRunner().invoke(main, ["check", "--model", str(demo_model()), "--pretend", "rtx9090"])
    assert "no card is known as 'rtx9090'" in done.output and "rtx4090" in done.output


def test_a_forecast_says_that_it_knows_nothing_of_slow_kernels(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pycuda", None)
    said = {"prompts": "attention for heads of 512 without tensor cores, which is slow", "products": "tiles"}
    monkeypatch.setattr("nightmill.worker.runners.gpu.outlook.kernel_outlook", lambda *_, **__: said)
    (basis,) = check(demo_model(), directory, "--pretend", "rtx3090", "--no-generate")["basis"]
    assert "reaches; how slow kernels of prompts are is not in it; measure" in basis["found"]


def test_with_a_gpu_it_is_said_of_that_one(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RecordedDriver((9, 0)).install(monkeypatch)
    driver = sys.modules["pycuda.driver"]
    monkeypatch.setattr(driver, "mem_get_info", lambda: (3 << 30, 24 << 30))
    (found,) = check(demo_model(), directory)["memory"]
    assert (found["card"], found["free"], found["computed"]) == ("recorded", 3 << 30, False)
    assert "on recorded, 3.0 GiB free: 0.01 GiB of weights in 16 bits, " in found["found"]
    assert (found["dtype"], found["weights_in"], found["kv_in"]) == ("f16", "16bit", "16bit")
    assert f"; about {found['rate']:,} output tokens/s with these" in found["found"]
    monkeypatch.setattr(driver, "mem_get_info", lambda: (1 << 20, 24 << 30))
    (found,) = check(demo_model(), directory)["memory"]
    assert found["ok"] is None and "the model does not fit: weights" in found["found"]
    assert "cache_tokens" not in found


def test_what_other_formats_would_make_of_it_is_said(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RecordedDriver((9, 0)).install(monkeypatch)
    monkeypatch.setattr(sys.modules["pycuda.driver"], "mem_get_info", lambda: (1 << 30, 24 << 30))
    found = check(demo_model(), directory)
    asked = {"weights": Settings().weights, "kv": Settings().kv}
    others = [("weights", one) for one in WEIGHTS.choices] + [("kv", one) for one in KV.choices]
    others = [(option, value) for option, value in others if value != asked[option]]
    for (option, value), one in zip(others, found.get("formats", []), strict=True):
        assert one["found"].startswith(f"with --{option} {value}, on recorded: ")
        assert one[f"{option}_in"] == value
    eight = next(one for one in found["formats"] if one["kv_in"] == "fp8")
    assert eight["cache_tokens"] > 1.9 * found["memory"][0]["cache_tokens"]


def test_a_larger_share_is_named_if_whole_contexts_fit_only_so(
    spec: ModelSpec, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RecordedDriver((9, 0)).install(monkeypatch)
    monkeypatch.setenv("NIGHTMILL_MAX_SEQUENCES", "256")

    def fits(free: int) -> bool:
        room = forecast(spec, replace(LARGE, free=free << 20), Settings(max_sequences=256))
        return min(room.sequences.values()) == 256

    least = bisect.bisect_left(range(512, 8192), True, key=fits) + 512  # MiB
    for free, named in ((0.97 * least, True), (least, False), (0.9 * least, False)):
        held = int(free * (1 << 20))
        monkeypatch.setattr(sys.modules["pycuda.driver"], "mem_get_info", lambda held=held: (held, 24 << 30))
        found = [one["found"] for one in check(demo_model(), directory)["formats"]]
        assert any(one.startswith("with --gpu-memory 0.95, on recorded: ") for one in found) is named
    monkeypatch.setenv("NIGHTMILL_GPU_MEMORY", "0.95")
    monkeypatch.setattr(sys.modules["pycuda.driver"], "mem_get_info", lambda: (least << 19, 24 << 30))
    assert not any("gpu-memory" in one["found"] for one in check(demo_model(), directory)["formats"])


def test_what_a_worker_would_refuse_does_not_fit(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 weights on a GPU that does not multiply them, and a context longer than the model's."""
    RecordedDriver((8, 0)).install(monkeypatch)
    found = check(demo_model(), directory)
    (eight,) = (one for one in found["formats"] if one["weights_in"] == "fp8")
    assert "weights" not in eight and "need a GPU of compute capability 8.9" in eight["found"]
    monkeypatch.setenv("NIGHTMILL_CONTEXT", "1000000")
    (memory,) = check(demo_model(), directory)["memory"]
    assert "weights" not in memory and "--context 1000000 is more than the" in memory["found"]


def test_no_more_cache_is_counted_than_all_sequences_fill(spec: ModelSpec) -> None:
    found = forecast(spec, LARGE, Settings(max_sequences=16))
    assert found.cache_tokens == 16 * spec.context_length
    assert found.sequences == {spec.context_length: 16}


def test_a_small_gpu_takes_smaller_steps(spec: ModelSpec) -> None:
    large = forecast(spec, LARGE, Settings())
    small = forecast(spec, SMALL, Settings())
    assert small.workspace < large.workspace / 2


def test_block_tables_of_all_sequences_are_counted(spec: ModelSpec) -> None:
    """Each has a number of 4 bytes for every page of 16 tokens."""
    contexts = (512, 256)
    long, short = (
        forecast(spec, SMALL, Settings(max_sequences=1024, context=context)) for context in contexts
    )
    others = [
        workspace_bytes(
            spec,
            HALF,
            SMALL.multiprocessors,
            slots=1024,
            max_context=context,
            max_tokens=2048,
            max_draws=1024,
        )
        for context in contexts
    ]
    assert long.workspace - short.workspace - (others[0] - others[1]) == 4 * 1024 * 16


def test_memory_may_be_given_in_bytes(spec: ModelSpec) -> None:
    """Then what the card has beside it does not matter."""
    settings = Settings.model_validate({"gpu_memory": "300MiB"})
    found = forecast(spec, LARGE, settings)
    taken = found.weights + found.workspace + (found.cache_tokens // 16 + 1) * page_bytes(spec)
    assert 300 * 2**20 - page_bytes(spec) < taken <= 300 * 2**20


def test_sequences_fit_by_whole_pages(spec: ModelSpec) -> None:
    settings = Settings(context=100)  # 7 pages of 16
    small = forecast(spec, SMALL, settings)
    pages = 80
    needed = small.weights + small.workspace + (pages + 1) * page_bytes(spec)
    found = forecast(
        spec, Card("tight", int(needed / settings.gpu_memory) + 2, 132, H200, hopper=True), settings
    )
    assert found.cache_tokens == 16 * pages
    assert found.sequences == {100: pages // 7}
    with pytest.raises(RunnerError, match="the model does not fit"):
        forecast(spec, Card("none", 1 << 20, 132, H200, hopper=True), settings)


def test_shares_are_of_bytes() -> None:
    with GgufFile.open(demo_model()) as file:
        found = quantisation_of(file)
        kinds = {info.kind.name for info in file.tensors.values()}
    assert sum(found.values()) == pytest.approx(1) and found.keys() == kinds
    assert all(re.fullmatch(r"\w+ \d+%", share) for share in shares(found))
    assert shares({"Q4_K": 0.8, "Q6_K": 0.196, "F32": 0.004}) == ["Q4_K 80%", "Q6_K 20%"]


@pytest.mark.parametrize("calls", list(CallFormat))
def test_how_calls_are_written_is_told_of_each_format(calls: CallFormat) -> None:
    told = Shown("", {}, str(calls), None, opened=False, fault=None).lines()["tools"]
    assert told.startswith("called as ") and told.endswith(f" ({calls})") and "NAME" in told
