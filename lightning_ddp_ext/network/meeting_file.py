"""A file as the place where ranks meet: nobody else may have used it, or be able to write it."""

import os
import socket
import stat
import time
from pathlib import Path

import torch.distributed as dist

from lightning_ddp_ext.errors import RendezvousError

_NOBODY = 65534  # whom a file server shows as the owner of what root has written


def open_file(path: Path, rank: int, world_size: int) -> dist.Store:
    """Open the store of a run in a file.

    Args:
        path: The file, on a file system that all hosts share.
        rank: This rank.
        world_size: Number of ranks.

    Returns:
        The store.

    Raises:
        RendezvousError: If there is no such folder, if other users can write the file, or if another run has used it.
    """
    if not path.parent.is_dir():
        raise RendezvousError(
            f"`init_method=file://{path}`: no folder {path.parent} on host {socket.gethostname()}, rank {rank}."
            " Create it on a file system that all hosts share."
        )
    _check_access(path, rank)
    store = dist.FileStore(str(path), world_size)
    _check_access(path, rank)  # once more, should somebody have been faster
    joined = f"joined/{rank}"
    if store.check([joined]):
        raise RendezvousError(
            f"`init_method=file://{path}` was used before: rank {rank}, {store.get(joined).decode(errors='replace')},"
            " has joined there, and that run has not ended properly or still runs. Delete the file, or use a fresh name"
            " for every run and every restart."
        )
    who = f"process {os.getpid()} on host {socket.gethostname()} at {time.strftime('%Y-%m-%d %H:%M:%S')}"
    store.set(joined, who)
    return store


def _check_access(path: Path, rank: int) -> None:
    """Refuse a file that others can write, or put another one in the place of.

    What ranks read there, addresses among it, decides whom they talk to.
    """
    if not hasattr(os, "geteuid"):  # no users of this kind
        return
    problem = _problem_of_folder(path.parent) or _problem_of_file(path)
    if problem is not None:
        raise RendezvousError(
            f"`init_method=file://{path}`, rank {rank} on host {socket.gethostname()}: {problem}, who could join or"
            " disturb the run. Use a path in a folder that only you can write."
        )


def _problem_of_folder(folder: Path) -> str | None:
    mode = folder.stat().st_mode
    # In a folder such as /tmp everybody can write, but only the owner of a file can replace it.
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        return f"the folder {folder} can be written by all users"
    return None


def _problem_of_file(path: Path) -> str | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"the file can be written by other users (its mode is {stat.S_IMODE(found.st_mode):o})"
    allowed = {os.geteuid()} if os.geteuid() else {0, _NOBODY}
    return None if found.st_uid in allowed else f"the file belongs to user {found.st_uid}"
