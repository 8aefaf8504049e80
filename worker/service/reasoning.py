"""Counts the tokens of an answer that are thoughts."""

import codecs
from collections.abc import Sequence

from nightmill.jobs.base.contract import Markup
from nightmill.jobs.reply.logprobs import Spell
from nightmill.jobs.reply.structure import structure_of


def reasoning_tokens(token_ids: Sequence[int], markup: Markup | None, spell: Spell) -> int:
    """The tokens up to the end of the thoughts, their marks included; 0 of an answer that has none.

    token_ids  of the whole answer
    markup     what the answer's text holds beside what it says
    spell      how tokens are spelt
    """
    if markup is None or markup.thinking is None:
        return 0
    structure = structure_of(markup)
    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
    count = 0
    for number, token_id in enumerate(token_ids, start=1):
        if data := spell(token_id)[0]:
            structure.push(decode(data))
            if structure.inside:
                count = number
            if structure.over:
                break
    return count
