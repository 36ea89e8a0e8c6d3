"""The driver of the tests: `python -m tests.real_ray.driver SCENARIO`; prints what it found as JSON."""

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.placement_group import placement_group

from coordinator.integrations.ray import Meeting, Seat, meet, plan, rank_actor, watch
from coordinator.settings import CoordinatorSettings
from shm_broadcast.errors import CommError
from tests.real_ray.ranks import Rank

# A rank takes a hundredth of a processor: what the tests need is memory.
CPUS = 0.01
SETTINGS = CoordinatorSettings.resolve({}, timeout_s=120.0, create_timeout_s=100.0)


def seated(count: int = 4, **options: Any) -> tuple[list[Seat], list[Any]]:
    """Return seats on both hosts, half of them on each, and an actor on each seat."""
    # The first bundle is on the other host: the driver's node comes first all the same.
    places = [("far", "near")[number % 2] for number in range(count)]
    group = placement_group([{"CPU": CPUS, place: CPUS} for place in places])
    seats = plan(group)
    made = rank_actor(Rank, num_cpus=CPUS, **options)
    actors = [made.options(scheduling_strategy=seat.strategy(group)).remote() for seat in seats]
    ray.get([actor.who.remote() for actor in actors])
    return seats, actors


def outcome(action: Callable[[], Any]) -> dict[str, Any]:
    """Return what a call has raised, and how long it took."""
    start = time.monotonic()
    found: dict[str, Any] = {"kind": "none"}
    try:
        action()
    except Exception as error:
        found = {
            "kind": type(error).__name__,
            "ours": isinstance(error, CommError),
            "text": str(error),
            "notes": getattr(error, "__notes__", []),
            "peers": list(getattr(error, "peers", ())),
            "missing": list(getattr(error, "missing", ())),
        }
    return {**found, "took_s": time.monotonic() - start}


def world() -> Any:
    """Meet, use the world, leave, and meet again."""
    seats, actors = seated()
    found: dict[str, Any] = {
        "seats": [[seat.rank, seat.bundle, seat.address, seat.local_rank] for seat in seats]
    }
    for name in ("first", "second"):
        start = time.monotonic()
        meeting = meet(actors, seats, SETTINGS, ports=(23450, 23470) if name == "second" else None)
        found[f"{name}_meet_s"] = time.monotonic() - start
        found[name] = watch([actor.use.remote() for actor in actors], meeting, timeout_s=60)
        found[f"{name}_ports"] = [ticket.port for ticket in ray.get([a.ticket.remote() for a in actors])]
        if name == "first":
            found["again"] = outcome(lambda: ray.get(actors[1].use_again.remote()))
            found["twice"] = outcome(lambda: meet(actors, seats, SETTINGS))
        ray.get([actor.leave.remote() for actor in actors])
    found["used"] = outcome(lambda: ray.get(actors[1].use_again.remote()))
    found["who"] = ray.get([actor.who.remote() for actor in actors])
    return found


def kill(victim: str) -> Any:
    """Kill a rank for which the others wait."""
    seats, actors = seated()
    meeting = meet(actors, seats, SETTINGS)
    watch([actor.use.remote() for actor in actors], meeting, timeout_s=60)
    at = time.monotonic() + 2.0
    refs = [actor.wait_for.remote(int(victim), at) for actor in actors]
    found: dict[str, Any] = {"watch": outcome(lambda: watch(refs, meeting, timeout_s=60))}
    found["watch_after_s"] = time.monotonic() - at
    found["ranks"] = [
        ray.get(ref, timeout=60) if rank != int(victim) else None for rank, ref in enumerate(refs)
    ]
    return found


def cut(second: str) -> Any:
    """Cut the cable to the host of process `second`, which closes no connection, while ranks wait for rank 3 there."""
    seats, actors = seated()
    meeting = meet(actors, seats, SETTINGS)
    watch([actor.use.remote() for actor in actors], meeting, timeout_s=60)
    refs = [actor.wait_for.remote(3, time.monotonic() + 3600.0) for actor in actors]
    time.sleep(2.0)
    at = time.monotonic()
    command = ["nsenter", "-t", second, "-n", "ip", "link", "set", "far", "down"]
    subprocess.run(command, check=True)
    found: dict[str, Any] = {"watch": outcome(lambda: watch(refs, meeting, timeout_s=110, grace_s=20))}
    found["watch_after_s"] = time.monotonic() - at
    found["ranks"] = [ray.get(ref, timeout=30) for ref in refs[:2]]
    return found


def restart() -> Any:
    """Ray starts a killed actor anew; the old ticket is refused, and new ones make a world."""
    seats, actors = seated(max_restarts=1, max_task_retries=0)
    meeting = meet(actors, seats, SETTINGS)
    tickets = ray.get([actor.ticket.remote() for actor in actors])
    before = ray.get(actors[1].who.remote())["pid"]
    at = time.monotonic() + 1.0
    refs = [actor.wait_for.remote(1, at) for actor in actors]
    found: dict[str, Any] = {"watch": outcome(lambda: watch(refs, meeting, timeout_s=60))}
    found["same_process"] = answered(actors[1])["pid"] == before
    found["old"] = outcome(lambda: ray.get(actors[1].join.remote(tickets[1], SETTINGS)))
    ray.get([actor.leave.remote() for actor in actors])
    meeting = meet(actors, seats, SETTINGS)
    found["new"] = watch([actor.use.remote() for actor in actors], meeting, timeout_s=60)
    return found


def answered(actor: Any) -> Any:
    """Return `who` of an actor that may be starting anew."""
    while True:
        try:
            return ray.get(actor.who.remote())
        except ray.exceptions.RayActorError:
            time.sleep(0.1)


def mistakes() -> Any:
    """What is wrong before a world is made, and an actor that dies on its way into it."""
    seats, actors = seated()
    plain = ray.remote(Rank).options(num_cpus=CPUS).remote()
    found: dict[str, Any] = {
        "plain": outcome(lambda: meet([plain, *actors[1:]], seats, SETTINGS)),
        "moved": outcome(lambda: meet([actors[2], actors[1], actors[0], actors[3]], seats, SETTINGS)),
        "strange port": outcome(lambda: meet(actors, seats, SETTINGS, ports=(0, 5))),
    }
    meeting = meet(actors, seats, SETTINGS)
    found["own"] = outcome(
        lambda: watch([actor.raise_own.remote() for actor in actors], meeting, timeout_s=60, grace_s=0.5)
    )
    ray.get([actor.leave.remote() for actor in actors if actor is not actors[2]])
    found["one stays"] = outcome(lambda: meet(actors, seats, SETTINGS))
    ray.get([actors[2].leave.remote(), actors[3].raise_in_join.remote()])
    found["one raises"] = outcome(lambda: meet(actors, seats, SETTINGS))
    meeting = meet(actors, seats, SETTINGS)
    found["all join"] = watch([actor.use.remote() for actor in actors], meeting, timeout_s=60)
    for actor in actors:
        ray.kill(actor)
    seats, actors = seated()
    ray.get(actors[3].die_in_join.remote())
    found["death"] = outcome(lambda: meet(actors, seats, SETTINGS))
    survivors = actors[:3]
    # They have given up too, so they meet without the dead one.
    fewer = [
        Seat(
            rank=seat.rank,
            bundle=seat.bundle,
            node_id=seat.node_id,
            address=seat.address,
            local_rank=seat.local_rank,
            local_world_size=2 if seat.rank < 2 else 1,
        )
        for seat in seats[:3]
    ]
    start = time.monotonic()
    meeting = meet(survivors, fewer, SETTINGS)
    found["after"] = watch([actor.use.remote() for actor in survivors], meeting, timeout_s=60)
    found["after_s"] = time.monotonic() - start
    return found


def many(worlds: str) -> Any:
    """Meet many worlds of two at once, one rank on each host."""
    places = [seated(2) for _ in range(int(worlds))]
    start = time.monotonic()
    offers = [
        [actor.offer.remote(seat) for actor, seat in zip(actors, seats, strict=True)]
        for seats, actors in places
    ]
    ray.get([ref for refs in offers for ref in refs])
    found: dict[str, Any] = {"offers_s": time.monotonic() - start}
    meetings = joined(places)
    found["meet_s"] = time.monotonic() - start
    refs = [[actor.use.remote() for actor in meeting.actors] for meeting in meetings]
    found["worlds"] = [
        watch(each, meeting, timeout_s=120) for each, meeting in zip(refs, meetings, strict=True)
    ]
    return found


def joined(places: list[tuple[list[Seat], list[Any]]]) -> list[Meeting]:
    """Meet all worlds at once, each on a thread of its own."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(lambda place: meet(place[1], place[0], SETTINGS), places))


SCENARIOS: dict[str, Callable[..., Any]] = {
    "world": world,
    "kill": kill,
    "cut": cut,
    "restart": restart,
    "mistakes": mistakes,
    "many": many,
}

if __name__ == "__main__":
    ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    print(json.dumps(SCENARIOS[sys.argv[1]](*sys.argv[2:])))
    sys.stdout.flush()
    ray.shutdown()
