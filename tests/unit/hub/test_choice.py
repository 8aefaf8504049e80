"""Names of models, and which files they mean."""

import pytest

from nightmill.jobs.errors import ModelFetchError
from nightmill.worker.model.hub.choice import choose, is_model, quant_of
from nightmill.worker.model.hub.names import FileUrl, HubName, parse_name

FILES = [
    "README.md",
    "imatrix.gguf",
    "mmproj-model-f16.gguf",
    "model-BF16.gguf",
    "model-IQ4_XS.gguf",
    "model-Q4_0.gguf",
    "model-Q4_K_M.gguf",
    "model-UD-Q4_K_XL.gguf",
    "model-Q8_0-00001-of-00003.gguf",
    "model-Q8_0-00002-of-00003.gguf",
    "model-Q8_0-00003-of-00003.gguf",
]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hf:o/r", HubName("o/r")),
        ("hf:o/r-1.5_B:q4_k_m", HubName("o/r-1.5_B", "q4_k_m")),
        ("hf:o/r/sub/f.gguf", HubName("o/r", file="sub/f.gguf")),
        ("https://huggingface.co/o/r", HubName("o/r")),
        ("https://huggingface.co/o/r/blob/main/f.gguf", HubName("o/r", file="f.gguf")),
        (
            "https://huggingface.co/o/r/resolve/v1/a/f.gguf?download=true",
            HubName("o/r", file="a/f.gguf", revision="v1"),
        ),
        (
            "https://example.org/o/r/resolve/main/f.gguf",
            FileUrl("https://example.org/o/r/resolve/main/f.gguf"),
        ),
    ],
)
def test_a_name_is_read(text: str, name: object) -> None:
    assert parse_name(text, {"huggingface.co"}) == name


@pytest.mark.parametrize(
    "text", ["hf:", "hf:repo", "hf:o/r:", "hf:o/r/f.bin", "hf:o/../f.gguf", "hf:o/r/../f.gguf", "https://"]
)
def test_what_names_nothing_is_refused_with_what_would(text: str) -> None:
    with pytest.raises(ModelFetchError, match="write hf:OWNER/REPO"):
        parse_name(text, {"huggingface.co"})


def test_a_url_is_shown_and_kept_without_its_secrets() -> None:
    name = parse_name("https://me:secret@example.org/models/My%20model.gguf?token=secret", ())
    assert isinstance(name, FileUrl)
    assert str(name) == "https://example.org/models/My%20model.gguf"
    assert name.file == "My-model.gguf"


@pytest.mark.parametrize(
    ("quant", "file"),
    [
        (None, "model-Q4_K_M.gguf"),
        ("q4_0", "model-Q4_0.gguf"),
        ("IQ4_XS", "model-IQ4_XS.gguf"),
        ("ud-q4_k_xl", "model-UD-Q4_K_XL.gguf"),
        ("bf16", "model-BF16.gguf"),
    ],
)
def test_the_quantisation_chooses_the_file_whatever_its_case(quant: str | None, file: str) -> None:
    assert choose(HubName("o/r", quant), FILES) == (file,)


@pytest.mark.parametrize(
    ("files", "file"),
    [
        (["a-Q8_0.gguf", "a-IQ4_XS.gguf", "a-Q4_K_S.gguf", "a-Q4_0.gguf"], "a-Q4_K_S.gguf"),
        (["mmproj-Q4_K_M.gguf", "a-Q8_0.gguf", "a-Q6_K.gguf"], "a-Q8_0.gguf"),
        (["a.gguf"], "a.gguf"),
        (["Q8_0/a.gguf", "q4_k_m/a.gguf"], "q4_k_m/a.gguf"),
    ],
)
def test_without_one_it_is_q4_k_m_then_another_q4_then_the_first(files: list[str], file: str) -> None:
    assert choose(HubName("o/r"), files) == (file,)


def test_a_split_model_is_all_of_its_parts() -> None:
    parts = tuple(FILES[-3:])
    assert choose(HubName("o/r", "q8_0"), FILES) == parts
    assert choose(HubName("o/r", file=parts[1]), FILES) == parts
    with pytest.raises(
        ModelFetchError, match=r"one of 3 parts.*1 are missing: model-Q8_0-00002-of-00003.gguf"
    ):
        choose(HubName("o/r", "q8_0"), [file for file in FILES if "00002" not in file])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (HubName("o/r", "Q5_0"), "o/r has no Q5_0; there are BF16, IQ4_XS, Q4_0, Q4_K_M, UD-Q4_K_XL, Q8_0"),
        (HubName("o/r", "Q4_K"), "o/r has no Q4_K; there are"),
        (
            HubName("o/r", file="x.gguf"),
            "o/r has no file x.gguf; there are model-BF16.gguf, model-IQ4_XS.gguf",
        ),
    ],
)
def test_what_is_not_there_is_told_with_what_is(name: HubName, said: str) -> None:
    with pytest.raises(ModelFetchError) as told:
        choose(name, FILES)
    assert str(told.value).startswith(said)


def test_a_repository_without_a_model_says_so() -> None:
    with pytest.raises(ModelFetchError, match="no GGUF file"):
        choose(HubName("o/r"), ["README.md", "model.safetensors", "mmproj.gguf"])


def test_what_a_file_is_called_says_what_it_is() -> None:
    assert [file for file in FILES if is_model(file)] == FILES[3:9]
    names = ["a-Q4_K_M.gguf", "a.f16.gguf", "a-Q8_0-00001-of-00002.gguf", "Qwen3.gguf", "smollm2-135M.gguf"]
    assert [quant_of(name) for name in names] == ["Q4_K_M", "F16", "Q8_0", None, None]
