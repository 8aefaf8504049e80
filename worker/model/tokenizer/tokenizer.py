"""Text to token ids and back, exactly as the model was trained: a GGUF vocabulary on the `tokenizers` engine.

Special tokens are split off here, before the engine sees the text, and the engine does not even know them:
no text given with `special=False` can ever become a control token.
"""

import re
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Self

import tokenizers

from nightmill.jobs.errors import InvalidPromptError
from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer.engines import build_engine
from nightmill.worker.model.tokenizer.finding import matcher
from nightmill.worker.model.tokenizer.pre_tokenizers import UNIGRAM, WORD_PIECE, pre_tokenizer_of
from nightmill.worker.model.tokenizer.stream import TextStream
from nightmill.worker.model.tokenizer.vocabulary import SPACE, Vocabulary

_KEEP_SPACE = {"<unk>", "<s>", "<|endoftext|>"}
_SPACES = re.compile(r"\s+")
_SHORT, _MOST_KNOWN = 32, 4096  # characters of a text that is remembered, and texts

Piece = str | int  # ordinary text, or the id of a token that stands by itself


class Tokenizer:
    """One model's tokenizer. Immutable once built; safe to use from several threads."""

    bos_id: int | None
    eos_ids: frozenset[int]
    """The tokens that end an answer: declared in the metadata, or known by their text."""
    add_bos: bool
    """True if prompts of this model start with `bos_id`."""
    markers: dict[str, int]
    """The special tokens by text: never recognised in user content."""
    vocab_size: int
    """Tokens in the vocabulary; the embedding may have more rows."""

    def __init__(
        self, vocabulary: Vocabulary, engine: tokenizers.Tokenizer, *,
        add_bos: bool, space_prefix: bool, strips: bool, spells_spaces: bool = False,
    ) -> None:  # fmt: skip
        """Keep a vocabulary and its engine.

        space_prefix   a text begins with a space
        strips         markers swallow the white space after them
        spells_spaces  the engine itself turns spaces into U+2581, and begins a text with one
        """
        self.vocabulary = vocabulary
        self.bos_id = vocabulary.bos_id
        self.eos_ids = vocabulary.eos_ids
        self.vocab_size = len(vocabulary.tokens)
        self.add_bos = add_bos
        self.end_id: int | None = None
        """The token that texts to embed end with, if the file asks for one."""
        self._engine = engine
        self._space_prefix = space_prefix
        self._strips = strips
        self._as_it_is = vocabulary.byte_level or spells_spaces
        self.markers = vocabulary.markers()
        self._plain = vocabulary.plain()
        self._known: dict[str, Sequence[int]] = {}  # ids of short texts
        self._find_marker = matcher(self.markers)
        self._find_plain = matcher(self._plain)
        self._find_marked = matcher(self.markers | self._plain)

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Self:
        """Build from the file's vocabulary; raises ModelFileError that names the key at fault."""
        how = pre_tokenizer_of(file)
        vocabulary = Vocabulary.from_gguf(file)
        engine = build_engine(file, vocabulary)
        add_bos = file.boolean("tokenizer.ggml.add_bos_token", default=None)
        if add_bos and vocabulary.bos_id is None:
            file.fail("tokenizer.ggml.bos_token_id: is missing, but add_bos_token asks for it")
        model = file.string("tokenizer.ggml.model")
        encodes, unigram = model == WORD_PIECE, model == UNIGRAM
        usual = not unigram and (how is None or how.starts_with_bos)
        wanted = usual if add_bos is None else add_bos
        prefix = how is None and not encodes and file.boolean("tokenizer.ggml.add_space_prefix", default=True)
        # Phi-3's own tokenizer declares its tokens so (`rstrip`), which a GGUF file cannot say.
        strips = how is None and file.string("general.architecture", default="") == "phi3"
        with_bos = wanted and vocabulary.bos_id is not None
        made = cls(
            vocabulary, engine, add_bos=with_bos, space_prefix=prefix, strips=strips, spells_spaces=unigram
        )
        # Texts of WordPiece end with it whatever the file says.
        if encodes or file.boolean("tokenizer.ggml.add_sep_token", default=False):
            made.end_id = _separator(file, vocabulary)
        elif file.boolean("tokenizer.ggml.add_eos_token", default=unigram):
            made.end_id = vocabulary.eos_id
        return made

    def encode(self, text: str, *, special: bool = False, add_bos: bool | None = None) -> list[int]:
        """The ids of `text`.

        special: recognise markers (control tokens, `<tool_call>` and the like); for rendered templates, not
        for user content. add_bos: None follows the model's metadata.
        Raises InvalidPromptError where `text` holds a lone surrogate.
        """
        return self.encode_batch([text], special=special, add_bos=add_bos)[0]

    def encode_batch(
        self, texts: Sequence[str], *, special: bool = False, add_bos: bool | None = None
    ) -> list[list[int]]:
        """`encode` for many texts at once, on all cores and without holding the interpreter lock."""
        return self.encode_pieces([self.split(text, special=special) for text in texts], add_bos=add_bos)

    def split(self, text: str, *, special: bool) -> list[Piece]:
        """Cut `text` at the tokens that stand by themselves; what is left between them is ordinary text."""
        find = self._find_marked if special else self._find_plain
        if find is None:
            return [text] if text else []
        pieces: list[Piece] = []
        start = 0
        for match in find.finditer(text):
            if match.start() > start:
                pieces.append(text[start : match.start()])
            token = match[0]
            pieces.append(self.markers[token] if token in self.markers else self._plain[token])
            start = self.after(match)
        if start < len(text):
            pieces.append(text[start:])
        return pieces

    def after(self, match: re.Match[str]) -> int:
        """Return the index at which a text goes on after a marker that was found in it.

        White space behind the marker is skipped if the marker swallows it.
        """
        if self._strips and match[0] not in _KEEP_SPACE and match[0] in self.markers:
            spaces = _SPACES.match(match.string, match.end())
            return match.end() if spaces is None else spaces.end()
        return match.end()

    def next_marker(self, text: str, start: int) -> re.Match[str] | None:
        """The first marker in `text` from `start` on; of those that start there, the longest."""
        return self._find_marker.search(text, start) if self._find_marker else None

    def encode_pieces(
        self, prompts: Sequence[Sequence[Piece]], *, add_bos: bool | None = None
    ) -> list[list[int]]:
        """The ids of prompts that were cut by `split` or by other rules about what is special."""
        spelt = prompts if self._as_it_is else [self._spelt(pieces) for pieces in prompts]
        encoded = self._encoded({piece for pieces in spelt for piece in pieces if isinstance(piece, str)})
        wants_bos = self.add_bos if add_bos is None else add_bos
        start = [self.bos_id] if wants_bos and self.bos_id is not None else []
        results = []
        for pieces in spelt:
            ids = list(start)
            for piece in pieces:
                if isinstance(piece, str):
                    ids += encoded[piece]
                else:
                    ids.append(piece)
            results.append(ids)
        return results

    def _encoded(self, texts: AbstractSet[str]) -> dict[str, Sequence[int]]:
        """The ids of each of these ordinary texts; raises InvalidPromptError.

        Prompts share texts: a template's own words, which are short and are remembered, and what the chats of
        a batch begin with.
        """
        known = self._known  # another thread may put an empty one in its place
        found = {text: ids for text in texts if (ids := known.get(text)) is not None}
        fresh = [text for text in texts if text not in found]
        try:
            encoded = self._engine.encode_batch_fast(fresh, add_special_tokens=False)
        except TypeError as error:  # the engine's word for a string that is not valid Unicode
            raise InvalidPromptError("the text contains a lone surrogate: it is not valid Unicode") from error
        except BaseException as error:
            # Oniguruma gives up after 10 million steps at one place of a text, and the engine panics.
            if type(error).__name__ != "PanicException":  # it has no name to import
                raise
            if self._as_it_is and not self.vocabulary.byte_level:  # the file's table of characters is damaged
                raise InvalidPromptError(f"the tokenizer fails at this text: {error}") from error
            raise InvalidPromptError(
                "the text has a run of millions of spaces or letters without a break, which the tokenizer "
                "cannot cut into words"
            ) from error
        for text, one in zip(fresh, encoded, strict=True):
            found[text] = one.ids
        if len(known) > _MOST_KNOWN:
            known = self._known = {}
        known.update((text, found[text]) for text in fresh if len(text) <= _SHORT)
        return found

    def encode_each(
        self, prompts: Sequence[Sequence[Piece]], *, add_bos: bool | None = None
    ) -> list[list[int] | InvalidPromptError]:
        """`encode_pieces`, where a text that is not valid Unicode fails its own prompt alone."""
        try:
            return list(self.encode_pieces(prompts, add_bos=add_bos))
        except InvalidPromptError as error:
            if len(prompts) == 1:
                return [error]
            return [self.encode_each([pieces], add_bos=add_bos)[0] for pieces in prompts]

    def _spelt(self, pieces: Sequence[Piece]) -> list[Piece]:
        """A prompt with its ordinary texts as the engine wants them, where spaces are a letter."""
        spelt: list[Piece] = []
        after_text = False
        for piece in pieces:
            if isinstance(piece, str):
                # llama.cpp prefixes the first text and each text after a special token.
                prefix = SPACE if self._space_prefix and not after_text else ""
                spelt.append(prefix + piece.replace(" ", SPACE))
            else:
                spelt.append(piece)
            after_text = isinstance(piece, str)
        return spelt

    def decode(self, ids: Iterable[int], *, special: bool = False, continues: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD.

        special: write control tokens out instead of leaving them out. continues: the ids follow other text,
        so the space that SentencePiece puts before the first word is kept.
        """
        if special:
            spelt = (self.vocabulary.bytes_of(i) or self.vocabulary.text_of(i).encode() for i in ids)
        else:
            spelt = (self.vocabulary.bytes_of(i) for i in ids)
        data = b"".join(spelt)
        if self._space_prefix and not continues:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def stream(self, *, continues: bool = False) -> TextStream:
        """Decode token by token; the parts join to what `decode` gives for the same ids."""
        return TextStream(self.vocabulary, strip_space=self._space_prefix and not continues)


def _separator(file: GgufFile, vocabulary: Vocabulary) -> int:
    """The token that texts of an encoder end with."""
    key = "tokenizer.ggml.seperator_token_id"  # spelt so by llama.cpp
    found = file.integer(key, default=vocabulary.eos_id)
    if found is None or not 0 <= found < len(vocabulary.tokens):
        file.fail(f"{key}: is {found}, expected one of {len(vocabulary.tokens)} tokens")
    return found
