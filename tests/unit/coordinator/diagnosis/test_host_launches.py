"""What the check of hosts reads from a launcher, from the host and from the command line, and where it stops."""

import io
import socket
import time
from typing import Any

import pytest

from coordinator.addresses.names import addresses_of
from coordinator.cli import main
from coordinator.diagnosis.hosts_check import checking, facts
from coordinator.diagnosis.hosts_check.checking import Check
from coordinator.diagnosis.hosts_check.facts import choose_address, collect_facts
from coordinator.diagnosis.hosts_check.interfaces import carrier_of, list_interfaces
from coordinator.diagnosis.hosts_check.launched import Launched, read_launch
from coordinator.diagnosis.hosts_check.narration import Narrator, Stopped
from coordinator.diagnosis.hosts_check.records import Finding, Interface
from coordinator.launchers.launch import Caller
from coordinator.settings import CoordinatorSettings
from shm_broadcast.errors import CommError
from tests.ports import free_port

ENVIRONMENT = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
TORCHRUN = {**ENVIRONMENT, "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "2"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_JOB_NAME": "secret",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
CASES: list[tuple[str, dict[str, str], str, bool, bool]] = [
    ("env://", ENVIRONMENT, "10.0.0.1", False, False),
    ("env://", TORCHRUN, "10.0.0.1", True, True),
    ("slurm://:29500", SLURM, "n1", False, True),
    ("mpi://10.0.0.1:29500", MPICH, "10.0.0.1", False, True),
]


def launched_at(host: str, port: int = 29500, **changed: Any) -> Launched:
    """Return what a launcher says of rank 1 of two."""
    told: dict[str, Any] = {
        "launcher": "the environment",
        "rank": 1,
        "world_size": 2,
        "local_rank": 0,
        "host": host,
        "port": port,
        "has_agent": False,
        "spans_hosts": False,
        "init_method": "env://",
        "variables": {},
    }
    return Launched(**{**told, **changed})


@pytest.mark.parametrize(("method", "environ", "host", "has_agent", "spans_hosts"), CASES)
def test_each_launcher_says_the_place_and_with_which_variables(
    method: str, environ: dict[str, str], host: str, has_agent: bool, spans_hosts: bool
) -> None:
    """Variables that say no place are not shown."""
    launched = read_launch(method, Caller(), environ)
    assert (launched.rank, launched.world_size, launched.local_rank) == (3, 4, 1)
    assert (launched.host, launched.port) == (host, 29500)
    assert (launched.has_agent, launched.spans_hosts, launched.serves) == (has_agent, spans_hosts, False)
    assert launched.variables.items() <= {**environ, "MPI_LOCALRANKID": "1"}.items()
    assert "secret" not in launched.variables.values()
    assert len(launched.variables) >= 3


def test_processes_without_a_launcher_say_their_place_on_the_command_line() -> None:
    """With a TCP address, also one of IPv6."""
    launched = read_launch("tcp://[fd00::1]:29500", Caller(rank=0, world_size=2), {})
    assert (launched.host, launched.port, launched.serves) == ("fd00::1", 29500, True)


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("env://", "no launcher has set RANK"),
        ("slurm://", "SLURM_STEP_NODELIST is missing"),
        ("mpi://10.0.0.1:1", "mpiexec"),
        ("file:///tmp/x", "must be env://"),
        ("tcp://10.0.0.1", "must be env://"),
        ("tcp://10.0.0.1:99999", "must be env://"),
        ("tcp://10.0.0.1:1", "pass --rank and --world-size"),
    ],
)
def test_what_is_missing_is_named(method: str, text: str) -> None:
    """The errors are those of a start."""
    with pytest.raises(CommError, match=text):
        read_launch(method, Caller(), {})


# --- the host -------------------------------------------------------------------------------------------------


def test_the_interfaces_of_this_host_are_listed_with_their_addresses() -> None:
    """The address of the default route, if there is one, is among them; loopback is not."""
    interfaces = list_interfaces()
    assert "lo" not in {each.name for each in interfaces}
    assert all(each.mtu >= 68 for each in interfaces)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.1", 1))
        except OSError:
            return  # no network here; the tests on two hosts look at theirs
        address = probe.getsockname()[0]
    assert carrier_of(address, interfaces) is not None


def test_the_carrier_of_an_address_is_found_among_several() -> None:
    """An address that none has, such as loopback, has no carrier."""
    one, two = Interface("a", ("10.0.0.1/24", "fe80::1/64"), 1500), Interface("b", ("fd00::1/64",), 1500)
    assert carrier_of("10.0.0.1", (one, two)) == one
    assert carrier_of("fd00:0::1", (one, two)) == two
    assert carrier_of("fe80::1%a", (one, two)) == one
    assert carrier_of("127.0.0.1", (one, two)) is None


def stopped_by(launched: Launched, settings: CoordinatorSettings | None = None) -> Finding:
    """Return why the facts of this host stop the check."""
    with pytest.raises(Stopped) as stopped:
        collect_facts(launched, settings or CoordinatorSettings(), 0.2, Narrator(io.StringIO()))
    (finding,) = stopped.value.findings
    assert finding.level == "error"
    return finding


def test_a_name_without_an_address_points_to_the_name_service() -> None:
    """Nothing else is tried."""
    finding = stopped_by(launched_at("no-such-host.invalid"))
    assert "no-such-host.invalid, has no address here" in finding.text
    assert "getent ahosts no-such-host.invalid" in finding.look_at


def test_a_name_service_that_hangs_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The question goes on on its thread; the check does not."""
    from threading import Event

    over = Event()

    def hang(host: str, port: int) -> list[Any]:
        del host, port
        over.wait(10)
        return []

    monkeypatch.setattr(facts, "addresses_of", hang)
    try:
        finding = stopped_by(launched_at("slow.example"))
    finally:
        over.set()
    assert "has not said within 0.2 s" in finding.text
    assert "/etc/resolv.conf" in finding.look_at


def test_a_loopback_master_of_several_hosts_names_etc_hosts() -> None:
    """The launcher says that there are several, so nothing is tried."""
    finding = stopped_by(launched_at("localhost", spans_hosts=True))
    assert "loopback address" in finding.text
    assert "/etc/hosts" in finding.look_at


def test_a_loopback_master_that_refuses_may_be_on_another_host() -> None:
    """Nobody has said that there are several hosts, so the advice is conditional."""
    finding = stopped_by(launched_at("127.0.0.1", free_port()))
    assert "refuses connections" in finding.text
    assert "if rank 0 is on another host, /etc/hosts" in finding.look_at


def test_an_interface_that_is_not_there_is_named() -> None:
    """With the setting that names it."""
    settings = CoordinatorSettings.resolve({}, interface="nosuch0")
    finding = stopped_by(launched_at("127.0.0.1"), settings)
    assert "nosuch0" in finding.text
    assert "GROUP_COORDINATOR_INTERFACE" in finding.look_at


@pytest.mark.guarantee("H6")
def test_the_chosen_address_says_why() -> None:
    """The route decides unless a setting names the interface."""
    addresses = addresses_of("127.0.0.1", 29500)
    chosen = choose_address(launched_at("127.0.0.1"), CoordinatorSettings(), addresses, ())
    assert (chosen.address, chosen.why) == (
        "127.0.0.1",
        "because the route to the store (127.0.0.1) begins there",
    )
    settings = CoordinatorSettings.resolve({}, interface="lo")
    chosen = choose_address(launched_at("127.0.0.1"), settings, addresses, ())
    assert chosen.why == "because GROUP_COORDINATOR_INTERFACE=lo says so"


def test_a_world_that_needs_more_descriptors_than_allowed_stops_before_it_listens() -> None:
    """Rank 0 of many ranks says how many it needs."""
    finding = stopped_by(launched_at("127.0.0.1", rank=0, world_size=1_000_000_000))
    assert "3000000512" in finding.text
    assert "ulimit -Hn" in finding.look_at


# --- what is printed, and the command line --------------------------------------------------------------------


@pytest.mark.guarantee("H1")
def test_a_step_is_printed_as_it_begins_and_named_where_it_stops() -> None:
    """A loud rank prints both, a quiet one the second only."""
    pages = []
    for is_loud in (True, False):
        out = io.StringIO()
        narrator = Narrator(out)
        narrator.begin(1, "env://")
        assert out.getvalue() == ""  # nobody knows yet whether this rank is loud
        narrator.name(3, "alpha", is_loud)
        narrator.begin(2)
        begun = out.getvalue()
        narrator.fail([Finding("error", "what is wrong " * 12, "the culprit")])
        assert all(len(line) <= 120 for line in out.getvalue().splitlines())
        pages.append((begun, out.getvalue().removeprefix(begun)))
    assert pages[0][0].splitlines() == [
        "[rank 3 alpha] 1. what the launcher says: env://",
        "[rank 3 alpha] 2. this host, and the way to the store",
    ]
    assert pages[1][0] == ""
    for _, end in pages:
        assert end.startswith("[rank 3 alpha] STOPPED at step 2. this host, and the way to the store\n")
        assert end.endswith("[rank 3 alpha]    look at: the culprit\n")


@pytest.mark.guarantee("H3")
@pytest.mark.parametrize(("size", "stays"), [(2, True), (1, False)])
def test_a_rank_that_has_stopped_stays_until_the_others_have_met(
    size: int, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun, srun and mpiexec end all ranks with the first; a rank that is alone need not wait."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    check = Check("env://", Caller(), 7.0, Narrator(io.StringIO()))
    check.launched = launched_at("127.0.0.1", world_size=size)
    check.linger()
    assert bool(slept) == stays
    assert all(7.0 < seconds <= 9.0 for seconds in slept)


def test_the_command_names_the_step_and_the_culprit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who forgot the launcher reads how to start it."""
    for name in (*ENVIRONMENT, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["check", "--hosts"]) == 1
    printed = capsys.readouterr().out
    assert "STOPPED at step 1. what the launcher says" in printed
    assert "torchrun ... -m coordinator check --hosts" in " ".join(printed.split())


def test_an_interrupted_check_says_at_which_step_it_was(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who has waited long enough presses Ctrl-C."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checking, "collect_facts", interrupt)
    words = ["--init-method", "tcp://127.0.0.1:29500", "--rank", "0", "--world-size", "2"]
    assert main(["check", "--hosts", *words]) == 1
    printed = capsys.readouterr().out
    assert "STOPPED at step 2. this host, and the way to the store" in printed
    assert "error: interrupted" in printed


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--hosts", "-n", "4"], "the launcher starts the ranks"),
        (["--hosts", "--only", "barrier"], "the launcher starts the ranks"),
        (["--init-method", "env://"], "--init-method is for --hosts"),
        (["--rank", "0"], "--rank is for --hosts"),
        (["--json"], "--json is for --hosts"),
        (["--hosts", "--rank", "-1"], "--rank"),
        (["--hosts", "--timeout", "0"], "not a positive number of seconds"),
    ],
)
def test_options_that_do_not_fit_each_other_are_refused(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2, before anything is tried."""
    with pytest.raises(SystemExit) as ended:
        main(["check", *words])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err
