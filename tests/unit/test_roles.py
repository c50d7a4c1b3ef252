"""The table of the shadow's roles: what it allows, and what it must never allow."""

from __future__ import annotations

import itertools

import pytest

from everystep.core.roles import TABLE, ForbiddenTransition, Role, RoleEvent, advance


def test_a_life_from_attach_to_close() -> None:
    role = Role.FOLLOWING
    for event in (RoleEvent.SPEAKS, RoleEvent.CLOSED):
        role = advance(role, event)
    assert role is Role.LEAVING


def test_a_life_that_outlives_its_trainer_and_hands_over() -> None:
    seen, role = [], Role.FOLLOWING
    for event in (RoleEvent.SPEAKS, RoleEvent.TRAINER_GONE, RoleEvent.YIELDS, RoleEvent.RETIRED):
        role = advance(role, event)
        seen.append(role)
    assert seen == [Role.SPEAKING, Role.ORPHANED, Role.YIELDED, Role.LEAVING]


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.LEAVING])
def test_every_role_can_be_reached_and_left(role: Role) -> None:
    """A shadow can be retired, and can end by itself, whatever it is."""
    assert role is Role.FOLLOWING or role in TABLE.values()
    for event in (RoleEvent.RETIRED, RoleEvent.ENDS):
        assert advance(role, event) is Role.LEAVING


def test_a_role_is_told_from_a_fact() -> None:
    """That the trainer is gone is known in every role, and makes an orphan of who speaks alone."""
    assert advance(Role.FOLLOWING, RoleEvent.TRAINER_GONE) is Role.FOLLOWING
    assert advance(Role.YIELDED, RoleEvent.TRAINER_GONE) is Role.YIELDED


def test_nobody_goes_back() -> None:
    order = [Role.FOLLOWING, Role.SPEAKING, Role.ORPHANED, Role.YIELDED, Role.LEAVING]
    for (before, _), after in TABLE.items():
        assert order.index(after) >= order.index(before)


def test_who_is_leaving_leaves() -> None:
    assert all(advance(Role.LEAVING, event) is Role.LEAVING for event in RoleEvent)


def test_what_the_table_does_not_name_is_forbidden_in_words() -> None:
    roles = [role for role in Role if role is not Role.LEAVING]
    forbidden = [pair for pair in itertools.product(roles, RoleEvent) if pair not in TABLE]
    assert (Role.FOLLOWING, RoleEvent.YIELDS) in forbidden, "its memory may be another's"
    for role, event in forbidden:
        with pytest.raises(ForbiddenTransition, match=f"{role}: found {event}, expected .*ends"):
            advance(role, event)
