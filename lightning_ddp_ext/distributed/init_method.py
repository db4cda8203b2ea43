"""Where ranks meet: the forms of `init_method`."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from lightning_ddp_ext._validation import check_host

_FORMS = "`env://`, `tcp://host:port` or `file:///path`"


@dataclass(frozen=True, slots=True)
class RendezvousEndpoint:
    """Where ranks meet.

    Attributes:
        host: Name or address of rank 0's host; None for a file, and for what the cluster environment says.
        port: The port there.
        path: The file; None for a host.
        other_ports: Ports that rank 0 tries in this order if its port is taken; the others look for its store there.
        run: A name of the run, which the ranks know its store by if there are other ports.
    """

    host: str | None = None
    port: int | None = None
    path: Path | None = None
    other_ports: tuple[int, ...] = ()
    run: str = ""

    def __str__(self) -> str:
        return address_text(self.host, self.port) if self.path is None else str(self.path)


def address_text(host: str | None, port: int | None) -> str:
    """Write a host and a port for people.

    Args:
        host: Name or address.
        port: The port.

    Returns:
        Such as `"node1:29500"`, or `"[fd00::1]:29500"`.
    """
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def parse_init_method(init_method: str | None) -> RendezvousEndpoint:
    """Read an `init_method`, and refuse what cannot work; to be called before any process starts.

    Args:
        init_method: `"env://"`, the same as None: what the cluster environment says; `"tcp://host:port"`; or
            `"file:///path"` on a file system that all hosts share.

    Returns:
        The rendezvous endpoint; empty for `"env://"`.

    Raises:
        ValueError: If it has none of these forms.
    """
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
