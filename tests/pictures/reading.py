"""A page as a machine reads it: the elements in their order, and whether they are closed as they were opened."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

_VOID = {"meta", "br", "wbr"}


@dataclass
class Page(HTMLParser):
    """`Page.of(text)`."""

    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    open_: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    @classmethod
    def of(cls, text: str) -> Page:
        page = cls()
        page.feed(text)
        page.close()
        assert not page.open_, page.open_
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open_.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open_.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open_ and self.open_[-1] not in {"style", "script"}:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def charts(self) -> list[str]:
        return [str(each["id"]).removeprefix("chart-") for _name, each in self.elements if each.get("role") == "img"]
