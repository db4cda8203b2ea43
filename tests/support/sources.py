"""The source files of the package, which several tests look through."""

import ast
from functools import cache
from pathlib import Path

import lightning_ddp_ext

PACKAGE = Path(lightning_ddp_ext.__file__).parent


@cache
def sources() -> dict[Path, str]:
    """Return the text of every module of the package, by its path in the package."""
    found = {path.relative_to(PACKAGE): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    assert len(found) > 50
    return found


@cache
def trees() -> dict[Path, ast.Module]:
    """Return the syntax tree of every module."""
    return {path: ast.parse(text) for path, text in sources().items()}


def imports_of(tree: ast.AST) -> list[str]:
    """Return the modules that a module imports, and the names that it imports from them, with their module."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found
