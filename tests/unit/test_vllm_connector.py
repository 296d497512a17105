"""The vLLM connector against a small vLLM: what others suffered from, each class by its own name, in milliseconds."""

import random
from collections.abc import Iterator

import pytest

from kvbus.engines.vllm_mover import ORDERS_MAX, Session
from kvbus.engines.vllm_orders import NO_ORDERS, Load, Report
from kvbus.engines.vllm_scheduler import FAILED_PAUSE_S
from tests.unit.engine_parts import SmallDesk
from tests.unit.vllm_parts import BLOCK, Calls, MiniRequest, MiniVllm, ids_of, right_answer, stored
from tests.waiting import wait_until


@pytest.fixture
def mini() -> Iterator[MiniVllm]:
    vllm = MiniVllm()
    yield vllm
    vllm.close()


def parked(vllm: MiniVllm, name: str, ids: list[int]) -> MiniRequest:
    """A request whose load has begun, and stands still in the middle of its copy."""
    vllm.memory.going.clear()
    vllm.memory.copying.clear()
    request = vllm.add(MiniRequest(name, ids))
    vllm.step()
    assert request.status == "parked"
    assert vllm.memory.copying.wait(60)
    return request


def test_a_prompt_is_stored_once_and_its_next_request_takes_all_whole_blocks_from_the_pool(mini: MiniVllm) -> None:
    ids = stored(mini, "plain")
    again = mini.add(MiniRequest("again", ids, kv_transfer_params={"kvbus": {}}))
    mini.run(again)
    assert again.answer == right_answer(ids)
    assert again.says == {"kvbus": {"external_tokens": 5 * BLOCK}}
    assert mini.scheduling.counts["stores"] == 1
    mini.settle()


def test_a_prompt_of_whole_blocks_leaves_its_last_token_to_be_computed(mini: MiniVllm) -> None:
    ids = ids_of("whole", 4, extra=0)
    mini.run(mini.add(MiniRequest("first", ids)))
    again = mini.add(MiniRequest("again", ids))
    mini.run(again)
    assert again.external_tokens == 3 * BLOCK
    assert again.answer == right_answer(ids)
    mini.settle()


# What others suffer from ---------------------------------------------------------------------------------------------


def test_class_1_blocks_that_were_reused_under_a_copy_are_found_under_no_name(mini: MiniVllm) -> None:
    ids, other = ids_of("victim", 5), ids_of("other", 5)
    mini.memory.going.clear()
    victim = mini.add(MiniRequest("victim", ids, max_tokens=10))
    mini.step()
    assert mini.memory.copying.wait(60)
    mini.free.clear()
    mini.preempt(victim)
    usurper = MiniRequest("usurper", other)
    mini._waiting.insert(0, usurper)
    mini.requests["usurper"] = usurper
    mini.scheduling.arrived(usurper)
    mini.step()
    assert set(usurper.blocks) & set(range(7))
    mini.memory.going.set()
    mini.free += range(7, 32)
    mini.run(victim, usurper)
    assert victim.answer == right_answer(ids)
    mini.settle()
    assert mini.desk.held(tuple(ids), "") == 0
    assert mini.scheduling.counts["voided"] == 1


def test_class_3_a_late_load_lands_in_no_other_request(mini: MiniVllm) -> None:
    ids = stored(mini, "late")
    request = parked(mini, "aborted", ids)
    mine = set(request.blocks)
    mini.abort(request)
    other = mini.add(MiniRequest("other", ids_of("other", 3), max_tokens=1))
    mini.run(other)
    assert not mine & set(mini.free), "the blocks are written until the copy has ended"
    assert other.answer == right_answer(other.prompt_token_ids)
    mini.memory.going.set()
    mini.settle()


def test_class_4_an_aborted_load_keeps_its_blocks_until_it_has_ended_and_is_reported_once(mini: MiniVllm) -> None:
    ids = stored(mini, "early")
    request = parked(mini, "aborted", ids)
    mini.abort(request)
    for _ in range(5):
        mini.step()
    assert "aborted" in mini.requests
    mini.memory.going.set()
    mini.settle()
    assert mini.scheduling.counts["untracked"] == 0


def test_class_9_a_worker_that_dies_under_a_load_gives_all_blocks_back_and_the_prompt_is_computed(
    mini: MiniVllm,
) -> None:
    ids = stored(mini, "dies")
    mini.calls.closed.set()
    request = mini.add(MiniRequest("request", ids))
    mini.run(request)
    assert request.answer == right_answer(ids)
    mini.settle()


def test_class_11_and_12_an_abort_while_blocks_are_copied_out_frees_them_under_the_same_id_once_that_ends(
    mini: MiniVllm,
) -> None:
    mini.memory.going.clear()
    request = mini.add(MiniRequest("aborted", ids_of("aborted", 5), max_tokens=50))
    mini.step()
    assert mini.memory.copying.wait(60)
    mini.abort(request)
    for _ in range(5):
        mini.step()
    assert len(request.blocks) > 0, "what is copied out is not freed"
    mini.memory.going.set()
    mini.settle()


def test_class_13_a_late_or_double_completion_reaches_no_assertion(mini: MiniVllm) -> None:
    ids = stored(mini, "twice")
    again = mini.add(MiniRequest("again", ids))
    mini.run(again)
    mini.settle()
    kept = mini.scheduling.heard(Report(sent={"again", "never"}, received={"again", "first twice"}))
    assert kept == Report()
    assert mini.scheduling.counts["untracked"] == 3


def test_class_14_the_schedulers_side_ends_a_request_that_its_own_side_never_ordered_anything_for(
    mini: MiniVllm,
) -> None:
    mini.lookups.slow = True
    request = mini.add(MiniRequest("waits", ids_of("waits", 3)))
    mini.step()
    assert request.status == "waiting"
    mini.abort(request)
    assert mini.scheduling.finished(request) == (False, None), "called again, it has nothing to say"
    mini.settle()


def test_class_16_a_copy_that_fails_is_reported_and_the_tail_is_computed(mini: MiniVllm) -> None:
    ids = stored(mini, "fails")
    mini.memory.fails = True
    request = mini.add(MiniRequest("request", ids))
    mini.run(request)
    assert request.answer == right_answer(ids)
    assert mini.mover.counts["failed"] == 1
    mini.memory.fails = False
    mini.settle()


def test_class_21_a_full_queue_makes_nobody_wait_and_ends_what_it_turns_away(mini: MiniVllm) -> None:
    ids = stored(mini, "full")
    request = parked(mini, "parked", ids)
    for row in range(ORDERS_MAX + 5):
        mini.mover.load(Load(f"more {row}", b"", "", 0, (row,)))
    turned_away = mini.mover.take_ended()
    assert [one.request_id for one in turned_away] == [f"more {row}" for row in range(ORDERS_MAX, ORDERS_MAX + 5)]
    assert mini.mover.counts["turned_away"] == 5
    mini.abort(request)
    mini.memory.going.set()
    wait_until(lambda: len(mini.mover.take_ended()) == 0 and mini.mover.is_quiet)
    mini.scheduling.heard(Report(received={"parked"}))


def test_class_23_a_worker_that_starts_anew_has_another_pool_and_a_copy_under_way_ends_in_the_old_one(
    mini: MiniVllm,
) -> None:
    ids, later = ids_of("under way", 5), ids_of("later", 4)
    mini.memory.going.clear()
    under_way = mini.add(MiniRequest("under way", ids))
    mini.step()
    assert mini.memory.copying.wait(60)
    fresh = MiniVllm(desk=SmallDesk(16))
    before = fresh.desk.pool.memory.whole.copy()
    mini.calls.closed.set()
    mini.mover.detach()
    mini.lookups.desk = fresh.desk
    calls = Calls(fresh.desk)
    mini.mover.attach(Session(calls, fresh.desk.pool.memory))
    mini.memory.going.set()
    mini.run(under_way)
    mini.until(lambda: mini.scheduling.is_idle)
    assert (fresh.desk.pool.memory.whole == before).all()
    assert calls.made == 0, "what the old worker granted is given back to nobody else"

    request = mini.add(MiniRequest("request", later))
    mini.run(request)
    mini.until(lambda: mini.scheduling.is_idle)
    assert fresh.desk.held(tuple(later), "") == 4
    assert len(mini.free) == 32
    fresh.desk.check_nothing_held()
    fresh.close()


# Names ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "unlike",
    [{"lora_request": object()}, {"mm_features": [object()]}],
    ids=["an adapter", "an image"],
)
def test_what_page_names_do_not_cover_is_neither_found_nor_stored(mini: MiniVllm, unlike: dict[str, object]) -> None:
    ids = stored(mini, "names")
    request = mini.add(MiniRequest("unlike", ids, **unlike))  # type: ignore[arg-type] # one of the two
    other = mini.add(MiniRequest("other", ids_of("unseen", 4), **unlike))  # type: ignore[arg-type]
    mini.run(request, other)
    assert request.external_tokens == 0
    assert mini.desk.held(tuple(other.prompt_token_ids), "") == 0
    mini.settle()


def test_another_salt_is_another_prompt(mini: MiniVllm) -> None:
    ids = stored(mini, "salt")
    request = mini.add(MiniRequest("salted", ids, cache_salt="theirs"))
    mini.run(request)
    assert request.external_tokens == 0
    mini.settle()
    assert mini.desk.held(tuple(ids), "theirs") == 5


def test_a_request_that_needs_its_prompt_computed_loads_nothing(mini: MiniVllm) -> None:
    ids = stored(mini, "computed")
    request = mini.add(MiniRequest("request", ids, skip_reading_prefix_cache=True))
    mini.run(request)
    assert request.external_tokens == 0
    mini.settle()


def test_other_weights_forget_what_was_stored_before_anything_new_is(mini: MiniVllm) -> None:
    ids = stored(mini, "weights")
    mini.scheduling.forget()
    mini.step()
    wait_until(lambda: mini.desk.held(tuple(ids), "") == 0)
    request = mini.add(MiniRequest("request", ids))
    mini.run(request)
    assert request.external_tokens == 0
    mini.settle()


# Policies and refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "asked", "blocks"),
    [("every", None, 3), ("every", False, 0), ("asked", None, 0), ("asked", True, 3), ("none", True, 0)],
)
def test_a_prompt_is_stored_by_policy_and_by_what_its_request_asks(
    *, policy: str, asked: bool | None, blocks: int
) -> None:
    vllm = MiniVllm(store=policy)
    params: dict[str, object] | None = None if asked is None else {"kvbus": {"store": asked}}
    ids = ids_of("policy", 3)
    vllm.run(vllm.add(MiniRequest("request", ids, kv_transfer_params=params)))
    vllm.settle()
    assert vllm.desk.held(tuple(ids), "") == blocks
    vllm.close()


def test_a_mark_that_nobody_gave_out_stores_nothing_where_nothing_is_stored_and_one_that_was_keeps_its_handle() -> None:
    vllm = MiniVllm(store="none")
    ids = ids_of("marked", 3)
    vllm.run(vllm.add(MiniRequest("client", ids, kv_transfer_params={"kvbus": {"store": True, "mark": "guessed"}})))
    vllm.settle()
    assert vllm.desk.held(tuple(ids), "") == 0
    waiting = vllm.mover.expect("given out")
    vllm.run(vllm.add(MiniRequest("ours", ids, kv_transfer_params={"kvbus": {"store": True, "mark": "given out"}})))
    kept = waiting.get(timeout=10)
    assert (kept.held_before, kept.blocks, kept.refused) == (0, 3, "")
    vllm.mover.give_back(kept)
    vllm.mover.expect_no_more("given out", waiting)
    wait_until(lambda: vllm.desk.stats()["handles"] == 0)
    vllm.settle()
    vllm.close()


def test_a_client_that_says_nonsense_about_kvbus_is_served_as_if_it_had_said_nothing(mini: MiniVllm) -> None:
    nonsense: list[dict[str, object]] = [
        {"kvbus": 7},
        {"kvbus": {"store": "yes", "reuse": 3, "mark": [1]}},
        {"else": 1},
    ]
    for row, params in enumerate(nonsense):
        ids = ids_of(f"nonsense {row}", 2)
        mini.run(mini.add(MiniRequest(f"request {row}", ids, kv_transfer_params=params)))
        mini.settle()
        assert mini.desk.held(tuple(ids), "") == 2


def test_a_full_pool_costs_only_the_storing() -> None:
    small = MiniVllm(pages=3)
    ids = ids_of("large", 5)
    request = small.add(MiniRequest("request", ids))
    small.run(request)
    assert request.answer == right_answer(ids)
    small.settle()
    small.close()


def test_without_a_worker_look_ups_cost_nothing_and_nobody_is_asked_to_wait(mini: MiniVllm) -> None:
    # R23
    mini.mover.detach()
    mini.lookups.away = True
    ids = ids_of("alone", 4)
    request = mini.add(MiniRequest("request", ids, max_tokens=1))
    mini.step()
    assert request.made == 1, "scheduled in its first step"
    mini.settle()


def test_a_slow_worker_is_waited_for_no_longer_than_its_budget_and_then_asked_nothing_more(mini: MiniVllm) -> None:
    mini.lookups.slow = True
    request = mini.add(MiniRequest("request", ids_of("slow", 4), max_tokens=1))
    mini.step()
    assert request.status == "waiting"
    mini.time = 0.3
    mini.step()
    assert request.made == 1
    assert mini.lookups.late == 1
    mini.settle()


def test_a_request_loads_once_and_a_load_of_nothing_pauses_look_ups_for_a_while(mini: MiniVllm) -> None:
    ids = stored(mini, "evicted")
    real, mini.calls.match = mini.calls.match, lambda ids, salt: real(ids[:0], salt)  # type: ignore[method-assign]
    request = mini.add(MiniRequest("request", ids))
    mini.run(request)
    assert request.answer == right_answer(ids)
    assert mini.scheduling.counts["loads"] == 1
    mini.calls.match = real  # type: ignore[method-assign]
    asked = len(mini.lookups.asked)
    mini.run(mini.add(MiniRequest("at once", ids)))
    assert len(mini.lookups.asked) == asked
    mini.time += FAILED_PAUSE_S[0]
    later = mini.add(MiniRequest("later", ids))
    mini.run(later)
    assert later.external_tokens == 5 * BLOCK
    mini.settle()


def test_an_idle_step_makes_no_orders_and_no_report(mini: MiniVllm) -> None:
    request = mini.add(MiniRequest("decodes", ids_of("decodes", 3), max_tokens=1000))
    mini.step()
    mini.until(lambda: not mini.working.is_busy)
    mini.step()
    assert mini.scheduling.orders({"decodes": 1}, lambda _: None) is NO_ORDERS
    assert mini.working.report() is None
    mini.abort(request)
    mini.settle()


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_every_answer_is_right_and_everything_comes_back(seed: int) -> None:
    pick = random.Random(seed)
    vllm = MiniVllm(24, pages=pick.choice([6, 20, 64]), chunk=pick.choice([11, 20, 4096]))
    prompts = [ids_of(f"prompt {row}", pick.randrange(0, 6), pick.randrange(BLOCK)) or [1] for row in range(6)]
    alive: list[MiniRequest] = []
    everyone: list[MiniRequest] = []
    for turn in range(120):
        event = pick.random()
        if event < 0.3 and len(alive) < 6:
            request = MiniRequest(f"r{turn}", pick.choice(prompts), max_tokens=pick.randrange(1, 9))
            alive.append(vllm.add(request))
            everyone.append(request)
        elif event < 0.38 and alive:
            vllm.abort(pick.choice(alive))
        elif event < 0.45 and (running := [one for one in alive if one.status == "running"]):
            vllm.preempt(pick.choice(running))
        elif event < 0.5:
            vllm.lookups.away = pick.random() < 0.3
        elif event < 0.53:
            vllm.desk.evict(tuple(pick.choice(prompts)), "")
        vllm.time += 0.01
        vllm.step()
        if pick.random() < 0.5:
            vllm.until(lambda: vllm.mover.is_quiet)
        alive = [one for one in alive if one.status != "finished"]
    vllm.run(*alive)
    vllm.settle()
    vllm.lookups.away = False
    vllm.time += FAILED_PAUSE_S[1]
    ids = stored(vllm, "behind all of it", 3)
    everyone.append(vllm.add(MiniRequest("last", ids)))
    vllm.run(everyone[-1])
    assert everyone[-1].external_tokens == 3 * BLOCK, "whatever happened, the connector still loads"
    vllm.settle()
    vllm.close()
    for request in everyone:
        assert not request.answer or request.answer == right_answer(request.prompt_token_ids), request.request_id
