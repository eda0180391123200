"""The rules of who goes next, from what users run today to one that knows the future.

``context`` puts first whoever may still need most: the cap less what is played. Seer's rule (arXiv 2511.14617,
algorithm 2) goes by the group's whole length instead. Where all limits are alike and failures reach them, as in LIBERO,
it plays groups with a failure to their ends first, and meets the failures of the others when nobody is left to share
the time with: 4 to 14 % slower than plain rounds there. What may be left is the same for all at the start, so
``context`` plays rounds where the limits are alike and the long tasks first where they are not. Estimates from siblings
must not replace that bound: a group that looks short and is left for the end holds the failure that ends last. They
decide between equals: whose siblings ended soonest goes first, so that who has outlived them shows early.
"""

from __future__ import annotations

from collections.abc import Mapping

from wamlab.rl.jobs import GroupNotes, Job, Rule, Score


def _in_order(job: Job, notes: GroupNotes) -> Score:
    return (0.0,)


def _longest_group(job: Job, notes: GroupNotes) -> Score:
    if job.member == 0 and not notes.num_finished:
        return (0.0, job.num_chunks)
    return (1.0, -notes.longest)


def _most_possible(job: Job, notes: GroupNotes) -> Score:
    return (job.num_chunks - notes.cap, notes.expected_left(job.num_chunks))


def _most_expected(job: Job, notes: GroupNotes) -> Score:
    return (-notes.expected_left(job.num_chunks),)


def _known_left(job: Job, notes: GroupNotes) -> Score:
    return (job.num_chunks - (job.true_length or job.cap),)


RULES: Mapping[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("padded", _in_order, is_divided=False, is_padded=True),
        Rule("static", _in_order, is_divided=False, is_pinned=True),
        Rule("fifo", _in_order, is_divided=False),
        Rule("rounds", _in_order),
        Rule("longest group", _longest_group, learns=True),
        Rule("expected", _most_expected, learns=True),
        Rule("context", _most_possible, learns=True),
        Rule("oracle", _known_left),
    )
}
