"""Rendezvous on one host from nothing but a directory.

Every use makes a generation of its own: a fresh directory of mode 0700 with a FileStore in it, as a
FileStore outlives a hard exit and shows a later run its old keys. Rank 0 makes the generation and then
moves a pointer to it into place; the others follow the pointer, check that rank 0 is alive, and take
their seat, which in each generation can be taken once. The last to leave removes the generation, and
rank 0 of a later run removes those whose owner is dead.

Each process opens the store by a hard link of its own, and removes that when it leaves. A FileStore's destructor, which
runs whenever the garbage collector comes, looks whether its file is there and then opens it to say that it has gone; if
somebody removes the directory in between, it waits five minutes for the file to come back, holding the interpreter.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
import time
from pathlib import Path
from typing import Final

import msgspec
import torch.distributed as dist

from shm_broadcast.errors import CommTimeoutError, UsageError
from shm_broadcast.liveness import ProcessIdentity, process_state, this_process

_POINTER: Final = "current"
_PREFIX: Final = "generation-"
_NAME: Final = re.compile(r"generation-[0-9a-f]{16}\Z")
# Between two looks: short while rank 0 is expected within milliseconds.
_FIRST_PAUSE_S: Final = 0.0003
_LONGEST_PAUSE_S: Final = 0.005


class Owner(msgspec.Struct, frozen=True):
    """Who made a generation, and for how many."""

    process: ProcessIdentity
    world_size: int


class DirectoryRendezvous:
    """One rank's part in one use of a directory."""

    def __init__(self, directory: Path, rank: int, world_size: int) -> None:
        """Nothing is touched yet."""
        self._directory = directory
        self._rank = rank
        self._world_size = world_size
        self._generation: Path | None = None
        self._store: dist.Store | None = None
        self._link: Path | None = None

    def join(self, timeout_s: float) -> dist.Store:
        """Return the store of this use, once rank 0 has made it.

        Raises:
            UsageError: The directory cannot be used, or the world sizes differ.
            CommTimeoutError: Rank 0 did not come.
        """
        if self._rank == 0:
            self._generation = self._create()
        else:
            self._generation = self._find(timeout_s)
        if self._store is None:
            self._store = self._open(self._generation)
        return self._store

    def _open(self, generation: Path) -> dist.Store:
        """Open the store by a path that nobody else uses. OSError: The generation was removed."""
        self._unlink()
        link = generation / f"store-{self._rank}-{secrets.token_hex(8)}"
        link.hardlink_to(generation / "store")
        self._link = link
        return dist.FileStore(str(link), -1)

    def _unlink(self) -> None:
        """Remove the path of the store, before the store goes."""
        if self._link is not None:
            self._link.unlink(missing_ok=True)
            self._link = None

    def _create(self) -> Path:
        own = this_process()
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._sweep(own)
            generation = self._directory / f"{_PREFIX}{secrets.token_hex(8)}"
            generation.mkdir(mode=0o700)
            (generation / "store").touch(mode=0o600)
            (generation / "owner").write_bytes(msgspec.json.encode(Owner(own, self._world_size)))
            fresh = self._directory / f"{_POINTER}.{secrets.token_hex(8)}"
            fresh.touch(mode=0o600, exist_ok=False)
            fresh.write_text(generation.name)
            fresh.replace(self._directory / _POINTER)
        except OSError as error:
            raise UsageError(f"cannot rendezvous in {self._directory}: {error}") from error
        return generation

    def _sweep(self, own: ProcessIdentity) -> None:
        """Remove what runs left behind that were killed."""
        for path in self._directory.glob(f"{_PREFIX}*"):
            owner = _read_owner(path)
            if owner is not None and own.sees(owner.process) and process_state(owner.process) == "dead":
                shutil.rmtree(path, ignore_errors=True)
            elif owner is not None and not own.on_same_host(owner.process):
                # Made before the last boot: nobody of that time is alive.
                shutil.rmtree(path, ignore_errors=True)

    def _find(self, timeout_s: float) -> Path:
        """Follow the pointer until it leads to a generation in which this rank's seat is free."""
        deadline = time.monotonic() + timeout_s
        pause_s = _FIRST_PAUSE_S
        seen = "there was no generation at all"
        while True:
            generation = self._follow()
            if generation is not None:
                reason = self._take_seat(generation)
                if reason is None:
                    return generation
                seen = reason
            if time.monotonic() >= deadline:
                raise CommTimeoutError(
                    f"rendezvous in {self._directory} (rank {self._rank} of {self._world_size}): rank 0 did not come "
                    f"within {timeout_s:.1f} s ({seen})",
                    missing=(0,),
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.2, _LONGEST_PAUSE_S)

    def _follow(self) -> Path | None:
        try:
            name = (self._directory / _POINTER).read_text()
        except OSError:
            return None
        return self._directory / name if _NAME.match(name) else None

    def _take_seat(self, generation: Path) -> str | None:
        """Take this rank's seat; return None, or why that generation is not ours."""
        try:
            found = generation.lstat()
        except OSError:
            return "its last generation was removed"
        if (
            not stat.S_ISDIR(found.st_mode)
            or found.st_uid != os.getuid()
            or stat.S_IMODE(found.st_mode) != 0o700
        ):
            raise UsageError(f"{generation} is not a directory of mode 0700 that belongs to this user")
        owner = _read_owner(generation)
        own = this_process()
        if owner is None:
            return "its last generation has no owner"
        if not own.on_same_host(owner.process) or (
            own.sees(owner.process) and process_state(owner.process) == "dead"
        ):
            return f"rank 0 of the last generation, pid {owner.process.pid}, is dead"
        if owner.world_size != self._world_size:
            if self._is_past(generation, owner.world_size):
                return f"the last generation is a world of {owner.world_size} that is not left yet"
            raise UsageError(
                f"rendezvous in {self._directory}: rank 0 was started with a world of {owner.world_size}, "
                f"rank {self._rank} with {self._world_size}"
            )
        try:
            # A file, not a key: a store whose file goes while it is asked waits five minutes for it to come back.
            # Whose seat is taken keeps the generation from being removed.
            (generation / f"seat-{self._rank}").touch(mode=0o600, exist_ok=False)
            self._store = self._open(generation)
        except FileExistsError:
            return f"rank {self._rank} of the last generation has been there before"
        except OSError:
            return "its last generation was removed"
        return None

    def _is_past(self, generation: Path, world_size: int) -> bool:
        """Return whether a generation of another size is an earlier run's, in which this rank has or had no place."""
        ranks = [self._rank] if self._rank < world_size else range(1, world_size)
        is_full = all((generation / f"seat-{rank}").exists() for rank in ranks)
        # The last to leave moves the pointer away before it removes the seats.
        return is_full or self._follow() != generation

    def leave(self) -> None:
        """Give the seat back; the last to leave removes the generation."""
        generation, store = self._generation, self._store
        self._generation = self._store = None
        if generation is None or store is None:
            return
        try:
            if generation.exists() and store.add("left", 1) == self._world_size:
                self._remove_pointer(generation)
                shutil.rmtree(generation, ignore_errors=True)
        finally:
            self._unlink()

    def _remove_pointer(self, generation: Path) -> None:
        """Remove the pointer if it leads to `generation`: rank 0 may be putting the next one there just now."""
        pointer = self._directory / _POINTER
        aside = self._directory / f"{_POINTER}.{secrets.token_hex(8)}"
        try:
            pointer.rename(aside)
        except OSError:
            return
        if aside.read_text() != generation.name:
            # It is the next one already: put it back, unless there is a newer one still.
            with contextlib.suppress(FileExistsError):
                pointer.hardlink_to(aside)
        aside.unlink()


def _read_owner(generation: Path) -> Owner | None:
    try:
        return msgspec.json.decode((generation / "owner").read_bytes(), type=Owner)
    except (OSError, msgspec.MsgspecError):
        return None
