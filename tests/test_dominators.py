from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_gpumem.dominators import immediate_dominators

graphs = st.integers(1, 12).flatmap(
    lambda size: st.lists(st.lists(st.integers(0, size - 1), max_size=4), min_size=size, max_size=size)
)


def reachable(successors: list[list[int]], without: int | None = None) -> set[int]:
    found = {0} - {without}
    stack = list(found)
    while stack:
        for target in successors[stack.pop()]:
            if target != without and target not in found:
                found.add(target)
                stack.append(target)
    return found


@settings(max_examples=1500, deadline=None)
@given(graphs)
def test_they_are_those_of_the_definition(successors: list[list[int]]) -> None:
    found = immediate_dominators(successors)
    everything = reachable(successors)
    for node in range(len(successors)):
        if node not in everything:
            assert found[node] == -1
            continue
        chain = {node}
        step = node
        while step:
            step = found[step]
            chain.add(step)
        assert chain == {other for other in everything if other == node or node not in reachable(successors, other)}


def test_a_chain_of_a_hundred_thousand_that_shares_its_end_needs_no_recursion() -> None:
    size = 100_000
    successors = [[index + 1, size] for index in range(size - 1)] + [[size], []]
    found = immediate_dominators(successors)
    assert found[size] == 0
    assert found[size - 1] == size - 2
