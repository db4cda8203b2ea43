"""Writes the formulas of the pages as MathML, which browsers draw without a script."""

import html
import re
from typing import Any

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_TOKEN = re.compile(r"\\[A-Za-z]+|\d+|\S")
_COMMANDS = {
    r"\ell": "<mi>&ell;</mi>",
    r"\nabla": "<mi mathvariant='normal'>&nabla;</mi>",
    r"\sum": "<mo>&sum;</mo>",
    r"\theta": "<mi>&theta;</mi>",
}
_SCRIPTS = {"_": "sub", "^": "sup"}


def on_page_content(content: str, **_: Any) -> str:
    """Replace what `pymdownx.arithmatex` has found."""
    return _FORMULA.sub(_write, content)


def _write(match: re.Match[str]) -> str:
    tokens = _TOKEN.findall(html.unescape(match[2]))
    display = "block" if match[1] == "div" else "inline"
    return f'<math display="{display}">{_row(tokens)}</math>'


def _row(tokens: list[str]) -> str:
    atoms: list[str] = []
    while tokens and tokens[0] != "}":
        token = tokens.pop(0)
        if token in _SCRIPTS:
            kind = f"m{_SCRIPTS[token]}"
            atoms.append(f"<{kind}>{atoms.pop()}{_atom(tokens.pop(0), tokens)}</{kind}>")
        else:
            atoms.append(_atom(token, tokens))
    return f"<mrow>{''.join(atoms)}</mrow>"


def _atom(token: str, tokens: list[str]) -> str:
    if token == "{":
        row = _row(tokens)
        tokens.pop(0)
        return row
    if token.startswith("\\"):
        return _COMMANDS[token]  # an unknown command ends the build
    if token.isalpha():
        return f"<mi>{token}</mi>"
    return f"<mn>{token}</mn>" if token.isdigit() else f"<mo>{html.escape(token)}</mo>"
