"""Stand-ins for the CUDA libraries that a torch wheel is linked with, so that it imports without gigabytes of CUDA."""

import ctypes
import re
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).read_text()  # environments are made again when it changes

_NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")
_FILE = re.compile(r"Version: \d+ +File: (\S+)")
_VERSION = re.compile(r"Name: (\S+) +Flags")
_NO_DEVICE = 100  # cudaErrorNoDevice; stand-ins fail with it when they are called


def add_stand_ins(folder: Path) -> list[str]:
    """Build the libraries that the libraries in a folder need and this machine lacks, and return their names.

    They are built into the folder, where the loader finds them; needs `readelf` and `gcc`.
    """
    libraries = [path for path in sorted(folder.glob("*.so*")) if path.is_file()]
    present = {path.name for path in libraries}
    needed = {name for path in libraries for name in _NEEDED.findall(_readelf("--dynamic", path))}
    missing = sorted(name for name in needed - present if not _can_load(name))
    if missing:
        symbols = _missing_symbols(libraries, missing)
        for name in missing:
            _build(folder / name, symbols[name])
    return missing


def _missing_symbols(libraries: list[Path], missing: list[str]) -> dict[str, dict[str, set[str]]]:
    """Return the symbols that each missing library has to define, by version; unversioned ones may be in any."""
    defined, undefined, file_of_version = set(), set(), {}
    for path in libraries:
        file = ""
        for line in _readelf("--version-info", path).splitlines():
            if found := _FILE.search(line):
                file = found[1]
            elif found := _VERSION.search(line):
                file_of_version[found[1]] = file
        for line in _readelf("--dyn-syms", path).splitlines():
            fields = line.split()
            if len(fields) >= 8 and fields[0].rstrip(":").isdigit():
                name, _, version = fields[7].partition("@")
                if fields[6] == "UND":
                    undefined.add((name, version.lstrip("@")))
                else:
                    defined.add(name)
    process = ctypes.CDLL(None)
    symbols: dict[str, dict[str, set[str]]] = {name: defaultdict(set) for name in missing}
    for name, version in undefined:
        if version:
            file = file_of_version[version]
        else:
            file = missing[0] if name not in defined and not hasattr(process, name) else ""
        if file in symbols:
            symbols[file][version].add(name)
    return symbols


def _build(library: Path, symbols: Mapping[str, set[str]]) -> None:
    source, versions = library.with_suffix(".c"), library.with_suffix(".map")
    functions = [
        # Messages are read as text, whatever function has failed.
        f'const char *{name}(void) {{ return "no CUDA"; }}'
        if name.endswith(("String", "ErrorName"))
        else f"long {name}(void) {{ return {_NO_DEVICE}; }}"
        for names in symbols.values()
        for name in sorted(names)
    ]
    source.write_text("\n".join([*functions, "int stand_in;\n"]))
    versions.write_text(
        "".join(f"{version} {{ {'; '.join(sorted(names))}; }};\n" for version, names in symbols.items() if version)
    )
    script = [f"-Wl,--version-script={versions}"] if versions.stat().st_size else []
    options = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{library.name}", *script]
    subprocess.run(["gcc", *options, "-o", library, source], check=True)
    source.unlink()
    versions.unlink()


def _readelf(option: str, path: Path) -> str:
    return subprocess.run(["readelf", "--wide", option, path], check=True, capture_output=True, text=True).stdout


def _can_load(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
