"""Model files with something wrong: in the structure of the format, in what the keys say, in single bytes."""

import copy
import random
import struct
from collections.abc import Callable

from tests.campaign.gguf_document import ARRAY, FORMATS, STRING, Document, Entry, Items, Tensor
from tests.campaign.strange_templates import CORPUS

Draw = random.Random
NUMBERS = (0, 1, 2, 3, 7, 31, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63, 2**64 - 1)
REALS = (0.0, -1.0, 1e-320, 1e38, float("inf"), float("-inf"), float("nan"))
TOKENS = b"tokenizer.ggml.tokens"


def mutant(base: Document, draw: Draw) -> bytes:
    """One wrong file: one to three mutations of the document, at times of its bytes too."""
    document = copy.copy(base)
    document.entries = [copy.copy(entry) for entry in base.entries]
    document.tensors = [Tensor(t.name, list(t.dims), t.kind, t.offset) for t in base.tensors]
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
        draw.choice(STRUCTURAL)(document, draw)
    data = document.encode()
    if draw.random() < 0.35:
        data = _bytes(data, len(document.header()), draw)
    return data


def _some(document: Document, draw: Draw) -> Entry:
    return draw.choice(document.entries)


def _array(document: Document, draw: Draw) -> Entry:
    """An array, replaced by a copy of its own that may be changed."""
    arrays = [entry for entry in document.entries if isinstance(entry.value, Items)]
    entry = draw.choice(arrays) if arrays else _some(document, draw)
    if not isinstance(entry.value, Items):
        entry.kind, entry.value = ARRAY, Items(4, [1, 2, 3])
    entry.value = Items(entry.value.kind, list(entry.value.values), entry.value.count)
    return entry


def counts(document: Document, draw: Draw) -> None:
    """The header lies about how much follows."""
    number = draw.choice(NUMBERS) if draw.random() < 0.5 else len(document.entries) + draw.choice((-1, 1))
    if draw.random() < 0.5:
        document.entry_count = number
    else:
        document.tensor_count = number


def heading(document: Document, draw: Draw) -> None:
    """Another magic or version."""
    if draw.random() < 0.3:
        document.magic = draw.choice((b"GGML", b"FUGG", b"\0\0\0\0", b"<htm"))
    else:
        document.version = draw.choice((0, 1, 2, 4, 2**24 * 3, 2**32 - 1))


def tag(document: Document, draw: Draw) -> None:
    """A value under another type."""
    _some(document, draw).kind = draw.choice((*range(14), 99, 2**31, 2**32 - 1))


def lengths(document: Document, draw: Draw) -> None:
    """A string that claims to be longer than the file."""
    entry = _some(document, draw)
    entry.kind, entry.raw = STRING, struct.pack("<Q", draw.choice(NUMBERS)) + b"short"


def array_count(document: Document, draw: Draw) -> None:
    """An array that claims more, or fewer, items."""
    entry = _array(document, draw)
    entry.value.count = max(0, draw.choice((*NUMBERS, len(entry.value.values) + draw.choice((-1, 1)))))


def array_kind(document: Document, draw: Draw) -> None:
    """An array of other items; often empty."""
    entry = draw.choice((_some, _array))(document, draw)
    kind = draw.choice((*FORMATS, STRING, ARRAY, 77))
    value = b"x" if kind == STRING else Items(4, []) if kind == ARRAY else 1
    entry.kind, entry.value, entry.raw = ARRAY, Items(kind, [value] * draw.choice((0, 0, 1, 5))), None


def nested(document: Document, draw: Draw) -> None:
    """Arrays within arrays, deep or many."""
    inner = Items(draw.choice((0, 4, STRING, ARRAY)), [])
    for _ in range(draw.choice((1, 2, 3, 5, 40))):
        inner = Items(ARRAY, [inner] * draw.choice((1, 1, 2)))
    if draw.random() < 0.1:
        inner = Items(ARRAY, [Items(0, [])] * draw.choice((1000, 100_000)))
    key = draw.choice((b"strange", _some(document, draw).key))
    document.entries.append(Entry(key, ARRAY, inner))


def twice(document: Document, draw: Draw) -> None:
    """A key or a tensor that is there twice."""
    if draw.random() < 0.5:
        document.entries.insert(draw.randrange(len(document.entries)), copy.copy(_some(document, draw)))
    elif document.tensors:
        document.tensors.append(copy.copy(draw.choice(document.tensors)))


def missing(document: Document, draw: Draw) -> None:
    """A key or a tensor that is not there."""
    if draw.random() < 0.6:
        document.entries.remove(_some(document, draw))
    elif document.tensors:
        document.tensors.remove(draw.choice(document.tensors))


def names(document: Document, draw: Draw) -> None:
    """Keys and tensors of strange names."""
    name = draw.choice((b"", b"\xff\xfe", b"x" * 70_000, b"\x1b[31m", b"a\0b", b"general.alignment"))
    if draw.random() < 0.5 or not document.tensors:
        _some(document, draw).key = name
    else:
        draw.choice(document.tensors).name = name


def scalar(document: Document, draw: Draw) -> None:
    """A number far from what it was."""
    entries = [entry for entry in document.entries if isinstance(entry.value, int | float)]
    if entries:
        entry = draw.choice(entries)
        entry.value = draw.choice(REALS) if entry.kind in (6, 12) else draw.choice(NUMBERS)


def text(document: Document, draw: Draw) -> None:
    """A string far from what it was."""
    entries = [entry for entry in document.entries if isinstance(entry.value, bytes)]
    if entries:
        strange = (
            b"",
            b"\xff",
            b"\0",
            b"x" * 100_000,
            "é\u202e".encode(),
            b"llama",
            b"gpt2",
            b"bert",
            b"yarn",
        )
        draw.choice(entries).value = draw.choice(strange)


def template(document: Document, draw: Draw) -> None:
    """A chat template that means no good."""
    if (entry := document.entry(b"tokenizer.chat_template")) is not None:
        entry.value = draw.choice((*(t.encode("utf-8", "replace") for t in CORPUS), b"{% if", b"{{" * 5000))


def alignment(document: Document, draw: Draw) -> None:
    """general.alignment of any kind."""
    number = draw.choice((0, 1, 3, 8, 24, 64, 2**20, 2**31, 2**32 - 1))
    document.entries.insert(0, Entry(b"general.alignment", draw.choice((4, 4, 5, 10, STRING)), number))
    document.entries[0].value = str(number).encode() if document.entries[0].kind == STRING else number


def shape(document: Document, draw: Draw) -> None:
    """A tensor of another shape, type or place."""
    if not document.tensors:
        return
    tensor = draw.choice(document.tensors)
    match draw.randrange(4):
        case 0:
            tensor.dims = [draw.choice((*NUMBERS, 32)) for _ in range(draw.choice((0, 1, 2, 3, 4, 5, 9)))]
        case 1:
            tensor.kind = draw.choice((*range(40), 255, 2**31))
        case 2:
            tensor.offset = draw.choice((*NUMBERS, tensor.offset + 1, tensor.offset + 32))
        case 3 if tensor.dims:
            tensor.dims[draw.randrange(len(tensor.dims))] = draw.choice(NUMBERS)


def vocabulary(document: Document, draw: Draw) -> None:
    """Tokens, types, scores and merges that do not fit together, or are many, long or alike."""
    entry = document.entry(TOKENS)
    if entry is None or not isinstance(entry.value, Items):
        return
    tokens = list(entry.value.values)
    place = draw.randrange(max(1, len(tokens)))
    match draw.randrange(9):
        case 0:
            tokens = tokens[:place]
        case 1:
            tokens.extend(tokens[:place])
        case 2:
            tokens[place:place] = [draw.choice((b"", b"\xff", b"\0", b" ", b"<|im_end|>", b"<0xZZ>"))]
        case 3:
            tokens[-1:] = [b"<" + b"q" * draw.choice((5000, 60_000)) + b">"]
        case 4:
            tokens = [b"a" * (1 + n) for n in range(min(len(tokens), draw.choice((64, 1024))))]
        case 5:
            tokens = [b"same"] * len(tokens)
        case 6:
            _numbers(document, b"tokenizer.ggml.token_type", [draw.randrange(-2, 9) for _ in tokens])
        case 7:
            _numbers(document, b"tokenizer.ggml.scores", [draw.choice(REALS) for _ in tokens])
        case 8 if (merges := document.entry(b"tokenizer.ggml.merges")) is not None:
            strange = (b"", b" ", b"a", b"a b c", b"  ", b"zz qq", b"a" * 9000 + b" b")
            merges.value = Items(STRING, [draw.choice(strange) for _ in range(20)])
    entry.value = Items(STRING, tokens)


def _numbers(document: Document, key: bytes, values: list[float]) -> None:
    entry = document.entry(key)
    if entry is not None:
        entry.value = (
            Items(6 if isinstance(values[0], float) else 5, list(values)) if values else Items(5, [])
        )


STRUCTURAL: tuple[Callable[[Document, Draw], None], ...] = (
    counts, heading, tag, lengths, array_count, array_kind, array_kind, nested, twice, missing, missing,
    names, scalar, scalar, scalar, text, text, template, alignment, shape, shape,
    vocabulary, vocabulary, vocabulary,
)  # fmt: skip


def _bytes(data: bytes, header: int, draw: Draw) -> bytes:
    """Bytes of the header that were damaged, lost or added; or the file ends early."""
    broken = bytearray(data)
    if draw.random() < 0.3:
        return bytes(broken[: draw.randrange(len(broken) if draw.random() < 0.3 else header)])
    for _ in range(draw.choice((1, 1, 2, 8, 64))):
        place = draw.randrange(min(header, len(broken)))
        match draw.randrange(4):
            case 0:
                broken[place] = draw.randrange(256)
            case 1:
                broken[place] ^= 1 << draw.randrange(8)
            case 2:
                del broken[place : place + draw.choice((1, 4, 8))]
            case 3:
                broken[place:place] = draw.randbytes(draw.choice((1, 4, 8)))
    return bytes(broken)
