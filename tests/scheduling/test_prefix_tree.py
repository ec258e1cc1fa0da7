"""The prefix plan against a slow trie, on random prompts."""

from hypothesis import given
from hypothesis import strategies as st

from flexgen_helm.scheduling.prefix_tree import (
    MAX_DEPTH,
    PrefixCostModel,
    PrefixNode,
    Prompt,
    plan_prefixes,
)

ENDLESS = 1 << 40
FREE = PrefixCostModel(ENDLESS, 0)
prompts = st.lists(
    st.builds(
        Prompt,
        st.lists(st.integers(0, 2), min_size=1, max_size=12),
        st.booleans(),
        st.integers(0, 3),
    ),
    max_size=14,
)


def walk(members, parent=None):
    """(prefix or index, parent) of a whole forest, in order."""
    for member in members:
        yield member, parent
        if isinstance(member, PrefixNode):
            yield from walk(member.members, member)


def fed(forest, prompts):
    """Tokens that are computed: those of prefixes once, of every prompt the rest."""
    total = 0
    for member, parent in walk(forest):
        if isinstance(member, PrefixNode):
            total += member.end - member.start
        else:
            total += len(prompts[member].tokens) - (parent.end if parent is not None else 0)
    return total


@given(prompts, st.integers(0, 8), st.integers(2, 12), st.integers(1, 4), st.integers(0, 3))
def test_a_forest_holds_every_prompt_once_under_prefixes_of_its_own(
    prompts, overhead, room, group, beside
):
    forest = plan_prefixes(prompts, PrefixCostModel(room, overhead, group, beside))
    leaves = []
    for member, parent in walk(forest):
        if isinstance(member, int):
            leaves.append(member)
            continue
        assert member.parent is parent and 0 <= member.start < member.end <= room
        assert member.end % group == 0
        chain = len(list(ancestors(member)))
        assert member.end + chain * beside <= room
        for user in (prompts[index] for index in member.users):
            need = len(user.tokens) + user.steps + beside
            # Who has room in the cache alone has it with all of its prefixes.
            assert not user.steps or need > room or not beside or need + chain * beside <= room
        users = [prompts[index] for index in member.users]
        assert len(users) > 1 and sorted(member.users) == sorted(
            index for index, _ in walk(member.members) if isinstance(index, int)
        )
        assert all(len(user.tokens) > member.end for user in users)
        # Where scores are wanted, what the last token predicts is the same for all users too.
        same = member.end + any(user.scored for user in users)
        assert len({tuple(user.tokens[:same]) for user in users}) == 1
        assert member.saved >= overhead * (1 + max(user.steps for user in users))
    assert sorted(leaves) == list(range(len(prompts)))
    saved = sum(member.saved for member, _ in walk(forest) if isinstance(member, PrefixNode))
    assert fed(forest, prompts) == sum(len(prompt.tokens) for prompt in prompts) - saved


@given(
    st.lists(
        st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple), max_size=14, unique=True
    )
)
def test_without_overhead_every_shared_token_is_computed_once(tokens):
    """The trie's nodes; and where a prompt is the beginning of longer ones, they compute its last
    token.
    """
    nodes = {prompt[:end] for prompt in tokens for end in range(1, len(prompt) + 1)}
    asked = [Prompt(list(prompt), False, 0) for prompt in tokens]
    assert len(nodes) <= fed(plan_prefixes(asked, FREE), asked) <= len(nodes) + 2 * len(tokens)
    scored = [Prompt(list(prompt), True, 0) for prompt in tokens]
    # There every branch computes the last shared token again.
    assert fed(plan_prefixes(scored, FREE), scored) <= len(nodes) + 3 * len(tokens)


def test_what_saves_too_little_is_left():
    prompts = [Prompt([1, 2, 3, 4, 5, tail], False, steps) for tail, steps in ((6, 0), (7, 3))]
    (prefix,) = plan_prefixes(prompts, PrefixCostModel(ENDLESS, 1.25))
    assert isinstance(prefix, PrefixNode) and (prefix.start, prefix.end, prefix.saved) == (0, 5, 5)
    assert plan_prefixes(prompts, PrefixCostModel(ENDLESS, 1.3)) == [1, 0]
    assert plan_prefixes(prompts, PrefixCostModel(4, 0)) == [1, 0]
    # Behind it both feed a token of its own, and one draws three: five attend to it, for the five
    # that are saved.
    assert isinstance(
        plan_prefixes(prompts, PrefixCostModel(ENDLESS, 0, token_overhead=1.0))[0], PrefixNode
    )
    assert plan_prefixes(prompts, PrefixCostModel(ENDLESS, 0, token_overhead=1.01)) == [1, 0]


def test_the_longest_come_first_with_those_that_share_with_them():
    prompts = [
        Prompt(list(tokens), False, 0)
        for tokens in ((1, 2), (9, 1, 2, 3), (5, 5, 5), (9, 1), (1, 2, 8, 8, 8))
    ]
    first, second, third = plan_prefixes(prompts, FREE)
    assert isinstance(first, PrefixNode) and first.members == [4, 0]
    assert isinstance(second, PrefixNode) and second.members == [1, 3] and third == 2


def test_chains_of_prefixes_are_not_endless():
    prompts = [Prompt(list(range(1, end)), False, 0) for end in range(3, 1500)]
    forest = plan_prefixes(prompts, FREE)
    depth = max(
        len(list(ancestors(member))) for member, _ in walk(forest) if isinstance(member, PrefixNode)
    )
    assert depth == MAX_DEPTH


def ancestors(prefix):
    while prefix is not None:
        yield prefix
        prefix = prefix.parent
