"""The server whose calls share its speed: times worked by hand."""

import pytest

from gyre_core.sim.engine import Server
from gyre_core.sim.model import INFINITE, Costs

COSTS = Costs(nodes_per_engine=1.0, alpha_s=1.0, beta_s=1.0)  # a token takes 1 + calls seconds


def test_one_call_takes_its_tokens_at_load_one() -> None:
    server = Server(COSTS, nodes=1)
    server.start("a", 10.0, 0.0, 0.0)
    assert server.next_s == 20.0  # 10 tokens of 1 + 1 s


def test_second_call_slows_the_first_and_its_end_speeds_it_up_again() -> None:
    server = Server(COSTS, nodes=1)
    server.start("a", 10.0, 0.0, 0.0)
    server.start("b", 2.0, 0.0, 8.0)  # a has 6 tokens left; both now take 3 s a token
    assert server.next_s == pytest.approx(14.0)
    assert server.ended(14.0) == "b"
    assert server.next_s == pytest.approx(14.0 + 4 * 2)  # a has 4 left, alone again


def test_two_engines_of_a_cell_share_its_calls() -> None:
    server = Server(COSTS, nodes=2)
    server.start("a", 10.0, 0.0, 0.0)
    server.start("b", 10.0, 0.0, 0.0)
    assert server.next_s == 20.0  # one call an engine


def test_call_that_leaves_tells_what_it_has_not_sampled() -> None:
    server = Server(COSTS, nodes=1)
    server.start("a", 10.0, 5.0, 0.0)
    assert server.stop("a", 6.0) == pytest.approx(7.0)
    assert (server.next_s, server.context, len(server.active)) == (INFINITE, 0.0, 0)


def test_call_that_comes_back_is_not_ended_by_its_old_mark() -> None:
    server = Server(COSTS, nodes=1)
    server.start("a", 1.0, 0.0, 0.0)
    server.start("b", 100.0, 0.0, 0.0)
    server.stop("a", 0.0)
    server.start("a", 50.0, 0.0, 0.0)
    assert server.next_s == pytest.approx(150.0)  # 50 tokens at 1 + 2 s, not 1


def test_full_memory_makes_calls_take_turns() -> None:
    server = Server(Costs(nodes_per_engine=1.0, alpha_s=1.0, beta_s=0.0, kv_tokens=100.0), nodes=1)
    server.start("a", 10.0, 100.0, 0.0)
    server.start("b", 10.0, 100.0, 0.0)
    assert server.next_s == pytest.approx(20.0)  # half of them fit at a time


def test_paused_engine_ends_nothing_and_goes_on_where_it_was() -> None:
    server = Server(COSTS, nodes=1)
    server.start("a", 10.0, 0.0, 0.0)
    server.pause(4.0, True)
    assert server.next_s == INFINITE
    server.pause(104.0, False)
    assert server.next_s == pytest.approx(120.0)
