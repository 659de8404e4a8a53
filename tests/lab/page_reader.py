# SPDX-License-Identifier: Apache-2.0
"""A reader of HTML pages for tests of reports."""

from html.parser import HTMLParser


class PageReader(HTMLParser):
    """Checks that tags are closed in order, and collects tags, texts and references: what a page could load."""

    VOID = {"meta", "img", "br", "hr", "link"}

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.references = []
        self.tags = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data
