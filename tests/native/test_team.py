"""The number of threads follows the times of forwards, which are given here."""

import random

from outrider.native.team import Team

_QUIET, _BESIDE = {2: 1.0, 1: 1.7}, {2: 30.0, 1: 1.8}  # seconds by the number of threads; beside a neighbour


def _run(team: Team, seconds: dict[int, float], num_forwards: int, num_threads: int = 2) -> list[int]:
    """Sizes of the team in forwards that take so long with so many threads."""
    sizes = []
    for _ in range(num_forwards):
        size = team.size(num_threads)
        team.learn("step", size, num_threads, seconds[size])
        sizes.append(size)
    return sizes


def test_a_quiet_machine_keeps_all_threads() -> None:
    """Also one that is slow by fits and starts, one late forward, and a longer context, whose forwards are another kind
    after some hundred places."""
    team = Team()
    assert _run(team, _QUIET, 500) == [2, 2, 2, 1, 1, 1] + [2] * 494
    _run(team, {2: 9.0}, 1)
    assert set(_run(team, _QUIET, 10)) == {2}
    for scatter in (0.1, 0.2, 0.3, 0.5):
        team, draw, sizes = Team(), random.Random(1), []
        for _ in range(4000):
            sizes.append(team.size(2))
            team.learn("step", sizes[-1], 2, {2: 1.0, 1: 1.33}[sizes[-1]] * draw.lognormvariate(0, scatter))
        assert sizes.count(2) > 0.85 * 4000
    team = Team()
    for step in range(2000):
        size = team.size(2)
        team.learn(step // 250, size, 2, (3 - size) * (1.0 + step / 500))
        assert size == 2 or step in (3, 4, 5)


def test_a_neighbour_costs_a_thread_until_it_is_gone() -> None:
    """With it, at most one forward in twenty has two threads; without, one with 64 forwards all have."""
    assert _run(Team(), _BESIDE, 60)[7:] == [1] * 53
    team = Team()
    _run(team, _QUIET, 100)
    beside = _run(team, _BESIDE, 4000)
    assert beside[:3] == [2, 2, 2] and beside[3:60] == [1] * 57
    assert beside.count(2) < 4000 // 20
    assert _run(team, _QUIET, 5000)[-1000:] == [2] * 1000


def test_of_many_threads_one_is_spared_at_a_time() -> None:
    team = Team()
    quiet = {8: 1.0, 7: 1.1, 6: 1.3}
    _run(team, quiet, 10, 8)
    assert _run(team, quiet | {8: 5.0}, 20, 8) == [8, 8, 8, 6, 6, 6] + [7] * 14
