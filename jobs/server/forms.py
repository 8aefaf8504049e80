"""Streaming parser of forms with a file (multipart/form-data, RFC 7578)."""

from dataclasses import dataclass, field

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from nightmill.jobs.server.errors import HttpError

FILE = "file"
"""Name of the file's part."""
OTHER_BYTES = 1 << 16
"""Most bytes of a form besides the file."""
_MOST_PARTS = 16
_LONGEST_TEXT = 1024  # bytes of a part that is not the file


@dataclass(slots=True)
class _Part:
    header: bytearray = field(default_factory=bytearray)  # the name of the header that is read
    value: bytearray = field(default_factory=bytearray)
    name: str = ""
    content: bytearray = field(default_factory=bytearray)


class MultipartForm:
    """A parser of one form: `feed` it, and `take` the file's bytes."""

    def __init__(self, content_type: str) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not boundary:
            said = "send a form with the file, with Content-Type: multipart/form-data; boundary=..."
            raise HttpError(415, said, code="unsupported_media_type")
        self.texts: dict[str, str] = {}
        self.filename: str | None = None  # once the file's part has begun
        self.over = False
        self._file = bytearray()
        self._part = _Part()
        self._parts = 0
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_header_field": lambda data, start, end: self._part.header.extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._part.value.extend(data[start:end]),
                    "on_header_end": self._header,
                    "on_headers_finished": self._headers,
                    "on_part_data": self._data,
                    "on_part_end": self._end,
                    "on_end": self._finish,
                },
            )
        except FormParserError as error:
            raise _malformed(error) from None

    def feed(self, chunk: bytes) -> None:
        """Parse more bytes; raises HttpError."""
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise _malformed(error) from None

    def take(self) -> bytearray:
        """Return the file's bytes since the last call."""
        taken, self._file = self._file, bytearray()
        return taken

    @property
    def waiting(self) -> int:
        """Number of bytes that `take` would return."""
        return len(self._file)

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise FormParserError(f"it has more than {_MOST_PARTS} parts")
        self._part = _Part()

    def _header(self) -> None:
        part = self._part
        if part.header.lower() == b"content-disposition":
            _, options = parse_options_header(part.value.decode("latin-1"))
            part.name = options.get(b"name", b"").decode(errors="replace")
            if part.name == FILE and b"filename" in options:
                if self.filename is not None:
                    raise FormParserError("it has more than one file")
                self.filename = options[b"filename"].decode(errors="replace")
        part.header.clear()
        part.value.clear()

    def _headers(self) -> None:
        if self._part.name == FILE and self.filename is None:
            raise FormParserError("its part 'file' has no filename")
        if not self._part.name or self._part.name in self.texts:
            raise FormParserError("a part has no name, or the name of another")

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._part.name == FILE:
            self._file += memoryview(data)[start:end]
            return
        self._part.content += data[start:end]
        if len(self._part.content) > _LONGEST_TEXT:
            raise FormParserError(f"a part that is not the file has more than {_LONGEST_TEXT:,} bytes")

    def _end(self) -> None:
        if self._part.name != FILE:
            self.texts[self._part.name] = self._part.content.decode(errors="replace")

    def _finish(self) -> None:
        self.over = True


def _malformed(error: FormParserError) -> HttpError:
    said = str(error).rstrip(".")
    return HttpError(400, f"the body is not a form that can be read: {said}", code="invalid_form")
