"""The switch: off after a fruitless streak, probing with doubling waits, full drafts after success."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specflow.policies.switch import Experience, Switch, SwitchState


def switch(max_draft: int = 8) -> Switch:
    """A switch with the default waits."""
    return Switch(max_draft, first_wait=16, max_wait=256)


def rest(chain: Switch) -> int:
    """Rounds until a probe is due."""
    rounds = 0
    while not chain.probe_due:
        chain.rested()
        rounds += 1
    return rounds


def test_nothing_known_starts_short_and_success_opens_up() -> None:
    """A new chain drafts two items; the first accepted draft allows the full length."""
    chain = switch()
    assert (chain.state, chain.limit) == (SwitchState.ON, 2)
    chain.won()
    assert chain.limit == 8


def test_a_fruitless_streak_shortens_drafts_and_then_turns_off() -> None:
    """Sure drafts that all fail get shorter by halves and end after PATIENCE of them."""
    chain = switch()
    chain.won()
    limits = []
    while chain.is_on:
        limits.append(chain.limit)
        chain.lost(1.0)
    assert limits == [8, 8, 4, 2, 1]
    assert (chain.state, chain.limit) == (SwitchState.OFF, 0)


@given(st.floats(0.05, 1.0))
def test_patience_is_measured_in_expected_acceptances(charge: float) -> None:
    """A drafter that promises less is given proportionally more rounds before it is switched off."""
    chain = switch()
    rounds = 0
    while chain.is_on:
        chain.lost(charge)
        rounds += 1
    assert abs(rounds * charge - Switch.PATIENCE) <= charge + 1e-9


def test_success_pays_the_debt() -> None:
    """Failures that are not in a row do not switch off."""
    chain = switch()
    for _ in range(50):
        chain.lost(1.0)
        chain.lost(1.0)
        chain.won()
    assert chain.is_on
    assert chain.limit == 8


def test_waits_double_with_each_fruitless_probe_up_to_the_longest() -> None:
    """Probes come after 16, 32, 64, 128, 256, 256 rounds, each of two single items."""
    chain = switch()
    chain.turn_off("test")
    waits = []
    for _ in range(6):
        waits.append(rest(chain))
        assert (chain.state, chain.limit) == (SwitchState.PROBING, 1)
        chain.probed(accepted=False)
        assert chain.probe_due, "one more try"
        chain.probed(accepted=False)
        assert chain.state is SwitchState.OFF
    assert waits == [16, 32, 64, 128, 256, 256]


def test_a_successful_probe_turns_on_with_short_drafts() -> None:
    """After a probe is accepted drafts are short; an ordinary success opens up and resets the wait."""
    chain = switch()
    chain.turn_off("test")
    rest(chain)
    chain.probed(accepted=True)
    assert (chain.state, chain.limit, chain.wait) == (SwitchState.ON, 2, 32)
    chain.won()
    assert (chain.limit, chain.wait) == (8, 16)


def test_a_lucky_probe_does_not_reset_the_wait() -> None:
    """A chain that fails again after a probe succeeded waits longer than before."""
    chain = switch()
    chain.turn_off("test")
    rest(chain)
    chain.probed(accepted=True)
    while chain.is_on:
        chain.lost(1.0)
    assert rest(chain) == 32


def test_a_chain_that_is_on_can_be_probed_and_stays_on() -> None:
    """Where nothing seemed worth executing for the wait, a probe is due although the chain is on."""
    chain = switch()
    chain.won()
    rest(chain)
    assert chain.state is SwitchState.ON
    chain.probed(accepted=True)
    assert (chain.limit, chain.probe_due, chain.wait) == (8, False, 32)


@pytest.mark.parametrize("max_draft", [0, 1, 2, 3, 16])
def test_limits_stay_within_the_longest_draft(max_draft: int) -> None:
    """No state asks for more than max_draft, except that a probe is one item."""
    chain = switch(max_draft)
    assert chain.limit <= max_draft
    chain.won()
    assert chain.limit == max_draft


def test_new_chains_inherit_that_the_drafter_is_useless() -> None:
    """After a fruitless streak over short chains a new one starts off, with the wait already behind it."""
    experience = Experience(first_wait=16)
    for _ in range(5):
        experience.lost(1.0)
    experience.probed(64, accepted=False)
    for _ in range(20):
        experience.rested()
    chain = switch()
    experience.introduce(chain)
    assert chain.state is SwitchState.OFF
    assert rest(chain) == 44


def test_new_chains_inherit_that_the_drafter_works() -> None:
    """After an ordinary success elsewhere a new chain starts with full drafts, after a lucky probe with short ones."""
    experience = Experience(first_wait=16)
    experience.won()
    chain = switch()
    experience.introduce(chain)
    assert chain.limit == 8
    experience.probed(32, accepted=True)
    chain = switch()
    experience.introduce(chain)
    assert chain.limit == 2
