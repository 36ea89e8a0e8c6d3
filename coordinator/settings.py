"""All settings. This is the only module of the three packages that reads the environment, and only when called.

An argument beats the environment, and the environment beats the default. `CoordinatorSettings` holds the user's
choices, `LaunchEnvironment` the variables that a launcher such as torchrun sets.
"""

import difflib
import functools
import hashlib
import os
import re
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, Self, get_args, get_origin

import msgspec

from device_comm.cuda_settings import PER_RANK_CUDA_FIELDS, CudaSettings
from shm_broadcast.endpoint import RemoteSettings
from shm_broadcast.errors import SettingsError, UsageError
from shm_broadcast.settings import BroadcastSettings, positive_seconds
from shm_broadcast.stacks.offered import DEFAULT_SIGNAL

__all__ = [
    "PER_RANK_FIELDS",
    "PREFIX",
    "CoordinatorSettings",
    "LaunchEnvironment",
    "differences",
    "launched_local_rank",
]

PREFIX = "GROUP_COORDINATOR_"

PER_RANK_FIELDS = frozenset(
    {
        "interface",
        "host_id",
        "record_dir",
        "secret_descriptor",
        "secret_file",
        "stack_signal",
        *(f"cuda.{field}" for field in PER_RANK_CUDA_FIELDS),
    }
)
"""Fields that may differ between ranks: interface names and file paths differ between hosts, signal handlers between
processes."""

_SECTIONS: dict[str, type[BroadcastSettings | RemoteSettings | CudaSettings]] = {
    "broadcast": BroadcastSettings,
    "remote": RemoteSettings,
    "cuda": CudaSettings,
}

_MOST_RANKS = 2**31 - 1


class CoordinatorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a process's groups. They must be equal on all ranks, except for `PER_RANK_FIELDS`.

    Attributes:
        timeout_s: How long a collective waits for its peers, in seconds.
        create_timeout_s: How long the rendezvous and the creation of a group wait for all ranks, in seconds.
        destroy_timeout_s: About how long `destroy` may take before it leaves without its peers, in seconds. At most
            half of that goes to what was sent and is not yet received.
        interface: Network interface for groups that span several hosts, such as "eth0"; None chooses the one
            on the route to the master. May differ between ranks.
        host_id: A name for this host, needed where several hosts report one boot id, as clones of a running
            machine do. It must differ between hosts and be equal on all ranks of a host; 1 to 64 letters,
            digits and characters of "._-". None takes the boot id alone.
        remote_ports: First and last TCP port on which queues listen for readers on other hosts, such as
            "29600-29699"; each queue with such readers takes one port, and so does the store of ranks with a secret
            that meet by torchrun's agent or a directory. None takes any free port.
        record_dir: Directory in which each process keeps its status page in a file, which survives the death of all
            ranks, and writes a dump when a group breaks; `python -m coordinator blame` reads both. It is made with mode
            0700, or must have it, and the files of the newest 8 runs stay. None records nothing. May differ between
            ranks.
        stack_signal: Real-time signal on which this process writes its Python stacks when a rank's call has
            timed out; 46 by default. 0 for none; the process then asks no others for their stacks either. May
            differ between ranks.
        secret_file: A file with the secret of the job, at least 32 random bytes, which only this user can read. Ranks
            with a secret meet in a store that admits nobody without it. All ranks need the same secret, but
            the path may differ between ranks, as `secret_descriptor` may.
        secret_descriptor: Number of an inherited descriptor with the secret, such as that of a pipe, instead of a file.
        security: "required" refuses plaintext between hosts, and to start without a secret; "optional" allows both.
        bulk: "plaintext" acknowledges, where security is required, that tensors and objects between hosts go over
            Gloo, NCCL or connections of ours, which do not encrypt them. None acknowledges nothing.
        broadcast: Queues over shared memory.
        remote: Queue readers on other hosts: high-water mark and heartbeats; and how long a whole host may be silent.
        cuda: Groups on CUDA devices: our kernels, their memory, NCCL.

    Raises:
        SettingsError: A value is out of range; the text names the field and the value.
    """

    timeout_s: float = 600.0
    create_timeout_s: float = 300.0
    destroy_timeout_s: float = 5.0
    interface: str | None = None
    host_id: str | None = None
    remote_ports: str | None = None
    record_dir: str | None = None
    stack_signal: int = DEFAULT_SIGNAL
    secret_file: str | None = None
    secret_descriptor: int | None = None
    security: Literal["optional", "required"] = "optional"
    bulk: Literal["plaintext"] | None = None
    broadcast: BroadcastSettings = BroadcastSettings()
    remote: RemoteSettings = RemoteSettings()
    cuda: CudaSettings = CudaSettings()

    def __post_init__(self) -> None:
        """Check every field."""
        for field in ("timeout_s", "create_timeout_s", "destroy_timeout_s"):
            seconds = positive_seconds(field, getattr(self, field))
            msgspec.structs.force_setattr(self, field, seconds)
        if self.interface is not None and not _is_interface_name(self.interface):
            raise SettingsError(
                f"interface is {self.interface!r}, but must be the name of a network interface "
                "(1 to 15 characters without blanks or '/')"
            )
        if self.host_id is not None and not _is_host_id(self.host_id):
            raise SettingsError(
                f"host_id is {self.host_id!r}, but must have 1 to 64 letters, digits and characters of '._-'"
            )
        if self.remote_ports is not None and _port_range(self.remote_ports) is None:
            raise SettingsError(
                f"remote_ports is {self.remote_ports!r}, but must be a range of TCP ports from 1 to 65535 "
                "such as '29600-29699'"
            )
        if self.record_dir is not None and not _is_absolute_path(self.record_dir):
            raise SettingsError(f"record_dir is {self.record_dir!r}, but must be an absolute path")
        if not _is_stack_signal(self.stack_signal):
            raise SettingsError(
                f"stack_signal is {self.stack_signal!r}, but must be a real-time signal, {int(signal.SIGRTMIN)} to "
                f"{int(signal.SIGRTMAX)}, or 0 for none"
            )
        self._check_security()
        for section, kind in _SECTIONS.items():
            if not isinstance(getattr(self, section), kind):
                raise SettingsError(f"{section} is {getattr(self, section)!r}, but must be {kind.__name__}")

    def _check_security(self) -> None:
        if self.secret_file is not None and not _is_absolute_path(self.secret_file):
            raise SettingsError("secret_file must be the absolute path of a file, not what is in it")
        number = self.secret_descriptor
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 0):
            raise SettingsError("secret_descriptor must be the number of a descriptor")
        if self.security not in ("optional", "required"):
            raise SettingsError(f"security is {self.security!r}, but must be 'optional' or 'required'")
        if self.bulk not in (None, "plaintext"):
            raise SettingsError(f"bulk is {self.bulk!r}, but must be 'plaintext' or None")
        if self.secret_file is not None and number is not None:
            raise SettingsError(
                "secret_file and secret_descriptor are both set: name one place of the secret"
            )
        if self.security == "required" and self.secret_file is None and number is None:
            raise SettingsError(
                "security is 'required', and there is no secret: name it in secret_file "
                "(GROUP_COORDINATOR_SECRET_FILE) or secret_descriptor"
            )

    @property
    def remote_port_range(self) -> tuple[int, int] | None:
        """Return the first and the last port of `remote_ports`, or None."""
        return None if self.remote_ports is None else _port_range(self.remote_ports)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Return the settings from the environment, with defaults for the rest.

        Args:
            environ: Variables to read instead of the process's environment.

        Raises:
            SettingsError: A variable that starts with `GROUP_COORDINATOR_` is unknown or malformed.
        """
        return cls.resolve(environ)

    @classmethod
    def resolve(cls, environ: Mapping[str, str] | None = None, /, **overrides: Any) -> Self:
        """Return settings in which each argument beats the environment, and the environment beats the default.

        Args:
            environ: Variables to read instead of the process's environment; `{}` ignores the environment.
            overrides: Values by field. A section (`broadcast`, `remote`, `cuda`) takes its settings object, which
                replaces the whole section, or a mapping, whose fields beat those of the environment.

        Raises:
            SettingsError: An argument or a variable is unknown or malformed. A variable is checked even if an
                argument beats it.
        """
        values = _read_variables(cls, os.environ if environ is None else environ)
        _refuse_unknown(overrides, cls.__struct_fields__, "setting")
        for name, kind in _SECTIONS.items():
            section = overrides.pop(name, {})
            if isinstance(section, Mapping):
                _refuse_unknown(section, kind.__struct_fields__, f"setting of section {name!r}")
                section = kind(**{**values.get(name, {}), **section})
            values[name] = section
        return cls(**{**values, **overrides})

    def agreed(self) -> dict[str, str | int | float | None]:
        """Return the fields that must be equal on every rank, flat: `{"timeout_s": 600.0, "broadcast.wait": …}`."""
        flat: dict[str, str | int | float | None] = {}
        for field, value in msgspec.to_builtins(self).items():
            if isinstance(value, dict):
                flat |= {f"{field}.{inner}": each for inner, each in value.items()}
            else:
                flat[field] = value
        return {name: value for name, value in flat.items() if name not in PER_RANK_FIELDS}

    def fingerprint(self) -> str:
        """Return a digest of `agreed()`: 16 hexadecimal digits, stable across processes, hosts and Python versions."""
        return hashlib.sha256(msgspec.json.encode(self.agreed(), order="deterministic")).hexdigest()[:16]


def differences(views: Mapping[int, Mapping[str, object]]) -> list[str]:
    """Return one line per field on which ranks differ, such as `timeout_s: 600.0 (ranks 0, 1), 30.0 (rank 2)`.

    Args:
        views: Results of `CoordinatorSettings.agreed`, by rank. A field that a rank lacks, because it runs
            another version, counts as different.
    """
    lines = []
    for field in dict.fromkeys(field for view in views.values() for field in view):
        holders: dict[str, list[int]] = {}
        for rank, view in sorted(views.items()):
            holders.setdefault(repr(view[field]) if field in view else "absent", []).append(rank)
        if len(holders) > 1:
            # The majority's value comes first, the culprit's after it.
            groups = sorted(holders.items(), key=lambda item: -len(item[1]))
            lines.append(f"{field}: " + ", ".join(f"{value} ({_ranks(ranks)})" for value, ranks in groups))
    return lines


# Hardware features that groups created from now on must not use, whatever their settings say.
_forbidden: Final[set[str]] = set()


def permit_custom_all_reduce(enable: bool) -> None:
    """Do what `coordinator.parallel_state.set_custom_all_reduce` says."""
    if not isinstance(enable, bool):
        raise UsageError(f"set_custom_all_reduce takes a bool, not {enable!r}")
    (_forbidden.discard if enable else _forbidden.add)("custom_all_reduce")


def permitted(settings: CoordinatorSettings) -> CoordinatorSettings:
    """Return `settings` without what the process forbids; see `permit_custom_all_reduce`."""
    if "custom_all_reduce" not in _forbidden or not settings.cuda.custom_all_reduce:
        return settings
    return msgspec.structs.replace(
        settings, cuda=msgspec.structs.replace(settings.cuda, custom_all_reduce=False)
    )


class LaunchEnvironment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the processes of a world meet, from the variables that a launcher such as torchrun sets, or from the caller.

    Attributes:
        rank: `RANK`.
        world_size: `WORLD_SIZE`.
        master_addr: `MASTER_ADDR`: name or address of the host that serves the store.
        master_port: `MASTER_PORT`: TCP port of the store.
        use_agent_store: `TORCHELASTIC_USE_AGENT_STORE`: whether torchrun's agent serves the store.
        restart_count: `TORCHELASTIC_RESTART_COUNT`: how often the agent has restarted the workers.
        run_id: `TORCHELASTIC_RUN_ID`.
        agents: `GROUP_WORLD_SIZE`: how many agents there are, one for each host; read if an agent serves the store.
    """

    rank: int
    world_size: int
    master_addr: str
    master_port: int
    use_agent_store: bool = False
    restart_count: int = 0
    run_id: str | None = None
    agents: int = 1

    @classmethod
    def from_env(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> Self | None:
        """Return the launcher's variables, or None if no launcher started this process.

        A launcher sets at least one of `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and `LOCAL_WORLD_SIZE`. Programs that start
        their processes themselves may set `MASTER_ADDR` and `MASTER_PORT`, so these alone count only if the caller
        knows its rank and the world size. Only variables that are needed are checked: an engine may have set the
        others for a purpose of its own.

        Args:
            environ: Variables to read instead of the process's environment.
            rank: This process's rank, if the caller knows it: `RANK` is then not read.
            world_size: The number of processes, if the caller knows it: `WORLD_SIZE` is then not read.

        Raises:
            SettingsError: A variable that is needed is missing or malformed.
        """
        environ = os.environ if environ is None else environ
        known = {"RANK": rank, "WORLD_SIZE": world_size}
        names = (*known, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if not any(name in environ for name in names) and None in known.values():
            return None
        needed = [name for name in (*known, "MASTER_ADDR", "MASTER_PORT") if known.get(name) is None]
        missing = [name for name in needed if not environ.get(name)]
        if missing:
            present = [name for name in (*names, "MASTER_ADDR", "MASTER_PORT") if environ.get(name)]
            raise SettingsError(
                f"the launcher's environment is incomplete: it lacks {', '.join(missing)}, "
                f"though it sets {', '.join(present) or 'none of the others'}; start the processes with torchrun, "
                "or set all of these variables, or none"
            )
        if world_size is None:
            world_size = _integer(environ, "WORLD_SIZE", 1, _MOST_RANKS)
        use_agent_store = _truth(environ, "TORCHELASTIC_USE_AGENT_STORE")
        # Engines set some of torchrun's variables for purposes of their own. So `GROUP_WORLD_SIZE` is trusted
        # only beside an agent's store, which no engine serves.
        agents = _optional_integer(environ, "GROUP_WORLD_SIZE", 1, _MOST_RANKS) if use_agent_store else None
        return cls(
            rank=_integer(environ, "RANK", 0, max(world_size, 1) - 1) if rank is None else rank,
            world_size=world_size,
            master_addr=environ["MASTER_ADDR"],
            master_port=_integer(environ, "MASTER_PORT", 1, 65535),
            use_agent_store=use_agent_store,
            agents=agents or 1,
            restart_count=_optional_integer(environ, "TORCHELASTIC_RESTART_COUNT", 0, 2**31 - 1) or 0,
            run_id=environ.get("TORCHELASTIC_RUN_ID"),
        )


def launched_local_rank(environ: Mapping[str, str] | None = None) -> int | None:
    """Return `LOCAL_RANK`, a launcher's index of this process among those of its host; None if it is not set.

    Args:
        environ: Variables to read instead of the process's environment.

    Raises:
        SettingsError: The variable is no index.
    """
    return _optional_integer(os.environ if environ is None else environ, "LOCAL_RANK", 0, _MOST_RANKS - 1)


_LAUNCHER_PREFIXES: Final = ("SLURM_", "OMPI_COMM_WORLD_", "PMI_", "MPI_LOCAL", "LWS_")


def launcher_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that Slurm, mpiexec and LeaderWorkerSet set, for `coordinator.launchers` to read.

    Args:
        environ: Variables to read instead of the process's environment.
    """
    environ = os.environ if environ is None else environ
    return {name: value for name, value in environ.items() if name.startswith(_LAUNCHER_PREFIXES)}


def cuda_visible_devices(environ: Mapping[str, str] | None = None) -> str | None:
    """Return `CUDA_VISIBLE_DEVICES`, which selects the CUDA devices of a process; None if it is not set.

    Args:
        environ: Variables to read instead of the process's environment.
    """
    return (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")


def names_vllm_plugin(name: str, environ: Mapping[str, str] | None = None) -> bool:
    """Return whether `VLLM_PLUGINS`, a list separated by commas, names the plugin `name`.

    vLLM loads every installed plugin if the variable is not set; ours asks for its name.

    Args:
        name: The name of the entry point.
        environ: Variables to read instead of the process's environment.
    """
    return name in (os.environ if environ is None else environ).get("VLLM_PLUGINS", "").split(",")


def names_sglang_plugin(name: str, environ: Mapping[str, str] | None = None) -> bool:
    """Return whether `SGLANG_PLUGINS`, a list separated by commas, names the plugin `name`.

    SGLang loads every installed plugin if the variable is not set; ours asks for its name.

    Args:
        name: The name of the entry point.
        environ: Variables to read instead of the process's environment.
    """
    names = (os.environ if environ is None else environ).get("SGLANG_PLUGINS", "").split(",")
    return name in [each.strip() for each in names]


# --- the environment ------------------------------------------------------------------------------------------


@functools.cache
def _variables(cls: type[CoordinatorSettings]) -> Mapping[str, tuple[type[Any], str, Any]]:
    """Return (settings class, field of that class, type of the field) for each variable.

    The result is cached, because every group creation asks for it, and msgspec needs 2 ms to compile the
    annotations of the fields.
    """
    found: dict[str, tuple[type[Any], str, Any]] = {}
    for field in msgspec.structs.fields(cls):
        name = PREFIX + field.name.upper()
        section = _SECTIONS.get(field.name)
        if section is None:
            found[name] = (cls, field.name, field.type)
        else:
            for inner in msgspec.structs.fields(section):
                found[f"{name}__{inner.name.upper()}"] = (section, inner.name, inner.type)
    return found


def _read_variables(cls: type[CoordinatorSettings], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the values that the environment sets, by field; those of a section as a dict."""
    variables = _variables(cls)
    given = {name: text for name, text in environ.items() if name.startswith(PREFIX)}
    _refuse_unknown(given, variables, "environment variable")
    values: dict[type[Any], dict[str, Any]] = {}
    for name, text in given.items():
        owner, field, kind = variables[name]
        try:
            values.setdefault(owner, {})[field] = msgspec.convert(text, kind, strict=False)
        except msgspec.ValidationError as error:
            raise _malformed(name, text, kind, error) from None
    for owner, read in values.items():
        # `security` is left out: only the final values show whether the secret that it requires is there,
        # since an argument may name the secret.
        fields = {field: value for field, value in read.items() if field != "security"}
        try:
            owner(**fields)
        except SettingsError as error:
            names = [name for name in given if variables[name][0] is owner and variables[name][1] in fields]
            for name in names:
                _, field, kind = variables[name]
                try:
                    # A variable whose value is refused on its own is to blame; otherwise the values contradict
                    # each other.
                    owner(**{field: fields[field]})
                except SettingsError as refusal:
                    raise _malformed(name, given[name], kind, refusal) from None
            raise SettingsError(f"environment variables {', '.join(names)}: {error}") from None
    sections = {name: values[section] for name, section in _SECTIONS.items() if section in values}
    return {**values.get(cls, {}), **sections}


def _malformed(name: str, text: str, kind: Any, error: Exception) -> SettingsError:
    choice = f"; must be one of {get_args(kind)}" if get_origin(kind) is Literal else ""
    # A user may have put the secret itself into the variable by mistake. It must not appear in a log.
    shown = name if name.startswith(f"{PREFIX}SECRET") else f"{name}={text!r}"
    return SettingsError(f"environment variable {shown}: {error}{choice}")


def _refuse_unknown(names: Iterable[str], known: Iterable[str], what: str) -> None:
    known = list(known)
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise SettingsError(f"unknown {what} {name!r}; did you mean {close[0]!r}?")


def _is_interface_name(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[^/\s]{1,15}", name) is not None


def _is_host_id(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name) is not None


def _is_absolute_path(path: object) -> bool:
    return isinstance(path, str) and "\0" not in path and Path(path).is_absolute()


def _is_stack_signal(number: object) -> bool:
    if not isinstance(number, int) or isinstance(number, bool):
        return False
    return number == 0 or signal.SIGRTMIN <= number <= signal.SIGRTMAX


def _port_range(text: object) -> tuple[int, int] | None:
    """Return the two numbers of "29600-29699", or None if `text` is not a range of ports."""
    match = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text) if isinstance(text, str) else None
    if match is None:
        return None
    first, last = int(match[1]), int(match[2])
    return (first, last) if 1 <= first <= last <= 65535 else None


def _optional_integer(environ: Mapping[str, str], name: str, lowest: int, highest: int) -> int | None:
    return _integer(environ, name, lowest, highest) if environ.get(name) else None


def _integer(environ: Mapping[str, str], name: str, lowest: int, highest: int) -> int:
    text = environ[name]
    # `int` alone would also take "1_0", " 1" and digits of other scripts.
    if text.isascii() and text.isdecimal() and len(text) <= 10 and lowest <= int(text) <= highest:
        return int(text)
    raise SettingsError(f"environment variable {name}={text!r} must be an integer from {lowest} to {highest}")


def _truth(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name, "False")
    if text not in ("True", "False"):
        raise SettingsError(f"environment variable {name}={text!r} must be 'True' or 'False'")
    return text == "True"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
