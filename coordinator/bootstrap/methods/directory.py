"""Rendezvous on one host through a directory.

Each run uses its own generation: a new directory of mode 0700 with a FileStore in it. A FileStore survives a hard exit,
so a later run that reused it would see old keys. Rank 0 creates the generation and then moves a pointer to it into
place. The others follow the pointer, check that rank 0 is alive, and claim their rank, which is possible once per
generation. The last rank to leave removes the generation; rank 0 of a later run removes those of which no process is
left.

The caller passes a directory, or a path as torch takes it: of nothing yet, or of a file, which may be empty or hold the
store of an earlier run. Nothing yet becomes a directory, which the last rank to leave removes again. Beside a file we
make a directory of our own, whose name is that of the file and a suffix; the file is neither read nor changed.

Each process opens the store through its own hard link and removes the link when it leaves. A FileStore's destructor,
which runs whenever the object is collected, checks that its file exists and then opens it to record its exit. If the
file is removed between the two steps, the destructor waits five minutes for it while holding the interpreter lock. A
query creates the file anew, or waits as long if its directory is gone. So a process that leaves first waits
for its queries to end.

The name of a link says which process made it. So the last process to leave is known even if others were
killed, and a process that joins a run later removes the links of killed processes.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import torch.distributed as dist

from coordinator.bootstrap.blocking_calls import UNREADABLE, finish_calls
from shm_broadcast.descriptors import read_text
from shm_broadcast.errors import ClosedError, CommTimeoutError, UsageError
from shm_broadcast.interruption import raised_by_handler, tolerating
from shm_broadcast.liveness import ProcessIdentity, fork_count, process_state, this_process
from shm_broadcast.threads import made_aside, owned_by, owner_forks

_POINTER: Final = "current"
_PREFIX: Final = "generation-"
# Added to the path of a file, it is the path of the directory in which the ranks meet.
_BESIDE: Final = ".group_coordinator"
_NAME: Final = re.compile(r"generation-[0-9a-f]{16}\Z")
# store-RANK-NAMESPACE.PID.TICKS.RANDOM, with "joined" for the rank of a process that has joined later.
_LINK: Final = re.compile(r"store-(?:\d+|joined)-(\d+)\.(\d+)\.(\d+)\.[0-9a-f]{16}\Z")
_TRIES: Final = 10
# How long to wait for calls whose callers were interrupted. A question takes 40 us, if no stopped rank locks the file.
_CALLS_S: Final = 1.0
# Pauses between two polls, growing by 1.2: rank 0 usually comes within milliseconds.
_FIRST_PAUSE_S: Final = 0.0003
_LONGEST_PAUSE_S: Final = 0.005


class Owner(msgspec.Struct, frozen=True):
    """The process that created a generation.

    Attributes:
        process: Its identity.
        world_size: The number of ranks.
        made_directory: Whether this run, or one that overlapped with it, made the directory: the last rank to leave
            removes it if it is empty.
    """

    process: ProcessIdentity
    world_size: int
    made_directory: bool = False


class DirectoryRendezvous:
    """One rank's part in one rendezvous through a directory, or through the path of a file."""

    def __init__(self, path: Path, rank: int, world_size: int) -> None:
        """Store the arguments; nothing is touched yet.

        Args:
            path: Of a directory, a regular file, or nothing yet. Equal on all ranks.
            rank: This process's rank; -1 for one that joins later.
            world_size: The number of ranks.
        """
        self._path = path
        self._directory = path
        self._rank = rank
        self._world_size = world_size
        self._generation: Path | None = None
        self._store: dist.Store | None = None
        self._link: Path | None = None
        self._forks = owner_forks()
        self._is_over = False

    @property
    def generation(self) -> str:
        """Return the name of the generation that this process has joined; empty before."""
        return "" if self._generation is None else self._generation.name

    def join(self, timeout_s: float) -> dist.Store:
        """Return the store of this run, as soon as rank 0 has created it.

        Raises:
            UsageError: The path cannot be used, or the world sizes differ.
            CommTimeoutError: Rank 0 did not create it within `timeout_s` seconds; `.missing` names rank 0.
            CapabilityError: This process can have no further thread.
        """
        return self._aside(lambda: self._join(timeout_s))

    def _aside(self, join: Callable[[], dist.Store]) -> dist.Store:
        """Join on a thread of its own: a signal handler may fork on this one, and the child would come as its parent.

        What an interrupted call has joined, `leave` lets go of.
        """
        return owned_by(self._forks, lambda: made_aside(join, lambda _store: None, self._end))

    def _end(self) -> None:
        """Let `join` end soon, which nobody waits for any more."""
        self._is_over = True

    def _join(self, timeout_s: float) -> dist.Store:
        self._generation = self._create() if self._rank == 0 else self._find(timeout_s)
        if self._store is None:
            self._link_store(self._generation)
            self._store = self._open()
        return self._store

    def join_later(self) -> dist.Store:
        """Return the store of the run that goes on there, as a process that is none of its first ranks.

        The last process to leave removes the run's directory, and this one counts too.

        Raises:
            UsageError: No run goes on there.
            CapabilityError: This process can have no further thread.
        """
        return self._aside(self._join_later)

    def _join_later(self) -> dist.Store:
        self._directory = self._choose_directory()
        generation = self._follow()
        try:
            if generation is None:
                raise FileNotFoundError(errno.ENOENT, "there is no generation")
            _check_private(generation)
            if _read_owner(generation) is None:
                raise FileNotFoundError(errno.ENOENT, "the generation has no readable owner file")
            self._link_store(generation)
            if self._follow() != generation:
                # The last process to leave looks for links again after it has removed the pointer: either it
                # or this process removes the generation.
                self._let_go(generation)
                raise FileNotFoundError(errno.ENOENT, "the last process has just left the generation")
            others = [process for link, process in _links(generation) if link != self._link]
            # No generator, for Python drops what a signal handler raises where it closes one.
            if all(map(_has_ended, others)):
                self._let_go(generation)
                raise FileNotFoundError(errno.ENOENT, "all processes of the last generation have ended")
        except OSError as error:
            if raised_by_handler(error):
                raise
            raise UsageError(f"no run that could be joined goes on in {self._directory}: {error}") from error
        for link, process in _links(generation):
            if _has_ended(process):
                link.unlink(missing_ok=True)
        self._generation, self._store = generation, self._open()
        return self._store

    def _link_store(self, generation: Path) -> None:
        """Make this process's own link to the store, which says that it uses the generation.

        Raises:
            OSError: The generation was removed.
        """
        self._unlink()
        own = this_process()
        rank = "joined" if self._rank < 0 else self._rank
        token = f"{own.pid_namespace}.{own.pid}.{own.start_ticks}.{secrets.token_hex(8)}"
        # Both are known before the link is there: `leave` finds it wherever this is interrupted.
        self._generation = generation
        self._link = generation / f"store-{rank}-{token}"
        self._link.hardlink_to(generation / "store")

    def _open(self) -> dist.Store:
        return dist.FileStore(str(self._link), -1)

    def _unlink(self) -> None:
        """Remove this process's link, before the store is finalised."""
        if self._link is not None:
            self._link.unlink(missing_ok=True)
            self._link = None

    def _choose_directory(self) -> Path:
        """Return the directory in which the ranks meet: the path itself, unless there is a file.

        Raises:
            UsageError: The path leads to something that is neither a directory nor a file, or cannot be looked at.
        """
        mode = 0
        try:
            mode = self._path.stat().st_mode
        except FileNotFoundError as error:
            if raised_by_handler(error):
                raise
        except (OSError, ValueError) as error:
            if raised_by_handler(error):
                raise
            raise UsageError(f"cannot use {self._path} for the rendezvous: {error}") from error
        if stat.S_ISDIR(mode):
            return self._path  # the root directory has no name, to which a suffix could be added
        beside = self._path.with_name(self._path.name + _BESIDE)
        if not mode:
            # The file may have been removed since rank 0 saw it.
            return beside if self._rank and _is_directory(beside) else self._path
        if not stat.S_ISREG(mode):
            raise UsageError(
                f"the rendezvous path {self._path} must be that of a directory, of a file, or of nothing yet"
            )
        return beside

    def _create(self) -> Path:
        self._directory = self._choose_directory()
        tries = 0
        while True:
            try:
                return self._create_generation()
            except OSError as error:
                if raised_by_handler(error):
                    raise
                tries += 1
                # The last rank of an earlier run may remove the directory just after this rank has found it.
                if tries == _TRIES or not isinstance(error, FileNotFoundError):
                    raise UsageError(f"cannot use {self._directory} for the rendezvous: {error}") from error

    def _create_generation(self) -> Path:
        made = not self._directory.exists()
        generation = self._directory / f"{_PREFIX}{secrets.token_hex(8)}"
        fresh = self._directory / f"{_POINTER}.{secrets.token_hex(8)}"
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_owner()
            made |= self._sweep() or self._directory != self._path
            generation.mkdir(mode=0o700)
            (generation / "store").touch(mode=0o600)
            owner = Owner(this_process(), self._world_size, made)
            (generation / "owner").write_bytes(msgspec.json.encode(owner))
            fresh.touch(mode=0o600, exist_ok=False)
            fresh.write_text(generation.name)
            self._generation = generation  # before others can find it: from here on `leave` lets go of it
            fresh.replace(self._directory / _POINTER)
        except BaseException:
            fresh.unlink(missing_ok=True)
            if self._follow() != generation:  # nobody can have found it
                self._generation = None
                self._remove(generation, made)
            raise
        return generation

    def _check_owner(self) -> None:
        if self._directory != self._path and self._directory.lstat().st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "it belongs to another user")

    def _remove(self, generation: Path, made_directory: bool) -> None:
        shutil.rmtree(generation, ignore_errors=True)
        if made_directory:
            try:
                self._directory.rmdir()
            except OSError as error:  # another run is using it
                if raised_by_handler(error):
                    raise

    def _sweep(self) -> bool:
        """Remove the generations of killed runs; return whether a run that has not left made the directory."""
        made = False
        for path in self._directory.glob(f"{_PREFIX}*"):
            owner = _read_owner(path)
            if owner is not None:
                made |= owner.made_directory
                # Ranks of an elastic run go on without the one that made the generation.
                if _has_ended(owner.process) and not _is_used(path):
                    shutil.rmtree(path, ignore_errors=True)
        return made

    def _find(self, timeout_s: float) -> Path:
        """Follow the pointer until it leads to a generation in which this rank is not claimed yet."""
        deadline = time.monotonic() + timeout_s
        pause_s = _FIRST_PAUSE_S
        seen = "the directory held no generation"
        while True:
            self._directory = self._choose_directory()
            generation = self._follow()
            if generation is not None:
                seen = self._claim_rank(generation)
                if not seen:
                    return generation
            if self._is_over:
                raise ClosedError(f"rendezvous in {self._directory}: cancelled, the caller no longer waits")
            if time.monotonic() >= deadline:
                raise CommTimeoutError(
                    f"rendezvous in {self._directory} (rank {self._rank} of {self._world_size}): rank 0 did not join "
                    f"within {timeout_s:.1f} s ({seen})",
                    missing=(0,),
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.2, _LONGEST_PAUSE_S)

    def _follow(self) -> Path | None:
        try:
            name = read_text(self._directory / _POINTER)
        except OSError as error:
            if raised_by_handler(error):
                raise
            return None
        return self._directory / name if _NAME.match(name) else None

    def _claim_rank(self, generation: Path) -> str:
        """Claim this rank in `generation`; return "", or why the generation is not the current run's."""
        try:
            _check_private(generation)
        except OSError as error:
            if raised_by_handler(error):
                raise
            return "the last generation was removed"
        owner = _read_owner(generation)
        if owner is None:
            return "the last generation has no readable owner file"
        if _has_ended(owner.process):
            return f"rank 0 of the last generation, pid {owner.process.pid}, is dead"
        if owner.world_size != self._world_size:
            if self._is_past(generation, owner.world_size):
                return f"the last generation is a world of {owner.world_size} ranks, and some have not left it yet"
            raise UsageError(
                f"rendezvous in {self._directory}: rank 0 was started with a world of {owner.world_size}, "
                f"rank {self._rank} with {self._world_size}"
            )
        claim = generation / f"rank-{self._rank}"
        try:
            # The link keeps the generation from being removed.
            self._link_store(generation)
            # The claim is a file, not a key: a query to a store whose file disappears waits five minutes for it.
            claim.touch(mode=0o600, exist_ok=False)
            others = [process for link, process in _links(generation) if link != self._link]
            if self._follow() != generation and all(map(_has_ended, others)):
                # Its last process had looked for links before there was this one, and is removing all of it.
                claim.unlink(missing_ok=True)
                self._unlink()
                with tolerating(OSError):  # it still holds something, which that process removes
                    generation.rmdir()
                raise FileNotFoundError(errno.ENOENT, "the last process has just left the generation")
        except FileExistsError:
            self.leave()
            return f"another process has already joined the last generation as rank {self._rank}"
        except OSError as error:
            self.leave()
            if raised_by_handler(error):
                raise
            return "the last generation was removed"
        self._store = self._open()
        return ""

    def _is_past(self, generation: Path, world_size: int) -> bool:
        """Return whether a generation of another world size belongs to an earlier run that this rank cannot join."""
        ranks = [self._rank] if self._rank < world_size else range(1, world_size)
        is_full = all((generation / f"rank-{rank}").exists() for rank in ranks)
        # The last rank to leave moves the pointer away before it removes the claims.
        return is_full or self._follow() != generation

    def leave(self) -> None:
        """Leave the generation; the last process to leave removes it. Idempotent; does nothing in a forked child."""
        if self._forks != fork_count():
            return
        generation, self._store = self._generation, None
        if generation is not None:
            self._let_go(generation)
            self._generation = None  # behind it: another call finishes one that was interrupted

    def _let_go(self, generation: Path) -> None:
        """Stop using a generation; remove it if all of its ranks have come, and no process uses it any more."""
        finish_calls(_CALLS_S)
        self._unlink()
        owner = _read_owner(generation)
        if owner is None or _is_used(generation) or not _is_full(generation, owner.world_size):
            return
        self._remove_pointer(generation)
        if _is_used(generation):
            return  # a joining process has linked it meanwhile: it finds no pointer and lets go itself
        self._remove(generation, owner.made_directory)

    def _remove_pointer(self, generation: Path) -> None:
        """Remove the pointer if it leads to `generation`; rank 0 may be replacing it concurrently."""
        pointer = self._directory / _POINTER
        aside = self._directory / f"{_POINTER}.{secrets.token_hex(8)}"
        try:
            pointer.rename(aside)
        except OSError as error:
            if raised_by_handler(error):
                raise
            return
        if read_text(aside) != generation.name:
            # It already leads to the next generation: restore it, unless a newer one is in place.
            with tolerating(FileExistsError):
                pointer.hardlink_to(aside)
        aside.unlink()


def _is_directory(path: Path) -> bool:
    """Return whether there is a directory; not if its name is too long."""
    try:
        return path.is_dir()
    except OSError as error:
        if raised_by_handler(error):
            raise
        return False


def _check_private(generation: Path) -> None:
    """Raise `UsageError` unless nobody else can write into a generation, and `OSError` if it has gone."""
    found = generation.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o700:
        raise UsageError(f"{generation} is not a directory of mode 0700 that belongs to this user")


def _has_ended(process: ProcessIdentity) -> bool:
    """Return whether a process is known to have ended: this process sees that, or the host has booted since."""
    own = this_process()
    return not own.on_same_host(process) or (own.sees(process) and process_state(process) == "dead")


def _links(generation: Path) -> list[tuple[Path, ProcessIdentity]]:
    """Return the links of the processes that use a generation on this host, and of those that were killed."""
    own = this_process()
    found = []
    try:
        names = os.listdir(generation)
    except FileNotFoundError:
        return []  # the last process to leave has just removed it
    for match in filter(None, map(_LINK.match, names)):
        namespace, pid, ticks = map(int, match.groups())
        identity = msgspec.structs.replace(own, pid_namespace=namespace, pid=pid, start_ticks=ticks)
        found.append((generation / match.string, identity))
    return found


def _is_used(generation: Path) -> bool:
    """Return whether a process uses a generation that is not known to have ended."""
    return not all(map(_has_ended, [process for _, process in _links(generation)]))


def _is_full(generation: Path, world_size: int) -> bool:
    """Return whether all of a generation's first ranks have come."""
    return all((generation / f"rank-{rank}").exists() for rank in range(1, world_size))


def _read_owner(generation: Path) -> Owner | None:
    try:
        return msgspec.json.decode((generation / "owner").read_bytes(), type=Owner)
    except (OSError, *UNREADABLE) as error:
        if raised_by_handler(error):
            raise
        return None
