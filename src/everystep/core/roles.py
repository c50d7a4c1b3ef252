"""What a shadow is to its run, and what changes that. `TABLE` is the whole machine.

Two facts stand beside the role. Whether the trainer lives: a shadow may follow or yield without one, too.
Whether the shadow before has gone: until then that one may still change memory that was adopted from it.
"""

from __future__ import annotations

from enum import StrEnum

from everystep.errors import EverystepError


class Role(StrEnum):
    FOLLOWING = "following"  # it takes records in; another shadow, or nobody, speaks for the run
    SPEAKING = "speaking"  # its card is the run's, and its trainer lives
    ORPHANED = "orphaned"  # its card is the run's, and its trainer is gone: last words, then idle
    YIELDED = "yielded"  # its memory was handed over: it changes no byte of it any more
    LEAVING = "leaving"  # the loop ends


class RoleEvent(StrEnum):
    SPEAKS = "speaks"  # it puts its card in the place of its predecessor's
    TRAINER_GONE = "trainer_gone"  # ended, or left the run
    YIELDS = "yields"  # the next trainer asked for its state
    RETIRED = "retired"  # another shadow speaks from now on, or nobody needs this one
    CLOSED = "closed"  # all is durable, and nobody comes back
    ENDS = "ends"  # nothing is left to do here, or nothing can be done


TABLE: dict[tuple[Role, RoleEvent], Role] = {
    (Role.FOLLOWING, RoleEvent.SPEAKS): Role.SPEAKING,
    (Role.FOLLOWING, RoleEvent.TRAINER_GONE): Role.FOLLOWING,
    (Role.FOLLOWING, RoleEvent.RETIRED): Role.LEAVING,
    (Role.FOLLOWING, RoleEvent.ENDS): Role.LEAVING,
    (Role.SPEAKING, RoleEvent.TRAINER_GONE): Role.ORPHANED,
    (Role.SPEAKING, RoleEvent.YIELDS): Role.YIELDED,
    (Role.SPEAKING, RoleEvent.RETIRED): Role.LEAVING,
    (Role.SPEAKING, RoleEvent.CLOSED): Role.LEAVING,
    (Role.SPEAKING, RoleEvent.ENDS): Role.LEAVING,
    (Role.ORPHANED, RoleEvent.YIELDS): Role.YIELDED,
    (Role.ORPHANED, RoleEvent.RETIRED): Role.LEAVING,
    (Role.ORPHANED, RoleEvent.CLOSED): Role.LEAVING,
    (Role.ORPHANED, RoleEvent.ENDS): Role.LEAVING,
    (Role.YIELDED, RoleEvent.TRAINER_GONE): Role.YIELDED,
    (Role.YIELDED, RoleEvent.YIELDS): Role.YIELDED,  # the trainer that took it died, too
    (Role.YIELDED, RoleEvent.RETIRED): Role.LEAVING,
    (Role.YIELDED, RoleEvent.CLOSED): Role.LEAVING,
    (Role.YIELDED, RoleEvent.ENDS): Role.LEAVING,
}


class ForbiddenTransition(EverystepError):
    """A fault of ours: the role stays what it was."""


def advance(role: Role, event: RoleEvent) -> Role:
    """The role after that event. Who is leaving leaves, whatever comes."""
    if role is Role.LEAVING:
        return role
    if (role, event) not in TABLE:
        known = ", ".join(e for r, e in TABLE if r is role)
        raise ForbiddenTransition(f"a shadow that is {role}: found {event}, expected {known}")
    return TABLE[role, event]
