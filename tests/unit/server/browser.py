"""A browser of pages, as far as it sends and reads: cookies, forms and their tokens."""

import re

import httpx2

from tests.unit.server.conftest import Server


class Browser:
    """Plain HTTP with cookies, that reads the token of a page before it sends a form."""

    def __init__(self, server: Server, key: str | None = None) -> None:
        self.http = httpx2.Client(base_url=server.url, timeout=240, follow_redirects=True)
        if key is not None:
            answer = self.send("/sign-in", "/sign-in", key=key, next="/")
            assert answer.status_code == 200, answer.text

    def get(self, path: str, **query: str) -> httpx2.Response:
        return self.http.get(path, params=query)

    def token(self, path: str) -> str:
        (token, *_) = re.findall(r'name="form_token" value="([^"]+)"', self.get(path).text)
        return token

    def send(self, page: str, path: str, **form: str) -> httpx2.Response:
        """The form at `path` with the token of `page`."""
        return self.http.post(path, data={"form_token": self.token(page)} | form)
