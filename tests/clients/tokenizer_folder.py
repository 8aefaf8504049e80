"""A model's tokenizer as Hugging Face's libraries read it, written from a GGUF file."""

import json
from pathlib import Path

from tokenizers import decoders

from nightmill.worker.model.gguf.file import GgufFile
from nightmill.worker.model.tokenizer.engines import build_engine
from nightmill.worker.model.tokenizer.tokenizer import Tokenizer
from nightmill.worker.model.tokenizer.vocabulary import Vocabulary

_SAMPLE = "Once upon a time, in 1999, there was a mill.\nThe miller's cat?"


def write_tokenizer(model: Path, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` of a model whose vocabulary is merged by a list.

    Raises ValueError if the written one would give other ids.
    """
    file = GgufFile.open(model)
    vocabulary = Vocabulary.from_gguf(file)
    engine = build_engine(file, vocabulary)
    if vocabulary.byte_level:
        engine.decoder = decoders.ByteLevel()
    else:
        engine.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    ids = engine.encode(_SAMPLE).ids
    if ids != Tokenizer.from_gguf(file).encode(_SAMPLE, add_bos=False) or engine.decode(ids) != _SAMPLE:
        raise ValueError(f"{model}: its tokenizer is more than its engine")
    written = json.loads(engine.to_str())
    end = vocabulary.eos_id
    if end is None:
        raise ValueError(f"{model}: has no token that ends a text")
    text = vocabulary.tokens[end]
    written["model"]["vocab"][text] = end
    written["added_tokens"] = [
        {"id": end, "content": text, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    ]
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(written), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": text, "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
