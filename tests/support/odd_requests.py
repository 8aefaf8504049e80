"""What strangers send that is not a request, or not one that anything can be done about."""

ODD_HEADS = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32),  # TLS
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /\r\n\r\n",
    b"\r\n" * 64,
    b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    b"POST /execute HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    b"POST /execute HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    b"GET /%00%ff/..%2f..%2fetc/passwd HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X-%d: " % 1 + b"a" * 100_000 + b"\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    bytes(range(256)),
)
"""What is not a request, or one for nothing that there is."""

ODD_BODIES = (
    b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 10_000, b'{"prompt": NaN}',
    b'{"prompt": 1e999}', b'{"prompt": "a", "prompt": "b"}', b'{"prompt": "a", "max_tokens": -1}',
    b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", b'{"prompt": "\\u0000"}',
    b'{"messages": [{"role": {}}]}',
    b'{"prompt": ' + b'{"a":' * 500 + b"1" + b"}" * 500 + b"}",
    b'{"prompt": "a", "json_schema": {"$ref": "#"}, "x": 1}',
)  # fmt: skip
"""Bodies that no endpoint takes."""
POSTED_TO = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/execute",
    "/v1/generate",
    "/v1/jobs",
    "/v1/batches",
    "/v1/night",
)
