"""The campaign's model file: bytes as tokens, and a chat template with hostile corners."""

from pathlib import Path

from gguf import TokenType

from nightmill.worker.model.tokenizer.vocabulary import byte_alphabet
from tests.campaign.texts import CONTEXT
from tests.support.ggufs import CONTROL, TestVocabulary, write_model

# Its numbers come from a variable: Jinja computes what is constant when it compiles, for everybody's chats.
TEMPLATE = """\
{%- set first = messages[0]['content'] -%}
{%- set many = 10000000 * (messages | length) -%}
{%- if first.startswith('!refuse') %}{{ raise_exception('bad' ~ '%c' % 0) }}{% endif -%}
{%- if first.startswith('!long') %}{{ raise_exception('x' * many) }}{% endif -%}
{%- if first.startswith('!spin') %}{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}\
{% endfor %}{% endif -%}
{%- if first.startswith('!big') %}{{ (['x' * many] * 300) | join }}{% endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{{ '<|im_start|>assistant\\n' }}"""
HOSTILE_CHATS = ("!refuse", "!long", "!spin", "!big")


def write(path: Path) -> Path:
    """Write the model; its arithmetic is never used."""
    alphabet = byte_alphabet()
    tokens = [alphabet[byte] for byte in range(256)]
    types = [int(TokenType.NORMAL)] * 256 + [int(TokenType.CONTROL)] * len(CONTROL)
    # A file without any merge is refused: one of two control characters, which no prompt has.
    first, second = alphabet[1], alphabet[2]
    vocabulary = TestVocabulary(
        "gpt2",
        [*tokens, *CONTROL, first + second],
        [*types, int(TokenType.NORMAL)],
        merges=[f"{first} {second}"],
    )
    return write_model(
        path, layers=1, width=32, ffn=32, heads=2, kv_heads=1, context_length=CONTEXT,
        vocabulary=vocabulary, chat_template=TEMPLATE,
    )  # fmt: skip
