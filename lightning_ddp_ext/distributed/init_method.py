"""Rendezvous endpoints: the address or file where the ranks of a run meet, and the forms of `init_method`."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from lightning_ddp_ext._validation import check_host

_FORMS = "`env://`, `tcp://host:port` or `file:///path`"


@dataclass(frozen=True, slots=True)
class RendezvousEndpoint:
    """Where ranks meet: a host and a port of rank 0's node, or a file; neither for `env://`.

    If the port is in use, rank 0 tries `other_ports` in order. The other ranks then recognise its store by `run`, a
    name that no other run on these nodes has.
    """

    host: str | None = None
    port: int | None = None
    path: Path | None = None
    other_ports: tuple[int, ...] = ()
    run: str = ""

    def __str__(self) -> str:
        if self.path is not None:
            return str(self.path)
        return f"[{self.host}]:{self.port}" if ":" in str(self.host) else f"{self.host}:{self.port}"

    @property
    def ports(self) -> tuple[int, ...]:
        """All ports in the order in which rank 0 tries them."""
        assert self.port is not None  # a file has no ports
        return (self.port, *self.other_ports)


def parse_init_method(init_method: str | None) -> RendezvousEndpoint:
    """Parse an `init_method`; the endpoint is empty for None and `"env://"`."""
    if init_method is None:
        return RendezvousEndpoint()
    try:
        parts = urlsplit(init_method)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"`init_method={init_method}`: {error}. Use {_FORMS}.") from error
    if parts.query:
        raise ValueError(f"`init_method={init_method}`: leave out `?{parts.query}`; rank and world size are known.")
    if parts.scheme == "env" and not parts.netloc and not parts.path:
        return RendezvousEndpoint()
    if parts.scheme == "tcp":
        if not parts.hostname or not port or parts.path not in ("", "/"):
            raise ValueError(f"`init_method={init_method}` needs a host and a port. Use `tcp://host:port`.")
        check_host("init_method", parts.hostname, "Use `tcp://host:port`.")
        return RendezvousEndpoint(host=parts.hostname, port=port)
    if parts.scheme == "file":
        if parts.netloc or len(parts.path) < 2:
            raise ValueError(f"`init_method={init_method}` needs an absolute path. Use `file:///path`.")
        return RendezvousEndpoint(path=Path(parts.path))
    raise ValueError(f"`init_method={init_method}` is of no known form. Use {_FORMS}.")
