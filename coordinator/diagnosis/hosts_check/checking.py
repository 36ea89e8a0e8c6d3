"""The check of one rank, step by step: each begins with a line of output, and has a deadline."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Final

import msgspec

from coordinator.bootstrap.membership import own_address
from coordinator.bootstrap.methods.address import Rendezvous
from coordinator.bootstrap.rendezvous import join_rendezvous
from coordinator.diagnosis.hosts_check.facts import collect_facts
from coordinator.diagnosis.hosts_check.gathering import Gathering
from coordinator.diagnosis.hosts_check.interfaces import carrier_of
from coordinator.diagnosis.hosts_check.judging import Gathered, hosts_of, judge, listed
from coordinator.diagnosis.hosts_check.launched import Launched, read_launch
from coordinator.diagnosis.hosts_check.links import Pair, answer, listen, measure
from coordinator.diagnosis.hosts_check.narration import Narrator, stop
from coordinator.diagnosis.hosts_check.records import Link, LinkFailure, Plan, RankFacts, Verdict
from coordinator.diagnosis.hosts_check.rounds import rounds_of
from coordinator.launchers.launch import Caller
from coordinator.settings import CoordinatorSettings
from shm_broadcast.errors import CommError, CommTimeoutError, NativeError
from shm_broadcast.liveness import name_host

__all__ = ["Check", "Outcome"]

# Each direction of a pair sends in bulk for as long as this, and for less where there are many rounds.
_BULK_S: Final = 0.5
_LEAST_BULK_S: Final = 0.05
_BULK_IN_ALL_S: Final = 20.0
# What may pass in a round beside its deadlines.
_SLACK_S: Final = 5.0
# A rank that stopped early ends this long after the deadline of the meeting, since launchers end all ranks
# when the first one ends.
_LINGER_S: Final = 2.0
_FAREWELL_S: Final = 2.0


class Outcome(msgspec.Struct, frozen=True):
    """How the check ended on this rank.

    Attributes:
        has_failed: Whether there was an error, on any rank.
        verdict: On rank 0; None on the others.
    """

    has_failed: bool
    verdict: Verdict | None = None


class Check:
    """The check of one rank."""

    def __init__(self, init_method: str, caller: Caller, timeout_s: float, narrator: Narrator) -> None:
        """Check how ranks meet by `init_method`; each step for at most `timeout_s`."""
        self._init_method = init_method
        self._caller = caller
        self._timeout_s = timeout_s
        self._narrator = narrator
        self._begin = time.monotonic()
        self.launched: Launched | None = None

    def run(self, show: Callable[[Verdict], None]) -> Outcome:
        """Go through all steps; `show` is called on rank 0 before the other ranks end.

        Raises:
            Stopped: This rank cannot go on.
        """
        launched = self.launched = self._read_launch()
        settings = self._read_settings()
        self._narrator.begin(2)
        facts = collect_facts(launched, settings, self._timeout_s, self._narrator)
        self._narrator.begin(3)
        rendezvous = self._join(launched, settings)
        try:
            gathering = Gathering(rendezvous.store, launched.rank, self._timeout_s)
            try:
                facts = self._announced(facts, rendezvous, settings)
                return self._meet(launched, facts, gathering, show)
            except CommError as error:
                raise stop(
                    str(error),
                    "the output of rank 0, and of the launcher: whoever serves the store is gone or hangs",
                ) from error
        finally:
            rendezvous.leave()

    def linger(self) -> None:
        """Wait until the other ranks must have met or given up. Call it before the process ends by a failure."""
        launched = self.launched
        left_s = self._begin + self._timeout_s + _LINGER_S - time.monotonic()
        if launched is None or launched.world_size == 1 or left_s <= 0:
            return
        self._narrator.say(
            f"(staying for {left_s:.0f} s, so that the launcher does not end the others before they report)"
        )
        time.sleep(left_s)

    # --- step 1 -----------------------------------------------------------------------------------------------

    def _read_launch(self) -> Launched:
        self._narrator.name_host(socket.gethostname())
        self._narrator.begin(1, self._init_method)
        try:
            launched = read_launch(self._init_method, self._caller)
        except CommError as error:
            raise stop(
                str(error),
                "how the command was started: torchrun ... -m coordinator check --hosts; srun, mpiexec or a pod "
                "need "
                "--init-method slurm://, mpi://HOST:PORT or lws://; processes without a launcher --init-method "
                "tcp://HOST:PORT --rank R --world-size N",
            ) from error
        is_loud = launched.rank == 0 or launched.local_rank <= 0
        self._narrator.name(launched.rank, socket.gethostname(), is_loud)
        local = "" if launched.local_rank < 0 else f", local rank {launched.local_rank}"
        server = "torchrun's agent" if launched.has_agent else "rank 0"
        self._narrator.say(
            f"{launched.launcher}: rank {launched.rank} of {launched.world_size}{local}; {server} serves the store "
            "at "
            f"{launched.host} port {launched.port}"
        )
        if launched.variables:
            told = " ".join(f"{name}={value[:80]}" for name, value in launched.variables.items())
            self._narrator.say(f"from {told}")
        return launched

    def _read_settings(self) -> CoordinatorSettings:
        try:
            settings = CoordinatorSettings.from_env()
            name_host(settings.host_id)
        except CommError as error:
            raise stop(str(error), "the variables GROUP_COORDINATOR_* of this rank") from error
        return msgspec.structs.replace(settings, create_timeout_s=self._timeout_s)

    # --- step 3 -----------------------------------------------------------------------------------------------

    def _join(self, launched: Launched, settings: CoordinatorSettings) -> Rendezvous:
        self._narrator.say(
            f"serving the store at {launched.host} port {launched.port}"
            if launched.serves
            else "joining the store"
        )
        try:
            return join_rendezvous(
                launched.world_size,
                launched.rank,
                launched.init_method,
                settings,
                False,
                launched.spans_hosts,
            )
        except CommError as error:
            look_at = (
                f"is {launched.host} an address of this host (`ip address`), and who has port {launched.port} "
                f"(`ss -ltnp`)? A rank 0 that still runs, perhaps"
                if launched.serves
                else "what listens there: it is not the store of this job, or the secret of this rank is another one"
            )
            raise stop(str(error), look_at) from error

    def _announced(
        self, facts: RankFacts, rendezvous: Rendezvous, settings: CoordinatorSettings
    ) -> RankFacts:
        """Return the facts with the address that groups would announce in this store, by the function that they use."""
        address = own_address(settings.interface, rendezvous.store, rendezvous.spans_hosts)
        if address == facts.address:
            return facts
        self._narrator.say(f"groups would announce {address}, from which the way to this store begins")
        carrier = carrier_of(address, facts.interfaces)
        return msgspec.structs.replace(
            facts,
            address=address,
            interface="lo" if carrier is None else carrier.name,
            why="because the route to the store in which the ranks meet begins there",
        )

    def _meet(
        self,
        launched: Launched,
        facts: RankFacts,
        gathering: Gathering,
        show: Callable[[Verdict], None],
    ) -> Outcome:
        gathering.arrive()
        begin = time.monotonic()
        try:
            gathering.tell(f"facts/{launched.rank}", facts)
            gathering.mark("told", str(launched.rank))
            # The store acknowledges no writes. It answers this question once it has taken what came before.
            gathering.has("told")
        except (CommTimeoutError, NativeError) as error:
            # Rank 0 waits as long as this rank, and may end first.
            if time.monotonic() - begin < self._timeout_s / 2:
                raise
            raise stop(
                "the store took a few bytes from this rank, and did not take one or two KB: small packets pass, "
                "and "
                "large ones do not",
                f"the MTU on the way to {launched.host}: `ip link`, `ping -M do -s 1472 {launched.host}`",
            ) from error
        if launched.rank:
            return self._follow(launched, gathering)
        return self._lead(launched, gathering, show)

    def _lead(self, launched: Launched, gathering: Gathering, show: Callable[[Verdict], None]) -> Outcome:
        """Decide as rank 0 who takes part, measure too, and judge."""
        everyone = range(launched.world_size)
        self._narrator.say(f"waiting for {launched.world_size} ranks, for at most {self._timeout_s:g} s ...")
        told = gathering.await_marks("told", everyone, time.monotonic() + self._timeout_s)
        arrived = gathering.marks("arrived") & set(everyone)
        known = gathering.facts_of(sorted(told))
        hosts = hosts_of(known)
        there = "; ".join(f"{host[0].hostname}: {listed(each.rank for each in host)}" for host in hosts)
        self._narrator.say(f"{len(known)} of {launched.world_size} ranks are there ({there})")
        rounds = rounds_of(len(hosts))
        bulk_s = max(_LEAST_BULK_S, min(_BULK_S, _BULK_IN_ALL_S / (2 * max(len(rounds), 1))))
        plan = Plan(
            tuple(host[0].rank for host in hosts),
            secrets.token_hex(32),
            bulk_s,
            self._round_s(bulk_s) * (len(rounds) + 1),
        )
        gathering.tell("plan", plan)
        links = self._measure(launched, gathering, plan, known)
        self._narrator.begin(5)
        server = "torchrun's agent" if launched.has_agent else f"rank 0 on {hosts[0][0].hostname}"
        verdict = judge(
            Gathered(
                world_size=launched.world_size,
                store=f"{launched.host} port {launched.port}, which {server} serves",
                facts=known,
                arrived=tuple(sorted(arrived | told)),
                links=links,
            )
        )
        show(verdict)
        gathering.mark("over", "1" if verdict.has_failed else "0")
        gathering.await_marks("seen", told - {0}, time.monotonic() + _FAREWELL_S)
        return Outcome(verdict.has_failed, verdict)

    def _follow(self, launched: Launched, gathering: Gathering) -> Outcome:
        """Do as another rank what rank 0 has decided."""
        self._narrator.say("there; waiting for the others")
        if not gathering.await_key("plan", 2 * self._timeout_s + _SLACK_S):
            arrived = gathering.marks("arrived") & set(range(launched.world_size))
            missing = set(range(launched.world_size)) - arrived
            hosts = hosts_of(gathering.facts_of(sorted(arrived)))
            there = "; ".join(f"{host[0].hostname}: {listed(each.rank for each in host)}" for host in hosts)
            raise stop(
                f"rank 0 has not said how to go on; missing in the store: {listed(missing) or 'none'}; there: "
                f"{there}",
                "the output of rank 0, which has not started or has stopped at an earlier step",
            )
        plan = gathering.read("plan", Plan)
        if launched.rank in plan.measuring:
            self._measure(launched, gathering, plan, gathering.facts_of(plan.measuring))
        if not gathering.await_key("over", plan.limit_s):
            raise stop("rank 0 has not said how it ended", "the output of rank 0")
        has_failed = 1 in gathering.marks("over")
        gathering.mark("seen", str(launched.rank))
        self._narrator.begin(5, f"{'errors' if has_failed else 'no errors'}, see the output of rank 0")
        return Outcome(has_failed)

    # --- step 4 -----------------------------------------------------------------------------------------------

    def _round_s(self, bulk_s: float) -> float:
        return 4 * self._timeout_s + 2 * bulk_s + _SLACK_S

    def _measure(
        self, launched: Launched, gathering: Gathering, plan: Plan, facts: Mapping[int, RankFacts]
    ) -> tuple[Link, ...]:
        """Measure the pairs of this rank; return on rank 0 all links."""
        rounds = rounds_of(len(plan.measuring))
        self._narrator.begin(4, "" if rounds else "all ranks that came are on one host")
        if not rounds:
            return ()
        address = facts[launched.rank].address
        try:
            listener = listen(address)
        except OSError as error:
            gathering.mark(f"port/{launched.rank}", "0")
            raise stop(
                f"this rank cannot listen at {address}, where others would reach it: {error.strerror}",
                "whether that address is this host's (`ip address`), and whether any port is free",
            ) from error
        with closing(listener):
            gathering.mark(f"port/{launched.rank}", str(listener.getsockname()[1]))
            here = plan.measuring.index(launched.rank)
            going_on = set(range(len(plan.measuring)))
            for number, pairs in enumerate(rounds):
                for first, second in pairs:
                    if here in (first, second):
                        peer = plan.measuring[second if here == first else first]
                        self._take_turn(gathering, plan, facts, listener, launched.rank, peer)
                gathering.mark(f"round/{number}", str(here))
                until = time.monotonic() + self._round_s(plan.bulk_s)
                # A rank that has ended holds up only one round.
                going_on = gathering.await_marks(f"round/{number}", going_on, until)
        return _links_of(gathering, plan) if launched.rank == 0 else ()

    def _take_turn(
        self,
        gathering: Gathering,
        plan: Plan,
        facts: Mapping[int, RankFacts],
        listener: socket.socket,
        rank: int,
        peer: int,
    ) -> None:
        """Measure one pair, in which the lower rank begins."""
        other = facts.get(peer)
        name = f"rank {peer}" if other is None else f"{other.hostname} (rank {peer} at {other.address})"
        self._narrator.say(f"{'to' if rank < peer else 'from'} {name} ...")
        ports = gathering.await_key(f"port/{peer}", self._timeout_s) and gathering.marks(f"port/{peer}")
        port = max(ports, default=0) if ports else 0
        if other is None or not 0 < port < 65536:
            failure = LinkFailure("no listener", f"rank {peer} does not listen")
            address = "" if other is None else other.address
            link = Link(source=rank, target=peer, address=address, failure=failure)
        else:
            pair = Pair(rank, peer, other.address, port, facts[rank].address)
            link = (measure if rank < peer else answer)(pair, plan, listener, self._timeout_s)
        if link.failure is not None:
            self._narrator.say(f"FAILED: {link.failure.text}")
        elif link.round_trip_us is not None:
            self._narrator.say(
                f"{link.round_trip_us:.0f} us there and back, {link.sent_gbit:.3g} Gbit/s there, "
                f"{link.received_gbit:.3g} Gbit/s back"
            )
        gathering.tell(f"link/{rank}/{peer}", link)


def _links_of(gathering: Gathering, plan: Plan) -> tuple[Link, ...]:
    links = []
    for source in plan.measuring:
        for target in plan.measuring:
            if source == target:
                continue
            key = f"link/{source}/{target}"
            if gathering.has(key):
                link = gathering.read(key, Link)
                links.append(msgspec.structs.replace(link, source=source, target=target))
                continue
            text = f"rank {source} has not said what it found"
            failure = LinkFailure("nobody answered", text)
            links.append(Link(source=source, target=target, address="", failure=failure))
    return tuple(links)
